"""When a run saves, what is kept, and how a save runs beside the training.

maybe_save, after each step:  is one due? -> this rank's share of the tensors -> written here and now, or copied and
                              written by a thread -> commit -> `best`, and what is superseded, on rank 0
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from pretraining.checkpoint.async_save import BackgroundSave, Staging
from pretraining.checkpoint.layout import Share, own_share
from pretraining.checkpoint.listing import CHECKPOINTS, checkpoint_name, read_document
from pretraining.checkpoint.pt_files import save_full
from pretraining.checkpoint.retention import tidy_up
from pretraining.checkpoint.state import Manifest, Stateful
from pretraining.checkpoint.store import save_share
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import CheckpointError, DivergenceError
from pretraining.progress import Interval, Progress, TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePolicy:
    """Settings of saving.

    Attributes:
        interval: how often to save for good.
        preempt_interval: how often to save what the next checkpoint supersedes.
        keep_last: how many of those saved on the interval to keep; None = all.
        save_best: whether to save when an evaluation was the best so far.
        name_style: "step" or "tokens".
        is_full: whether the whole is written unsharded, while the training waits.
    """

    interval: Interval
    preempt_interval: Interval
    keep_last: int | None = None
    save_best: bool = True
    name_style: str = "step"
    is_full: bool = False


class CheckpointManager:
    """Saves when it is time, and where an invocation ends, as a context around the loop.

    Args:
        run: folder of the run.
        policy: when to save and what to keep.
        tensors: makes the state to save.
        describe: makes the manifest of a step from its progress; the manager fills in what it knows itself.
        states: collaborators whose memory goes into checkpoints, by name.
        activity: books the time that the training waits for a save.
        note: told of each save; a no-op on ranks that do not print.
        restored: the manifest that the run goes on from, if any.
        staging: makes the copy that a thread writes; None = save before training goes on.
        check_lease: called on rank 0 before each commit.
    """

    def __init__(
        self,
        *,
        run: Path,
        policy: SavePolicy,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        describe: Callable[[Progress], Manifest],
        states: Mapping[str, Stateful],
        activity: Callable[[str], AbstractContextManager[None]],
        note: Callable[[str], None],
        restored: Manifest | None = None,
        staging: Staging | None = None,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._policy = policy
        self._tensors = tensors
        self._describe = describe
        self._states = states
        self._activity = activity
        self._note = note
        self._staging = staging
        self._check_lease = check_lease
        self._background = BackgroundSave() if staging is not None else None
        self._state: TrainState | None = None
        self._evaluation_loss = restored.evaluation_loss if restored else None
        self._best_evaluation_loss = restored.best_evaluation_loss if restored else None
        self._saved_step: int | None = None
        self._saving: Path | None = None
        self.newest: Path | None = None
        """The checkpoint that was saved last, once it is committed."""
        if restored is not None:
            self._restore_states(restored)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            if self._state is not None:
                self.save_now(self._state, self._kind_at_end(self._state))
            self._await_background()
        elif self._background is not None and (failure := self._background.settle()) is not None:
            log.warning("the save that was under way has failed, too: %s", failure)
        # After other errors ranks may disagree on the step, and a save, or taking leave, needs all of them.
        if self._background is not None and (error is None or isinstance(error, DivergenceError)):
            self._background.close()

    def maybe_save(self, state: TrainState, evaluation_loss: float | None) -> None:
        """Save if it is time to; take note of the end of an earlier save.

        Args:
            state: of the run, after a step.
            evaluation_loss: of an evaluation after this step.

        Raises:
            CheckpointError: this save, or an earlier one that ran beside the training, has failed; on every rank alike.
        """
        self._state = state
        if self._background is not None and self._background.poll():
            self._note_saved()
        is_best = evaluation_loss is not None and self._take_note_of(evaluation_loss)
        kind = self._kind_due(state, is_best)
        if kind is not None:
            self._save(state.progress, kind, wait=state.stopping)

    def save_now(self, state: TrainState, kind: str) -> None:
        """Save this step, unless it is saved already, and come back when the checkpoint is committed.

        Args:
            state: of the run, after a step.
            kind: as in `Manifest`.

        Raises:
            CheckpointError: as `maybe_save`.
        """
        if self._saved_step != state.progress.steps:
            self._save(state.progress, kind, wait=True)
        self._await_background()

    def before_update(self) -> None:
        """Call ahead of whatever changes the tensors: a copy may still be reading them."""
        if self._staging is not None:
            self._staging.hold_update()

    def _kind_due(self, state: TrainState, is_best: bool) -> str | None:
        policy = self._policy
        if state.finished or (state.stopping and not policy.interval.is_due(state)):
            return self._kind_at_end(state)
        if policy.interval.is_due(state):
            return "interval"
        if is_best and policy.save_best:
            return "best"
        return "preempt" if policy.preempt_interval.is_due(state) else None

    def _kind_at_end(self, state: TrainState) -> str:
        """Of a checkpoint that is saved because this invocation ends."""
        return "final" if state.finished else "preempt" if state.preempted else "interval"

    def _take_note_of(self, evaluation_loss: float) -> bool:
        """Keep the loss of an evaluation; returns whether it is the best of the run."""
        if not math.isfinite(evaluation_loss):
            return False
        self._evaluation_loss = evaluation_loss
        if self._best_evaluation_loss is not None and evaluation_loss >= self._best_evaluation_loss:
            return False
        self._best_evaluation_loss = evaluation_loss
        return True

    def _save(self, progress: Progress, kind: str, wait: bool) -> None:
        with self._activity("checkpoint"):
            self._await_background()
            manifest = replace(
                self._describe(progress),
                kind=kind,
                evaluation_loss=self._evaluation_loss,
                best_evaluation_loss=self._best_evaluation_loss,
                state={name: stateful.state_dict() for name, stateful in self._states.items()},
            )
            folder = on_rank_zero(lambda: self._folder_for(manifest))
            share = own_share(self._tensors())
            self._saved_step, self._saving = progress.steps, folder
            if self._background is None or self._staging is None or wait:
                self._write(folder, share, manifest, None)
                self._note_saved()
            else:
                staged = self._staging.copy(share)
                self._background.start(lambda group: self._write(folder, staged, manifest, group))

    def _write(self, folder: Path, share: Share, manifest: Manifest, group: dist.ProcessGroup | None) -> None:
        if self._staging is not None:
            self._staging.wait()
        save_share(
            folder,
            share,
            lambda files: replace(manifest, files=files),
            group=group,
            before_commit=self._check_lease,
            write=(lambda folder: save_full(folder, self._tensors(), manifest)) if self._policy.is_full else None,
        )
        on_rank_zero(lambda: tidy_up(self._run, folder, self._policy.keep_last), group)

    def _await_background(self) -> None:
        if self._background is not None and self._background.is_under_way:
            self._background.wait()
            self._note_saved()

    def _note_saved(self) -> None:
        self.newest = self._saving
        self._note(f"step {self._saved_step}  checkpoint {self._saving}")

    def _folder_for(self, manifest: Manifest) -> Path:
        """Where to commit; two steps whose names are the same by rounding must not replace each other."""
        folder = self._run / CHECKPOINTS / checkpoint_name(self._policy.name_style, manifest)
        try:
            taken = folder.exists() and read_document(folder).step != manifest.step
        except CheckpointError:
            taken = False  # what nobody can read may go
        return folder.with_name(f"{folder.name}.step_{manifest.step}") if taken else folder

    def _restore_states(self, restored: Manifest) -> None:
        for name, state in restored.state.items():
            if name in self._states:
                self._states[name].load_state_dict(state)
            else:
                self._note(f"the checkpoint holds a state of {name}, which this run has not: ignored")
