"""Saver of a run's tensors, in the training thread or in a background thread.

    training thread     save -> step, poll -> step, poll -> ... -> `poll` returns the checkpoint, or raises the error
    background thread   write, commit, retention; with a process group of its own

At most one save runs. All ranks must notice its end at the same step, or a rank would wait alone in a collective. So
each `poll` sends whether this rank's thread is done, and reads what all ranks sent one step ago; no rank waits.

The background thread writes a copy of the tensors in host memory (`Staging`), which is allocated at the first save and
reused. On a GPU this memory is pinned, and copying overlaps the next step; only the next update waits, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pretraining.checkpoint.chunks import tensor_state
from pretraining.checkpoint.completeness import is_finite
from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.mirror import Mirror
from pretraining.checkpoint.own_checkpoints import apply_retention
from pretraining.checkpoint.pt_files import FullSave
from pretraining.checkpoint.run_folder import CHECKPOINTS, Checkpoint, checkpoint_at, checkpoint_name, distinct_name
from pretraining.checkpoint.writer import Save, SavePlan, plan_save, save_checkpoint
from pretraining.config.training import CheckpointConfig
from pretraining.distributed.grad_norm import local_part
from pretraining.distributed.host_sync import DelayedMinimum
from pretraining.distributed.processes import on_every_rank, on_rank_zero
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT
from pretraining.errors import CheckpointError
from pretraining.optim.optimizer import skips_on_device
from pretraining.optim.state import evaluation_mode, materialise_state


class Saver:
    """Saver of a run's tensors; all calls are collective, also the constructor, except `wait_on_this_rank`.

    Args:
        parameters: by name, as sharded.
        lease: checked before each commit; None = no other process writes into the run's folder.
        timeout: limit for a rank that waits for the other ranks in a background save.
        mirror: retention keeps a checkpoint until the mirror has copied it.
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
        self._running: Future[Checkpoint] | None = None
        self._sync = DelayedMinimum()
        self._staging = staging = Staging(device)
        # An update must not change tensors that are still being copied. (A reference to `self` would be a cycle.)
        optimizer.register_step_pre_hook(lambda *_: staging.hold_update())

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Return a context that puts the optimizer into evaluation mode, for the manifest and the save of a step."""
        return evaluation_mode(self._optimizer, self._staging.hold_update)

    def save(self, manifest: Manifest, wait: bool) -> Checkpoint | None:
        """Save this step; no other save may run.

        Args:
            manifest: manifest of the checkpoint, without its files.
            wait: whether to return only after the commit, also if saves run in the background.

        Returns:
            The checkpoint; None if the save runs in the background.

        Raises:
            CheckpointError: a file cannot be written or, with `wait`, a weight is not finite; on every rank alike.
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
        self._running = self._thread.submit(self._write, folder, self._staging.copy(plan), manifest, self._group)
        return None

    def poll(self) -> Checkpoint | None:
        """Return the checkpoint once its background save has ended on every rank; call it once per step.

        Raises:
            CheckpointError: the save has failed, on every rank alike; raised once.
        """
        if self._running is None:
            return None
        return self.wait() if self._sync.offer(self._running.done()) == [True] else None

    def wait(self) -> Checkpoint | None:
        """Wait for the background save, if any, and return its checkpoint; raises as `poll`."""
        if self._running is None:
            return None
        self._sync.forget()
        return on_every_rank(self.wait_on_this_rank)

    def wait_on_this_rank(self) -> Checkpoint | None:
        """Wait as `wait` does, but without the other ranks, which may be elsewhere after an error."""
        save, self._running, self._sync = self._running, None, DelayedMinimum()
        return None if save is None else save.result()

    def close(self) -> None:
        """Destroy the process group; no save may run."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def apply_retention(self, newest: Path, group: dist.ProcessGroup | None = None) -> None:
        """Remove superseded checkpoints, on rank 0, given the newest one."""
        protected = () if self._mirror is None else self._mirror.protected
        on_rank_zero(lambda: apply_retention(self._config.folder, newest, self._config.keep_last, protected), group)

    def _tensors(self) -> dict[str, torch.Tensor]:
        if skips_on_device(self._optimizer) and not any(self._optimizer.state.values()):
            materialise_state(self._optimizer)  # there was no update yet; other optimizers would count one
        return tensor_state(self._parameters, self._optimizer)

    def _check_weights(self, step: int) -> None:
        """Raise a CheckpointError if a weight is not finite: later starts build on the last checkpoint."""
        bad = [name for name, weight in self._parameters.items() if not is_finite(local_part(weight.detach()))]
        if bad:
            raise CheckpointError(
                f"step {step} is not saved: {len(bad)} weights are not finite, {bad[0]} first. Start from the newest "
                "checkpoint with a smaller --learning_rate or a longer --warmup_steps"
            )

    def _folder_for(self, manifest: Manifest) -> Path:
        """Return the folder to commit to; rounded names of two steps may be equal, and must not replace each other."""
        folder = self._config.folder / CHECKPOINTS / checkpoint_name(self._config.ckpt_name, manifest)
        existing = checkpoint_at(folder)
        is_taken = existing.kind is not None and existing.step != manifest.step  # an unreadable one is replaced
        return folder.with_name(distinct_name(folder.name, manifest.step)) if is_taken else folder

    def _write(
        self, folder: Path, files: Save, manifest: Manifest, group: dist.ProcessGroup | None = None
    ) -> Checkpoint:
        self._staging.wait()
        save_checkpoint(folder, files, manifest, group=group, lease=self._lease)
        self.apply_retention(folder, group)
        return Checkpoint(folder, manifest.step, kind=manifest.kind)


# Pinned memory is allocated in powers of two: one allocation per tensor would waste up to half of it.
SLAB_BYTES = 2**28
ALIGNMENT_BYTES = 64


class Staging:
    """Copy of the tensors that this process writes, in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, plan: SavePlan) -> SavePlan:
        """Copy the values of a plan into the same memory each time, unless the plan has other tensors than the last.

        On a GPU, this only starts the copies: call `wait` before reading them.
        """
        pieces = [piece for file in plan.files.values() for piece in file]
        if self._buffers.keys() != {piece.name for piece in pieces}:  # the first, or the first with optimizer state
            memory = _allocate([piece.values for piece in pieces], pinned=self._stream is not None)
            self._buffers = {piece.name: buffer for piece, buffer in zip(pieces, memory, strict=True)}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # without a stream, on a CPU, the context does nothing
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
        """Copy the values of a plan if pinned memory is allocated, else return the plan itself.

        Pinned memory is faster for a save in the training thread: the driver pins other memory piece by piece.
        """
        if self._stream is None or not self._buffers:
            return plan
        return self.copy(plan)

    def wait(self) -> None:
        """Wait until the copies are done."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold_update(self) -> None:
        """Make the device finish the copies before the next update."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _allocate(tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    free: list[torch.Tensor] = []  # the free part of each slab
    memory = []
    left = sum(_aligned(tensor.nbytes) for tensor in tensors)
    for tensor in tensors:
        size = _aligned(tensor.nbytes)
        number = next((number for number, part in enumerate(free) if size <= len(part)), len(free))
        if number == len(free):
            free.append(torch.empty(max(size, min(left, SLAB_BYTES)), dtype=torch.uint8, pin_memory=pinned))
        memory.append(free[number][: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        free[number] = free[number][size:]
        left -= size
    return memory


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
