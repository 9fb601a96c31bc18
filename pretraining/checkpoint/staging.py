"""A second copy of what a process writes, so that training can go on while the copy is written.

The memory is taken at the first save and used again for every other: one copy, on the host, of this process's share.
On a GPU it is pinned, and the copies run beside the next step; only the next update, which would change what is being
copied, waits for them, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pretraining.checkpoint.layout import Share

# Pinned memory comes in powers of two: one allocation a tensor would waste up to half of it.
SLAB_BYTES = 2**28
ALIGNMENT_BYTES = 64


class Staging:
    """The second copy.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, share: Share) -> Share:
        """Copy the values of a share; on a GPU this only starts, and `wait` has to come before the copies are read.

        Args:
            share: with the same tensors each time. The copy of the time before is overwritten.
        """
        pieces = [piece for file in share.files.values() for piece in file]
        if not self._buffers:
            memory = _allocate([piece.values for piece in pieces], pinned=self._stream is not None)
            self._buffers = {piece.name: buffer for piece, buffer in zip(pieces, memory, strict=True)}
        if self._stream is None:
            for piece in pieces:
                self._buffers[piece.name].copy_(piece.values)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for piece in pieces:
                    self._buffers[piece.name].copy_(piece.values, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        files = {
            number: [replace(piece, values=self._buffers[piece.name]) for piece in file]
            for number, file in share.files.items()
        }
        return replace(share, files=files)

    def wait(self) -> None:
        """Let this thread wait until everything is copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold_update(self) -> None:
        """Let the device wait until everything is copied, before it does what comes next; call it ahead of updates."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _allocate(tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Memory on the host for each tensor, cut from slabs."""
    slabs: list[torch.Tensor] = []
    used: list[int] = []
    memory = []
    left = sum(_aligned(tensor.nbytes) for tensor in tensors)
    for tensor in tensors:
        size = _aligned(tensor.nbytes)
        slab = next((number for number, full in enumerate(used) if full + size <= slabs[number].numel()), len(slabs))
        if slab == len(slabs):
            slabs.append(torch.empty(max(size, min(left, SLAB_BYTES)), dtype=torch.uint8, pin_memory=pinned))
            used.append(0)
        memory.append(slabs[slab][used[slab] : used[slab] + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        used[slab] += size
        left -= size
    return memory


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
