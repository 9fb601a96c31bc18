"""Every use of PyTorch's private names, one function each."""

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
"""Allocations and frees in a memory snapshot; each takes a few kilobytes of host memory."""


def store_of_job(prefix: str) -> dist.Store:
    """Return a new connection to the key-value store of the rendezvous; keys begin with `prefix`.

    A blocking operation blocks its whole connection.
    """
    store: Any = distributed_c10d._get_default_store()
    return dist.PrefixStore(prefix, store.clone())


_kept_store: dist.Store | None = None


def keep_store_of_job() -> None:
    """Keep the key-value store of the rendezvous until this process exits, instead of an earlier store.

    Other processes may connect for their next run before this process has finished its last run. If this process serves
    the store, the server must keep running for them.
    """
    global _kept_store
    _kept_store = distributed_c10d._get_default_store()


def set_timeout_of_group(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives; public since torch 2.14."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks of a group, joined in the first dimension; the gradient is the sum over ranks."""
    from torch.distributed import _functional_collectives as collectives

    # The second name is that of torch before 2.13.
    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    gathered: torch.Tensor = gather(tensor.contiguous(), 0, group)
    return gathered


def recompute_in_backward(module: nn.Module, contexts: Callable[[], tuple[Any, Any]] | None = None) -> nn.Module:
    """Wrap a module so that backward recomputes its activations; parameters keep their names.

    The module must draw no random numbers. `contexts` is the `context_fn` of `torch.utils.checkpoint.checkpoint`, which
    selects results to keep.
    """
    # The compiler does not support PyTorch's default context_fn as an argument.
    selection: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint_wrapper(module, preserve_rng_state=False, **selection)


def round_compiled_like_eager() -> None:
    """Make compiled kernels round to bfloat16 wherever eager code does, for the rest of the process.

    Otherwise kernels keep float32 between fused operations, and a recomputation may fuse other operations.
    """
    from torch._inductor import config  # the import is slow, and seldom needed

    config.emulate_precision_casts = True


def free_pinned_memory() -> None:
    """Return unused pinned memory to the system; public in newer versions of torch."""
    if torch.cuda.is_initialized():
        free = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        free()


def start_recording_allocations() -> None:
    """Record the stack of each allocation on a GPU from now on ("Understanding CUDA Memory Usage")."""
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=MOST_ENTRIES)


def stop_recording_allocations() -> None:
    """Stop recording allocations."""
    torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """Write the current allocations on the GPU with their lines of code, for https://pytorch.org/memory_viz.

    Raises:
        OSError: the file cannot be written.
    """
    torch.cuda.memory._dump_snapshot(str(path))
