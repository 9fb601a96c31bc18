"""How the tensors of a run get into checkpoints: here and now, or by a thread while the training goes on.

    training thread   save -> step, poll -> step, poll -> ... -> `poll` returns what was saved, or raises its error
    saving thread     write, commit, retention, talking to the other ranks over a process group of its own

At most one save is under way. Ranks must see its end at the same step, or one would wait in a collective alone. So each
`poll` offers whether this rank's thread has ended and reads what all offered a step ago; no rank waits for another.

What the thread writes is a second copy (`Staging`). Its memory, on the host, is taken at the first save and used again.
On a GPU it is pinned, and the copies run beside the next step; only the next update waits for them, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pretraining.checkpoint.completeness import is_finite
from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.manifest import Manifest, tensor_state
from pretraining.checkpoint.mirror import Mirror
from pretraining.checkpoint.pt_files import FullSave
from pretraining.checkpoint.retention import tidy_up
from pretraining.checkpoint.run_folder import CHECKPOINTS, Checkpoint, checkpoint_at, checkpoint_name, distinct_name
from pretraining.checkpoint.writer import Save, SavePlan, plan_save, save_checkpoint
from pretraining.config.training import CheckpointConfig
from pretraining.distributed.grad_norm import local_part
from pretraining.distributed.host_sync import DelayedMinimum
from pretraining.distributed.processes import on_every_rank, on_rank_zero
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT
from pretraining.errors import CheckpointError
from pretraining.optim.optimizer import materialise_state


class Saver:
    """Saves the tensors of a run into its folder; making one is a collective call, and so are all methods but `settle`.

    Args:
        config: names the run's folder.
        parameters: by name, as sharded.
        lease: checked before each commit; None = nobody else writes into the run's folder.
        timeout: after which a process that waits for the others of a background save gives up.
        mirror: copies checkpoints, which retention leaves alone until they are copied.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        lease: Lease | None = None,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
        mirror: Mirror | None = None,
    ) -> None:
        self._config, self._parameters, self._optimizer, self._lease = config, parameters, optimizer, lease
        self._mirror = mirror
        self._is_full = config.ckpt_format == "full"
        device = next(iter(parameters.values())).device
        is_async = config.async_save if config.async_save is not None else device.type == "cuda" and not self._is_full
        self._group = dist.new_group(backend="gloo", timeout=timeout) if is_async else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Checkpoint] | None = None
        self._agreement = DelayedMinimum()
        self._staging = staging = Staging(device)
        # An update must not change what is still being copied. (Through `self` the optimizer would hold itself.)
        optimizer.register_step_pre_hook(lambda *_: staging.hold_update())

    def save(self, manifest: Manifest, wait: bool) -> Checkpoint | None:
        """Save this moment; `manifest` describes it but for its files. There must be no save under way.

        Args:
            wait: whether to return once it is committed; otherwise only if saves are not in the background.

        Returns:
            What was saved; None if the save is under way.

        Raises:
            CheckpointError: it cannot be written, or with `wait`, a weight is not finite; on every rank alike.
        """
        if wait:
            on_every_rank(lambda: self._check_weights(manifest.step))
        folder = on_rank_zero(lambda: self._folder_for(manifest))
        tensors = self._tensors()
        if self._is_full:
            return self._write(folder, FullSave(tensors, manifest), manifest)
        plan = plan_save(tensors)
        if wait or self._group is None:
            return self._write(folder, self._staging.copy_if_pinned(plan), manifest)
        self._under_way = self._thread.submit(self._write, folder, self._staging.copy(plan), manifest, self._group)
        return None

    def poll(self) -> Checkpoint | None:
        """Return what was saved once the save under way has ended on every rank; call it once a step.

        Raises:
            CheckpointError: the save has failed, on every rank alike; once.
        """
        if self._under_way is None:
            return None
        return self.wait() if self._agreement.offer(self._under_way.done()) == [True] else None

    def wait(self) -> Checkpoint | None:
        """Wait for the save under way, if any, and return what was saved; raises as `poll`."""
        if self._under_way is None:
            return None
        self._agreement.forget()
        return on_every_rank(self.settle)

    def settle(self) -> Checkpoint | None:
        """Wait as `wait` does, without the other ranks: after an error of the training they may be elsewhere."""
        save, self._under_way, self._agreement = self._under_way, None, DelayedMinimum()
        return None if save is None else save.result()

    def close(self) -> None:
        """Leave the group of processes; no save is under way."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def tidy_up(self, newest: Path, group: dist.ProcessGroup | None = None) -> None:
        """Remove what is superseded, on rank 0, as of the newest checkpoint."""
        protected = () if self._mirror is None else self._mirror.protected
        on_rank_zero(lambda: tidy_up(self._config.folder, newest, self._config.keep_last, protected), group)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save, not copied; the same ones at each save."""
        if not any(self._optimizer.state.values()):
            materialise_state(self._optimizer)  # no update was made so far
        return tensor_state(self._parameters, self._optimizer)

    def _check_weights(self, step: int) -> None:
        """Raise a CheckpointError if a weight is not finite: the state in which an invocation ends is built upon."""
        bad = [name for name, weight in self._parameters.items() if not is_finite(local_part(weight.detach()))]
        if bad:
            raise CheckpointError(
                f"step {step} is not saved: {len(bad)} weights, {bad[0]} first, hold numbers that are not finite. "
                "Start from the newest checkpoint with a smaller --learning_rate or a longer --warmup_steps"
            )

    def _folder_for(self, manifest: Manifest) -> Path:
        """Return where to commit; two steps whose names are the same by rounding must not replace each other."""
        folder = self._config.folder / CHECKPOINTS / checkpoint_name(self._config.ckpt_name, manifest)
        there = checkpoint_at(folder)
        is_taken = there.kind is not None and there.step != manifest.step  # what nobody can read may go
        return folder.with_name(distinct_name(folder.name, manifest.step)) if is_taken else folder

    def _write(
        self, folder: Path, files: Save, manifest: Manifest, group: dist.ProcessGroup | None = None
    ) -> Checkpoint:
        self._staging.wait()
        save_checkpoint(folder, files, manifest, group=group, lease=self._lease)
        self.tidy_up(folder, group)
        return Checkpoint(folder, manifest.step, kind=manifest.kind)


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
        """Copy the values of a plan, which has the same tensors each time, over those of the time before.

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
            name: [replace(piece, values=self._buffers[piece.name]) for piece in file]
            for name, file in plan.files.items()
        }
        return replace(plan, files=files)

    def copy_if_pinned(self, plan: SavePlan) -> SavePlan:
        """Copy the values of a plan where pinned memory is there for it, as `copy`; else return the plan itself.

        A save that is waited for is faster from there than from memory that the driver has to pin piece by piece.
        """
        if self._stream is None or not self._buffers:
            return plan
        return self.copy(plan)

    def wait(self) -> None:
        """Wait until everything is copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold_update(self) -> None:
        """Make the device wait until everything is copied; call it ahead of updates."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _allocate(tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Return memory on the host for each tensor, cut from slabs."""
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
