"""What PyTorch has under private names only, in one place."""

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


def store_of_job(prefix: str) -> dist.Store:
    """A connection of its own to the key-value store that the processes met in; keys begin with `prefix`.

    Its own, because an operation that blocks holds up all others of a connection.
    """
    store: Any = distributed_c10d._get_default_store()
    return dist.PrefixStore(prefix, store.clone())


def set_timeout_of_group(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set after which a process that waits in a collective of the group gives up."""
    distributed_c10d._set_pg_timeout(timeout, group)


def recompute_in_backward(module: nn.Module, contexts: Callable[[], tuple[Any, Any]] | None = None) -> nn.Module:
    """A module that does the same as `module`, under the same names of parameters, but does not keep what is inside.

    Args:
        module: draws no random numbers: it must compute the same again.
        contexts: `context_fn` of `torch.utils.checkpoint.checkpoint`, to keep some results all the same.
    """
    # The compiler knows a context_fn only where it is not PyTorch's own default.
    selection: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint_wrapper(module, preserve_rng_state=False, **selection)


def round_in_compiled_code_as_outside() -> None:
    """Have compiled kernels round to bfloat16 wherever code that is not compiled does, for the rest of the process.

    They would keep float32 between operations that they fuse, and fuse other ones where a result is computed again.
    """
    from torch._inductor import config  # here, because it takes its time and few need it

    config.emulate_precision_casts = True


# TODO(merge): was pretraining.distributed.torch_private
# Which line of the program made each allocation on a GPU: snapshots for https://pytorch.org/memory_viz.
#
# PyTorch has this under names with an underscore only; its documentation ("Understanding CUDA Memory Usage") names no
# others. Kept in this one file. Nothing here does anything without CUDA.

MOST_ENTRIES = 200_000
"""Allocations and frees that are remembered; each takes a few kilobytes of the host's memory in a snapshot."""


def remember_allocations() -> None:
    """Begin to remember the stack of each allocation."""
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=MOST_ENTRIES)


def forget_allocations() -> None:
    """Remember no more."""
    torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """Write what is allocated now, and what was remembered of how it came about.

    Raises:
        OSError: the file cannot be written.
    """
    torch.cuda.memory._dump_snapshot(str(path))
