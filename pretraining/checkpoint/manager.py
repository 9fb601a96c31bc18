"""When a run saves, and what a start restores.

At a start the save path wins over the load path: a job that is submitted again resumes itself, whatever it was first
    started from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from pretraining.checkpoint import store
from pretraining.checkpoint.state import Manifest
from pretraining.config.durations import Duration, Progress
from pretraining.config.intervals import Interval, RunState
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError

NEVER = Interval(Duration(0, "steps"), None)


@dataclass(frozen=True)
class Restorable:
    """A checkpoint that a run can start from.

    Attributes:
        path: its folder.
        manifest: its contents, files already checked for presence and size.
    """

    path: Path
    manifest: Manifest


def find_checkpoint(config: CheckpointConfig) -> Restorable | None:
    """The checkpoint to start from, or None for a new run. Reads files; call it on one rank.

    Raises:
        CheckpointError: a load path was named and holds no checkpoint, or the newest checkpoint is damaged.
    """
    own = Path(config.ckpt_save_path)
    committed = store.committed_checkpoints(own)
    if committed:
        return Restorable(committed[-1], store.read_manifest(committed[-1]))
    if config.ckpt_load_path is None:
        return None
    source = Path(config.ckpt_load_path)
    path = _named_checkpoint(source)
    if path is None:
        raise CheckpointError(
            f"--ckpt_load_path={source} holds no complete checkpoint: it is neither one (a folder with "
            f"{store.MANIFEST}) nor a run with some in {store.CHECKPOINTS}/."
        )
    return Restorable(path, store.read_manifest(path))


def _named_checkpoint(source: Path) -> Path | None:
    """A load path may be a checkpoint, a run, or a run's folder of checkpoints."""
    if (source / store.MANIFEST).is_file():
        return source
    run = source.parent if source.name == store.CHECKPOINTS else source
    return next(reversed(store.committed_checkpoints(run)), None)


class CheckpointManager:
    """Saves on an interval and at the end, as a context around the loop.

    Args:
        run: folder of the run.
        interval: how often to save; where the loop ends is always saved.
        tensors: makes the state to save.
        manifest_for: makes the manifest from progress, evaluation loss and file sizes.
        preempt_interval: how often to save between those of `interval`; such a checkpoint goes with the next one.
        activity: books the time of a save.
        note: told of each save; a no-op on ranks that do not print.
        evaluation_loss: the newest one of an earlier invocation.
    """

    def __init__(
        self,
        *,
        run: Path,
        interval: Interval,
        tensors: Callable[[], dict[str, torch.Tensor]],
        manifest_for: Callable[[Progress, float | None, dict[str, int]], Manifest],
        activity: Callable[[str], AbstractContextManager[None]],
        note: Callable[[str], None],
        preempt_interval: Interval = NEVER,
        evaluation_loss: float | None = None,
    ) -> None:
        self._run = run
        self._interval = interval
        self._preempt_interval = preempt_interval
        self._tensors = tensors
        self._manifest_for = manifest_for
        self._activity = activity
        self._note = note
        self._state: RunState | None = None
        self._evaluation_loss = evaluation_loss
        self._saved_step: int | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error ranks may disagree on the step, and a save needs all of them.
        if error is None and self._state is not None:
            self._save(self._state.progress, preempt=self._state.preempted and not self._state.finished)

    def maybe_save(self, state: RunState, evaluation_loss: float | None) -> None:
        """Save if a boundary of the interval was crossed."""
        self._state = state
        if evaluation_loss is not None:
            self._evaluation_loss = evaluation_loss
        if self._interval.is_due(state):
            self._save(state.progress)
        elif self._preempt_interval.is_due(state):
            self._save(state.progress, preempt=True)

    def _save(self, progress: Progress, preempt: bool = False) -> None:
        if self._saved_step == progress.steps:
            return
        folder = store.checkpoint_path(self._run, progress.steps, preempt)
        with self._activity("checkpoint"):
            store.save_checkpoint(
                folder, self._tensors(), lambda sizes: self._manifest_for(progress, self._evaluation_loss, sizes)
            )
        self._saved_step = progress.steps
        self._note(f"step {progress.steps}  checkpoint {folder}")
