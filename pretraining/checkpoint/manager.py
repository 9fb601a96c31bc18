"""Manager of a run's checkpoints: decides after each step whether to save, and writes the state beside the tensors.

maybe_save, after each step:  is a save due? -> manifest of this step -> `Saver`: now, or in the background
finish, after the last step:  save the last step, and wait until everything is committed
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from pretraining.best import Best
from pretraining.checkpoint.branches import Branches
from pretraining.checkpoint.manifest import BRANCHES, REQUEST, RUN_ID, RUN_STATE, Manifest, Stateful
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
from pretraining.progress import Interval, Progress, TrainState

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
        saver: None = nothing is saved.
        manifest: fields that all checkpoints of the run share.
        loader: data loader, whose state is the position in the data.
        states: other stateful components, by their name in the checkpoint.
        observer: gives the newest loss; measures the time that training waits, and records each checkpoint.
        training_tokens: tokens of one pass over the datasets, for intervals in epochs.
        mirror_wait_seconds: how long the end of the run waits for the last copy.
        loss: evaluation loss of the run.
        best: number that decides which checkpoint is best; possibly `loss` itself.

    Attributes:
        newest: newest committed checkpoint, or the one that the run was restored from.
        newest_step: its step; 0 = there is none.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        saver: Saver | None,
        manifest: Manifest,
        loader: Stateful,
        states: Mapping[str, Stateful],
        observer: Observer,
        loss: Best,
        best: Best,
        training_tokens: int | None = None,
        mirror: Mirror | None = None,
        mirror_wait_seconds: float = 0.0,
    ) -> None:
        self._mirror, self._mirror_wait_seconds = mirror, mirror_wait_seconds
        self._config, self._saver, self._manifest = config, saver, manifest
        self._loader, self._states, self._observer = loader, states, observer
        self._interval = Interval(config.checkpoint_interval, training_tokens)
        self._preempt_interval = Interval(config.preempt_interval, training_tokens)
        self._loss, self._best = loss, best
        self.newest: Path | None = None
        self.newest_step = 0
        self._has_trained = False
        self._saved_step: int | None = None
        self._unevaluated_step: int | None = None

    def restore(self, restored: CheckpointRef) -> None:
        """Restore the state of all components; a collective call.

        Raises:
            CheckpointError: the state of a component cannot be loaded.
        """
        saved = restored.manifest
        self.newest, self.newest_step = restored.path, saved.step
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

    def maybe_save(self, state: TrainState, *, is_evaluated: bool) -> None:
        """Save if a save is due, and log a background save that has ended; call it after each step and its evaluation.

        Args:
            is_evaluated: whether this step was evaluated now.

        Raises:
            CheckpointError: this save, or an earlier one in the background, has failed; on every rank alike.
        """
        self._has_trained = True
        if self._saver is not None:
            self._log_saved(self._saver.poll())
        if self._mirror is not None:
            self._mirror.poll()
        if is_evaluated and state.step == self._unevaluated_step:
            kind: str | None = _kind_at_end(state)  # save again: the first save of this step lacks the evaluation
        else:
            kind = self._kind_due(state)
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
        is_return = rolls_back or (start is not None and start.is_rewind)
        if is_return and start is not None and start.is_own and start.manifest.recorded_files:
            saved, record = start.manifest, self._manifest.state[RUN_STATE]
            data = self._loader.state_dict() if rolls_back else saved.data
            on_rank_zero(lambda: return_to(start.path, saved, record, data))
            if rolls_back:
                self._log_saved(Checkpoint(start.path, start.step, kind=start.manifest.kind))
        elif is_return:
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

    def _kind_due(self, state: TrainState) -> str | None:
        is_regular = self._interval.is_due(state) or state.step in self._config.checkpoint_steps
        if state.finished or (state.stopping and not is_regular):
            return _kind_at_end(state)
        if is_regular:
            return "interval"
        if self._config.save_best and self._best.is_best_at(state.step):
            return "best"
        return "preempt" if self._preempt_interval.is_due(state) else None

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
        return replace(
            self._manifest,
            step=progress.steps,
            tokens_seen=progress.tokens,
            seconds=progress.seconds,
            kind=kind,
            loss=self._observer.last_loss,
            evaluation_loss=self._loss.value,
            best_evaluation_loss=self._loss.best,
            data=data,
            state=states | self._manifest.state,
            global_batch_size=data["phases"][-1]["global_batch_size"],
        )

    def _log_saved(self, saved: Checkpoint | None) -> None:
        """Log a checkpoint that was committed, if any, and start its copy to the mirror."""
        if saved is not None:
            self.newest, self.newest_step = saved.path, saved.step
            log.info("step %d  checkpoint %s", saved.step, saved.path)
            self._observer.events.add("checkpoint", saved.step, kind=saved.kind, path=str(saved.path))
            if self._mirror is not None:
                self._mirror.copy(saved.path)


def _kind_at_end(state: TrainState) -> str:
    return "final" if state.finished else "preempt" if state.preempted else "interval"
