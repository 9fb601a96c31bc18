"""Saves that run in a thread while the training goes on, at most one at a time.

    training thread   start -> step, poll -> step, poll -> ... -> `poll` says done, or raises what went wrong
    saving thread     write, commit, talking to the other ranks over a process group of its own

Ranks must see the end at the same step, or one would wait in a collective alone. So while a save is under way, each
`poll` offers whether this rank's thread has ended and reads what all offered a step ago; no rank waits for another.

What is written is a second copy (`Staging`). Its memory, on the host, is taken at the first save and used again. On a
GPU it is pinned, and the copies run beside the next step; only the next update waits for them, on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pretraining.checkpoint.writer import SavePlan
from pretraining.distributed.processes import on_every_rank


class BackgroundSave:
    """One thread for saves, which writes what is staged; its methods are collective calls, but for `settle`.

    Args:
        timeout: after which a process that waits for the others of a save gives up.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.staging = Staging(device)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._offer: tuple[Any, torch.Tensor] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a save was started whose end `poll` and `wait` have not seen yet; the same on every rank."""
        return self._thread is not None

    def start(self, save: Callable[[dist.ProcessGroup], None]) -> None:
        """Runs `save` once everything is copied; it gets the group to talk over, and there must be none under way."""
        assert self._thread is None

        def run() -> None:
            try:
                self.staging.wait()
                save(self._group)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def poll(self) -> bool:
        """Whether the save under way has ended on every rank; raises as `wait`. Call it once a step."""
        if self._thread is None:
            return False
        ended = torch.tensor([not self._thread.is_alive()], dtype=torch.int32)
        work = dist.all_reduce(ended, op=dist.ReduceOp.MIN, async_op=True) if dist.get_world_size() > 1 else None
        offered, self._offer = self._offer, (work, ended)
        if offered is None or not _all_ended(offered):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Waits for the end of the save under way, if any.

        Raises:
            CheckpointError: it has failed, on every rank alike; once.
        """
        if self._thread is None:
            return
        if self._offer is not None:
            _all_ended(self._offer)
        failure = self.settle()

        def raise_failure() -> None:
            if failure is not None:
                raise failure

        on_every_rank(raise_failure)

    def settle(self) -> BaseException | None:
        """Lets the save under way end after an error of the training, without the other ranks; returns its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._offer = None
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Leaves the group of processes."""
        assert self._thread is None
        dist.destroy_process_group(self._group)


def _all_ended(offer: tuple[Any, torch.Tensor]) -> bool:
    work, ended = offer
    if work is not None:
        work.wait()
    return bool(ended)


# Pinned memory comes in powers of two: one allocation a tensor would waste up to half of it.
SLAB_BYTES = 2**28
ALIGNMENT_BYTES = 64


class Staging:
    """A second copy, on the host, of what a process writes from a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, plan: SavePlan) -> SavePlan:
        """Copies the values of a plan, which has the same tensors each time, over those of the time before.

        On a GPU this only starts the copies: `wait` has to come before they are read.
        """
        pieces = [piece for file in plan.files.values() for piece in file]
        if not self._buffers:
            memory = _allocate([piece.values for piece in pieces], pinned=self._stream is not None)
            self._buffers = {piece.name: buffer for piece, buffer in zip(pieces, memory, strict=True)}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # none on a CPU: the context does nothing
            for piece in pieces:
                self._buffers[piece.name].copy_(piece.values, non_blocking=True)
        if self._stream is not None:
            self._copied = self._stream.record_event()
        files = {
            number: [replace(piece, values=self._buffers[piece.name]) for piece in file]
            for number, file in plan.files.items()
        }
        return replace(plan, files=files)

    def copy_if_pinned(self, plan: SavePlan) -> SavePlan:
        """Copies the values of a plan and waits, where pinned memory is there for it; else returns the plan itself.

        A save that is waited for is faster from there than from memory that the driver has to pin piece by piece.
        """
        if self._stream is None or not self._buffers:
            return plan
        staged = self.copy(plan)
        self.wait()
        return staged

    def wait(self) -> None:
        """Waits until everything is copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold_update(self) -> None:
        """Makes the device wait until everything is copied; call it ahead of updates."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _allocate(tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Memory on the host for each tensor, cut from slabs."""
    rooms: list[torch.Tensor] = []  # what is left of each slab
    memory = []
    left = sum(_aligned(tensor.nbytes) for tensor in tensors)
    for tensor in tensors:
        size = _aligned(tensor.nbytes)
        number = next((number for number, room in enumerate(rooms) if size <= len(room)), len(rooms))
        if number == len(rooms):
            rooms.append(torch.empty(max(size, min(left, SLAB_BYTES)), dtype=torch.uint8, pin_memory=pinned))
        memory.append(rooms[number][: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        rooms[number] = rooms[number][size:]
        left -= size
    return memory


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
