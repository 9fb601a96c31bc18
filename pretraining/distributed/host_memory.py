"""Keeps the memory that a training step on a CPU gives back, for the next step to take again.

glibc's allocator returns large blocks to the system at once, and the free end of its heap whenever that is large. A
step allocates and frees the same hundreds of megabytes as the one before it, so it would have the system map and clear
every page again: a tenth of the time of a small model's step in bfloat16 (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4

_CHOICES_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Has glibc's allocator keep what it gets back; the process stays as large as it has been at most.

    Leaves alone what the user has set up (mallopt(3), GLIBC_TUNABLES). Does nothing to other allocators.

    Returns:
        Whether glibc has taken it.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name in os.environ for name in _CHOICES_OF_THE_USER):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    set_option(_M_MMAP_MAX, 0)  # no block has a mapping of its own
    return bool(set_option(_M_TRIM_THRESHOLD, -1))  # and the heap never shrinks
