"""When a run saves, what it keeps, and how a save runs beside the training.

maybe_save, after each step:  is one due? -> the chunks that this rank writes -> written here and now, or copied and
                              written by a thread -> commit -> `best`, and what is superseded, on rank 0
finish, after the last step:  saves where the invocation ends, and waits until everything is committed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pretraining.checkpoint.async_save import BackgroundSave
from pretraining.checkpoint.completeness import is_finite
from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.manifest import (
    CHECKPOINTS,
    Manifest,
    Stateful,
    checkpoint_name,
    distinct_name,
    read_document,
    tensor_state,
)
from pretraining.checkpoint.pt_files import FullSave
from pretraining.checkpoint.retention import tidy_up
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.checkpoint.writer import Plan, plan_save, save_checkpoint
from pretraining.config.recipes import dump_config
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.loader import Loader
from pretraining.distributed.grad_norm import local_part
from pretraining.distributed.processes import on_every_rank, on_rank_zero
from pretraining.distributed.watchdog import collective_timeout
from pretraining.errors import CheckpointError, DivergenceError
from pretraining.files import exists
from pretraining.observability.events import Events
from pretraining.observability.observer import Observer
from pretraining.observability.throughput import Stopwatch
from pretraining.optim.optimizer import materialise_state, skips_on_device
from pretraining.progress import Interval, Progress, TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointContents:
    """The parts of a run that go into its checkpoints.

    Attributes:
        parameters: by name, as sharded.
        observer: knows the newest loss.
        states: further parts with a memory, by the name under which it is kept.
    """

    config: TrainConfig
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    loader: Loader
    observer: Observer
    states: Mapping[str, Stateful]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors to save, not copied; the same ones at each save."""
        if not skips_on_device(self.optimizer) and not any(self.optimizer.state.values()):
            materialise_state(self.optimizer)  # every update so far was left out, without a call of the optimizer
        return tensor_state(self.parameters, self.optimizer)

    def describe(self, progress: Progress) -> Manifest:
        """The manifest of a checkpoint of this moment, without kind, files and evaluation losses."""
        return Manifest(
            step=progress.steps,
            tokens_seen=progress.tokens,
            seconds=progress.seconds,
            loss=self.observer.last_loss,
            data=self.loader.state_dict(),
            state={name: kept for name, stateful in self.states.items() if (kept := stateful.state_dict())},
            global_batch_size=self.loader.reader.mixture.phases[-1].global_batch_size,
            model=asdict(resolve_shape(self.config.model)),
            world={
                "processes": dist.get_world_size(),
                "sharding_strategy": self.config.parallel.sharding_strategy,
                "cpu_threads": torch.get_num_threads(),
            },
            config=self._settings,
        )

    def restore(self, manifest: Manifest) -> None:
        """Gives the parts with a memory what a checkpoint kept of it."""
        for name, state in manifest.state.items():
            if name not in self.states:
                log.info("the checkpoint holds a state of %s, which this run has not: ignored", name)
                continue
            try:
                self.states[name].load_state_dict(state)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise CheckpointError(
                    f"the checkpoint of step {manifest.step} is damaged: its state of {name} has another form "
                    f"({type(error).__name__}: {error}). Start from an earlier one: --ckpt_load_path, with another "
                    "--ckpt_save_path"
                ) from error

    @cached_property
    def _settings(self) -> str:
        return dump_config(self.config)  # once: it takes milliseconds, and a step waits for each save


class CheckpointManager:
    """Saves when it is time; a context around the loop. Making one and saving are collective calls.

    Without a run folder it saves nothing, and remembers the losses of evaluations only.

    Args:
        stopwatch: counts the time that the training waits for a save.
        training_tokens: tokens of one pass over the datasets, for intervals in epochs.
        restored: the checkpoint that the run goes on from, if any.
        lease: checked before each commit; None = nobody else writes into the run's folder.
        events: told of each checkpoint; None = nobody is.
        decided_by: the evaluation sets, sorted, whose loss `maybe_save` is told; None = those of before.

    Attributes:
        newest: the checkpoint that was committed last, or that the run goes on from.
        evaluation_loss, best_evaluation_loss: of the newest evaluation, and the lowest one; None without one.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        contents: CheckpointContents,
        stopwatch: Stopwatch,
        *,
        training_tokens: int | None = None,
        restored: CheckpointRef | None = None,
        lease: Lease | None = None,
        events: Events | None = None,
        decided_by: tuple[str, ...] | None = None,
    ) -> None:
        self._config = config
        self._decided_by = decided_by
        self._is_kept = config.ckpt_save_path is not None
        self._run = Path(config.ckpt_save_path or "")
        self._contents = contents
        self._stopwatch = stopwatch
        self._lease = lease
        self._events = Events() if events is None else events
        self._interval = Interval(config.checkpoint_interval, training_tokens)
        self._preempt_interval = Interval(config.preempt_interval, training_tokens)
        self._is_full = config.ckpt_format == "full"
        self.evaluation_loss: float | None = None
        self.best_evaluation_loss: float | None = None
        self._has_trained = False
        self._saved_step: int | None = None
        self._unevaluated_step: int | None = None
        self._saving: Path | None = None
        self._saving_kind: str | None = None
        self.newest: Path | None = None
        self._background: BackgroundSave | None = None
        device = next(iter(contents.parameters.values())).device
        is_async = config.async_save if config.async_save is not None else device.type == "cuda" and not self._is_full
        if is_async and self._is_kept:
            self._background = BackgroundSave(device, collective_timeout(contents.config.guard))
            hold_update = self._background.staging.hold_update  # an update must not change what is still being copied
            contents.optimizer.register_step_pre_hook(lambda *_: hold_update())
        if restored is not None:
            self._restore(restored)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._background is None:
            return
        was_under_way = self._background.is_under_way
        failure = self._background.settle()
        if failure is not None:
            log.warning("the save that was under way has failed, too: %s", failure)
        elif was_under_way:
            self._note_saved()
        # After other errors ranks may disagree on the step, and leaving the group needs all of them.
        if error is None or isinstance(error, DivergenceError):
            self._background.close()

    def maybe_save(self, state: TrainState, evaluation_loss: float | None) -> None:
        """Saves if it is time to; notes the end of an earlier save. Call it after each step, and its evaluation if any.

        Raises:
            CheckpointError: this save, or an earlier one that ran beside the training, has failed; on every rank alike.
        """
        self._has_trained = True
        if self._background is not None and self._background.poll():
            self._note_saved()
        is_best = evaluation_loss is not None and self._note_evaluation(evaluation_loss)
        if evaluation_loss is not None and state.step == self._unevaluated_step:
            kind: str | None = _kind_at_end(state)  # again, and of its kind, since it lacks what was found now
        else:
            kind = self._kind_due(state, is_best)
        if kind is not None:
            self._save(state.progress, kind, wait=state.stopping)

    def save_now(self, state: TrainState, kind: str) -> None:
        """Saves this step, unless it is saved already, and returns once it is committed; raises as `maybe_save`."""
        if self._saved_step != state.progress.steps:
            self._save(state.progress, kind, wait=True)
        self._await_background()

    def finish(self, state: TrainState) -> None:
        """Saves where the invocation ends, if it has trained, and returns once that is committed; as `maybe_save`."""
        if self._has_trained:
            self.save_now(state, _kind_at_end(state))

    def _kind_due(self, state: TrainState, is_best: bool) -> str | None:
        is_regular = self._interval.is_due(state) or state.step in self._config.checkpoint_steps
        if state.finished or (state.stopping and not is_regular):
            return _kind_at_end(state)
        if is_regular:
            return "interval"
        if is_best and self._config.save_best:
            return "best"
        return "preempt" if self._preempt_interval.is_due(state) else None

    def _note_evaluation(self, loss: float) -> bool:
        """Keeps the loss of an evaluation; returns whether it is the best of the run."""
        if not math.isfinite(loss):
            return False
        self.evaluation_loss = loss
        if self.best_evaluation_loss is not None and loss >= self.best_evaluation_loss:
            return False
        self.best_evaluation_loss = loss
        return True

    def _save(self, progress: Progress, kind: str, wait: bool) -> None:
        if not self._is_kept:
            return
        with self._stopwatch.measure("checkpoint"):
            self._await_background()
            if wait:
                on_every_rank(partial(self._check_weights, progress.steps))
            manifest = replace(
                self._contents.describe(progress),
                kind=kind,
                evaluation_loss=self.evaluation_loss,
                best_evaluation_loss=self.best_evaluation_loss,
            )
            folder = on_rank_zero(lambda: self._folder_for(manifest))
            self._saved_step, self._saving, self._saving_kind = progress.steps, folder, kind
            tensors = self._contents.tensors()
            if self._is_full:
                self._write(folder, FullSave(tensors, manifest), manifest)
            elif self._background is None:
                self._write(folder, plan_save(tensors), manifest)
            elif wait:
                self._write(folder, self._background.staging.copy_if_pinned(plan_save(tensors)), manifest)
            else:
                staged = self._background.staging.copy(plan_save(tensors))
                self._background.start(partial(self._write, folder, staged, manifest))
                return
            self._note_saved()

    def _check_weights(self, step: int) -> None:
        """Raise a CheckpointError if a weight is not finite: the state in which an invocation ends is built upon."""
        bad = [name for name, weight in self._contents.parameters.items() if not is_finite(local_part(weight.detach()))]
        if bad:
            kept = f"the newest checkpoint is {self.newest}" if self.newest is not None else "there is no checkpoint"
            raise CheckpointError(
                f"step {step}: {len(bad)} weights, {bad[0]} first, hold numbers that are not finite. This state is not "
                f"saved; {kept}. Go on from there with a smaller --learning_rate or a longer --warmup_steps"
            )

    def _write(self, folder: Path, plan: Plan, manifest: Manifest, group: dist.ProcessGroup | None = None) -> None:
        save_checkpoint(folder, plan, manifest, group=group, lease=self._lease)
        on_rank_zero(lambda: tidy_up(self._run, folder, self._config.keep_last), group)

    def _await_background(self) -> None:
        if self._background is not None and self._background.is_under_way:
            self._background.wait()
            self._note_saved()

    def _note_saved(self) -> None:
        self.newest = self._saving
        assert self._saved_step is not None
        log.info("step %d  checkpoint %s", self._saved_step, self._saving)
        self._events.add("checkpoint", self._saved_step, kind=self._saving_kind, path=str(self._saving))

    def _folder_for(self, manifest: Manifest) -> Path:
        """Where to commit; two steps whose names are the same by rounding must not replace each other."""
        folder = self._run / CHECKPOINTS / checkpoint_name(self._config.ckpt_name, manifest)
        taken = False
        with suppress(CheckpointError):  # what nobody can read may go
            taken = exists(folder) and read_document(folder).step != manifest.step
        return folder.with_name(distinct_name(folder.name, manifest.step)) if taken else folder

    def _restore(self, restored: CheckpointRef) -> None:
        before = restored.manifest
        if self._decided_by is None or before.decided_by == self._decided_by:
            self.evaluation_loss, self.best_evaluation_loss = before.evaluation_loss, before.best_evaluation_loss
        elif before.best_evaluation_loss is not None:
            log.info(
                "the loss of %s decided which checkpoint is best; from here on it is that of %s",
                *(" and ".join(names) or "nothing" for names in (before.decided_by, self._decided_by)),
            )
        self.newest = restored.path
        if restored.is_own and before.kind == "interval":  # its evaluation, if one is pending, comes before any step
            self._unevaluated_step = before.step
        self._contents.restore(restored.manifest)
        if restored.is_own and restored.manifest.files:  # a kill may have come after its commit and before this
            on_rank_zero(lambda: tidy_up(self._run, restored.path, self._config.keep_last))


def _kind_at_end(state: TrainState) -> str:
    return "final" if state.finished else "preempt" if state.preempted else "interval"
