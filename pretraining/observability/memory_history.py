"""Which line of the program made each allocation on a GPU: snapshots for https://pytorch.org/memory_viz.

PyTorch has this under names with an underscore only; its documentation ("Understanding CUDA Memory Usage") names no
others. Kept in this one file. Nothing here does anything without CUDA.
"""

from __future__ import annotations

from pathlib import Path

import torch

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
