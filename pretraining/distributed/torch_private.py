"""What PyTorch has under private names only, in one place: each function says what it stands for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

MOST_ENTRIES = 200_000
"""Allocations and frees that a memory snapshot remembers; each takes a few kilobytes of the host's memory."""


def store_of_job(prefix: str) -> dist.Store:
    """Return a new connection to the key-value store that the processes met in; keys begin with `prefix`.

    An operation that blocks holds up all others of its connection.
    """
    store: Any = distributed_c10d._get_default_store()
    return dist.PrefixStore(prefix, store.clone())


_kept_store: dist.Store | None = None


def keep_store_of_job() -> None:
    """Keep the key-value store that the processes met in for as long as this process, in place of an earlier one.

    Where this process serves it, others may come for the next run before this one has left the last, and must not find
    a store that ends. The next run finds its server still there.
    """
    global _kept_store
    _kept_store = distributed_c10d._get_default_store()


def set_timeout_of_group(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set when a process that waits in a collective of the group gives up; public since torch 2.14."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def recompute_in_backward(module: nn.Module, contexts: Callable[[], tuple[Any, Any]] | None = None) -> nn.Module:
    """Wrap a module so that backward computes its activations again; parameters keep their names.

    The module must draw no random numbers. `contexts` is the `context_fn` of `torch.utils.checkpoint.checkpoint`, which
    keeps some results.
    """
    # The compiler knows a context_fn only where it is not PyTorch's own default.
    selection: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint_wrapper(module, preserve_rng_state=False, **selection)


def round_in_compiled_code_as_outside() -> None:
    """Make compiled kernels round to bfloat16 wherever eager code does, for the rest of the process.

    Otherwise they keep float32 between fused operations, and fuse differently where a result is computed again.
    """
    from torch._inductor import config  # here, because it takes its time and few need it

    config.emulate_precision_casts = True


def free_pinned_memory() -> None:
    """Return pinned memory that no tensor uses to the system; public in newer versions of torch."""
    if torch.cuda.is_initialized():
        free = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        free()


def remember_allocations() -> None:
    """Begin to remember the stack of each allocation on a GPU ("Understanding CUDA Memory Usage")."""
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=MOST_ENTRIES)


def forget_allocations() -> None:
    """End remembering allocations."""
    torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """Write what is allocated on the GPU now and by which lines, for https://pytorch.org/memory_viz.

    Raises:
        OSError: the file cannot be written.
    """
    torch.cuda.memory._dump_snapshot(str(path))
