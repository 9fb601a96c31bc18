"""Manager of a run's checkpoints: decides after each step whether to save, and writes the state beside the tensors.

maybe_save, after each step:  is a save due? -> manifest of this step -> `Saver`: now, or in the background
finish, after the last step:  save the last step, and wait until everything is committed
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from pretraining.checkpoint.branches import Branches
from pretraining.checkpoint.manifest import (
    BEST_BY,
    BRANCHES,
    EVALUATION_OF_STEP,
    EVALUATION_SETS_STATE,
    LOSSES_OF,
    REQUEST,
    RUN_ID,
    RUN_STATE,
    Manifest,
    Stateful,
)
from pretraining.checkpoint.mirror import PREEMPTED_SECONDS, Mirror
from pretraining.checkpoint.own_checkpoints import return_to, set_aside_others
from pretraining.checkpoint.run_folder import Checkpoint
from pretraining.checkpoint.saver import Saver
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.recipe_files import dump_config
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import CheckpointError, DivergenceError
from pretraining.observability.observer import Observer
from pretraining.progress import BestBy, Interval, Progress, Scores, TrainState

log = logging.getLogger(__name__)


def manifest_of_run(config: TrainConfig, run_id: str, branches: Branches) -> Manifest:
    """Return the manifest fields that all checkpoints of a run share: model, layout, settings, record of the run."""
    world = {**layout_of_run(config), "cpu_threads": torch.get_num_threads()}
    record = {RUN_ID: run_id, BRANCHES: branches, REQUEST: config.checkpoint.resume_from_checkpoint}
    model = asdict(resolve_shape(config.model))
    return Manifest(model=model, world=world, config=dump_config(config), state={RUN_STATE: record})


def layout_of_run(config: TrainConfig) -> dict[str, Any]:
    """Return how this job lays out a run, as manifests record it: what decides the order of sums."""
    parallel = config.parallel
    layout = {"processes": dist.get_world_size(), "sharding_strategy": parallel.sharding_strategy}
    if parallel.context_parallel_size > 1:
        layout["context_parallel_size"] = parallel.context_parallel_size
    return layout


class CheckpointManager:
    """Manager that saves when a save is due; a context around the loop. Saving is a collective call.

    Args:
        saver: None = nothing is saved, only evaluation losses are tracked.
        manifest: fields that all checkpoints of the run share.
        loader: data loader, whose state is the position in the data.
        states: other stateful components, by their name in the checkpoint.
        observer: gives the newest loss; measures the time that training waits, and records each checkpoint.
        training_tokens: tokens of one pass over the datasets, for intervals in epochs.
        mirror_wait_seconds: how long the end of the run waits for the last copy.
        definition: of the evaluation sets whose loss `maybe_save` gets.
        task: metric that decides which checkpoint is best; None = the loss does.

    Attributes:
        newest: newest committed checkpoint, or the one that the run was restored from.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        saver: Saver | None,
        manifest: Manifest,
        loader: Stateful,
        states: Mapping[str, Stateful],
        observer: Observer,
        training_tokens: int | None = None,
        mirror: Mirror | None = None,
        mirror_wait_seconds: float = 0.0,
        definition: str | None = None,
        task: BestBy | None = None,
    ) -> None:
        self._mirror, self._mirror_wait_seconds = mirror, mirror_wait_seconds
        self._config, self._saver, self._manifest = config, saver, manifest
        self._loader, self._states, self._observer = loader, states, observer
        self._interval = Interval(config.checkpoint_interval, training_tokens)
        self._preempt_interval = Interval(config.preempt_interval, training_tokens)
        self.evaluation_loss: float | None = None
        self.best_evaluation_loss: float | None = None
        self._definition = definition
        self._losses_of: str | None = None
        self._task = None if task is None else _TaskRecord(task)
        self._evaluated_step: int | None = None
        self.newest: Path | None = None
        self._has_trained = False
        self._saved_step: int | None = None
        self._unevaluated_step: int | None = None

    def restore(self, restored: CheckpointRef) -> None:
        """Restore the state of all components and the evaluation losses; a collective call.

        Raises:
            CheckpointError: the state of a component cannot be loaded.
        """
        saved = restored.manifest
        self.evaluation_loss, self.best_evaluation_loss = saved.evaluation_loss, saved.best_evaluation_loss
        self._losses_of = saved.losses_of
        self._evaluated_step = None if saved.evaluation_of_step is None else saved.step
        if self._task is not None:
            self._task.restore(saved)
        if self._definition not in (None, self._losses_of) and self.best_evaluation_loss is not None:
            log.info(
                "the best loss so far, %.4f, is of other evaluation sets: the next evaluation begins the search for "
                "the best checkpoint and the patience of early stopping again",
                self.best_evaluation_loss,
            )
        self.newest = restored.path
        for name in (name for name in self._states if name in saved.state):
            try:
                self._states[name].load_state_dict(saved.state[name])
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise CheckpointError(
                    f"damaged: cannot load its state of {name} ({type(error).__name__}: {error}). Start from an "
                    "earlier checkpoint: --ckpt_load_path, with another --ckpt_save_path",
                    path=restored.path,
                ) from error
        if restored.is_own and saved.kind == "interval":  # a pending evaluation of it runs before the first step
            self._unevaluated_step = saved.step
        if restored.is_own and saved.recorded_files and self._saver is not None:
            self._saver.apply_retention(restored.path)  # a kill may have come between its commit and its retention

    def __enter__(self) -> CheckpointManager:
        if self._mirror is not None:
            self._mirror.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._saver is None:
            return
        try:
            self._log_saved(self._saver.wait_on_this_rank())
        except Exception as failure:
            log.warning("the running save has failed, too: %s", failure)
        if self._mirror is not None:
            self._mirror.close(wait=isinstance(error, DivergenceError))  # a rollback trains on in this process
        # After other errors, ranks may be at different steps, and destroying the group needs all of them.
        if error is None or isinstance(error, DivergenceError):
            self._saver.close()

    def maybe_save(self, state: TrainState, scores: Scores | None) -> None:
        """Save if a save is due, and log a background save that has ended; call it after each step and its evaluation.

        Raises:
            CheckpointError: this save, or an earlier one in the background, has failed; on every rank alike.
        """
        self._has_trained = True
        if self._saver is not None:
            self._log_saved(self._saver.poll())
        if self._mirror is not None:
            self._mirror.poll()
        is_best = scores is not None and self._record(scores, state.step)
        if scores is not None and state.step == self._unevaluated_step:
            kind: str | None = _kind_at_end(state)  # save again: the first save of this step lacks these scores
        else:
            kind = self._kind_due(state, is_best)
        if kind is not None:
            self._save(state.progress, kind, wait=state.stopping)

    def save_now(self, state: TrainState, kind: str) -> None:
        """Save this step, unless it is saved already, and wait for the commit; raises as `maybe_save`."""
        if self._saved_step != state.progress.steps:
            self._save(state.progress, kind, wait=True)
        if self._saver is not None:
            self._log_saved(self._saver.wait())

    def take_over(self, start: CheckpointRef | None, state: TrainState, *, rolls_back: bool = False) -> list[Path]:
        """Make a start point the newest checkpoint of the run, after it has been loaded; a collective call.

        A return or a rollback gives its target another manifest: the same files, in the branch of this start. A
        rollback also records the skipped samples. A target that the run has not saved is saved.

        Returns:
            The checkpoints that the run gives up, which are set aside.

        Raises:
            CheckpointError: the manifest cannot be written, or a checkpoint cannot be moved.
        """
        if self._saver is None:
            return []
        is_saved = start is not None and start.is_own and bool(start.manifest.recorded_files)
        if start is not None and is_saved and (rolls_back or start.is_rewind):
            saved, record = start.manifest, self._manifest.state[RUN_STATE]
            data = self._loader.state_dict() if rolls_back else saved.data
            on_rank_zero(lambda: return_to(start.path, saved, record, data))
            if rolls_back:
                self._log_saved(Checkpoint(start.path, start.step, kind=start.manifest.kind))
        elif rolls_back or (start is not None and start.is_rewind):
            self.save_now(state, "interval")
        newest = self.newest
        return [] if newest is None else on_rank_zero(lambda: set_aside_others(self._config.folder, newest))

    def finish(self, state: TrainState) -> None:
        """Save the last step, if there was one, and wait for the commit and the copy; raises as `maybe_save`.

        Without the copy, a run that is not preempted fails.
        """
        began, wait_seconds = monotonic(), self._mirror_wait_seconds
        if self._has_trained:
            self.save_now(state, _kind_at_end(state))
        if state.preempted:  # the launcher's grace period includes the save
            wait_seconds = min(PREEMPTED_SECONDS, wait_seconds) - (monotonic() - began)
        if self._mirror is None or self._saver is None or self.newest is None:
            return
        with self._observer.stopwatch.measure("checkpoint"):
            problem = self._mirror.finish(wait_seconds)
            self._saver.apply_retention(self.newest)  # remove checkpoints that were kept for their copy
        if problem is not None:
            command = shlex.join(("pretrain", "push", str(self._config.folder), str(self._config.ckpt_mirror_path)))
            text = f"{self.newest} is saved, but not copied to the mirror ({problem}). `{command}` copies it"
            if not state.preempted:
                raise CheckpointError(text)
            log.warning(text)

    def _kind_due(self, state: TrainState, is_best: bool) -> str | None:
        is_regular = self._interval.is_due(state) or state.step in self._config.checkpoint_steps
        if state.finished or (state.stopping and not is_regular):
            return _kind_at_end(state)
        if is_regular:
            return "interval"
        if is_best and self._config.save_best:
            return "best"
        return "preempt" if self._preempt_interval.is_due(state) else None

    def _record(self, scores: Scores, step: int) -> bool:
        """Track the scores of an evaluation; return whether the checkpoint is the run's best."""
        is_best = scores.loss is not None and self._record_evaluation(scores.loss, step)
        if self._task is None:
            return is_best
        return scores.task is not None and self._task.record(scores.task, step)

    def _record_evaluation(self, loss: float, step: int) -> bool:
        """Track an evaluation loss; return whether it is the run's best."""
        if not math.isfinite(loss):
            return False
        is_comparable, self._losses_of = self._losses_of == self._definition, self._definition
        self.evaluation_loss, self._evaluated_step = loss, step
        if is_comparable and self.best_evaluation_loss is not None and loss >= self.best_evaluation_loss:
            return False
        self.best_evaluation_loss = loss
        return True

    def _save(self, progress: Progress, kind: str, wait: bool) -> None:
        if self._saver is None:
            return
        with self._observer.stopwatch.measure("checkpoint"):
            self._log_saved(self._saver.wait())
            self._saved_step = progress.steps
            with self._saver.evaluation_mode():
                saved = self._saver.save(self._manifest_now(progress, kind), wait)
            self._log_saved(saved)

    def _manifest_now(self, progress: Progress, kind: str) -> Manifest:
        """Return the manifest of this step, without its files."""
        data = self._loader.state_dict()
        states = {name: kept for name, stateful in self._states.items() if (kept := stateful.state_dict())}
        of_step = self.evaluation_loss if self._evaluated_step == progress.steps else None
        states[RUN_STATE] = self._manifest.state.get(RUN_STATE, {}) | {EVALUATION_OF_STEP: of_step}
        if self._task is not None:
            states[RUN_STATE] |= {BEST_BY: self._task.state_dict(progress.steps)}
        if self._losses_of is not None:
            states[EVALUATION_SETS_STATE] = states.get(EVALUATION_SETS_STATE, {}) | {LOSSES_OF: self._losses_of}
        return replace(
            self._manifest,
            step=progress.steps,
            tokens_seen=progress.tokens,
            seconds=progress.seconds,
            kind=kind,
            loss=self._observer.last_loss,
            evaluation_loss=self.evaluation_loss,
            best_evaluation_loss=self.best_evaluation_loss,
            data=data,
            state=states,
            global_batch_size=data["phases"][-1]["global_batch_size"],
        )

    def _log_saved(self, saved: Checkpoint | None) -> None:
        """Log a checkpoint that was committed, if any, and start its copy to the mirror."""
        if saved is not None:
            self.newest = saved.path
            log.info("step %d  checkpoint %s", saved.step, saved.path)
            self._observer.events.add("checkpoint", saved.step, kind=saved.kind, path=str(saved.path))
            if self._mirror is not None:
                self._mirror.copy(saved.path)


class _TaskRecord:
    """The metric of a task that decides which checkpoint is best: of the newest evaluation, and the best so far."""

    def __init__(self, task: BestBy) -> None:
        self._task = task
        self._step: int | None = None
        self._value = self._best = math.nan

    def restore(self, saved: Manifest) -> None:
        """Restore what a checkpoint records, if the same metric of the same task decided there."""
        kept = saved.best_by
        if (kept.get("name"), kept.get("definition")) == (self._task.name, self._task.definition):
            self._step, self._value = saved.step, _number(kept.get("value"))
            self._best = _number(kept.get("best"))
        elif saved.evaluation_loss is not None or kept:
            log.info("%s decides now: the search for the best checkpoint begins again", self._task.name)

    def record(self, value: float, step: int) -> bool:
        """Track a value; return whether it is the best."""
        self._step, self._value = step, value
        if not math.isfinite(value) or self._task.cost(value) >= self._task.cost(self._best):
            return False
        self._best = value
        return True

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the record of a step's checkpoint, JSON-able."""
        value = self._value if self._step == step else math.nan
        found = {"value": value, "best": self._best}
        return {**self._task._asdict(), **{name: None if math.isnan(each) else each for name, each in found.items()}}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _kind_at_end(state: TrainState) -> str:
    return "final" if state.finished else "preempt" if state.preempted else "interval"
