"""Plan of a run: everything that is decided before a tensor is made or a file is written.

    complete settings, start point, what is open -> `plan_run` -> Plan -> `build.build_run` builds the Run
                                                                       -> `--dry_run` prints it

After damage or a rollback, `plan_run` plans the run again, without the damaged checkpoint or the skipped samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pretraining.checkpoint.manifest import EVALUATION_SETS_STATE, Manifest
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.batch_sizes import BatchSizes, resolve_batch_sizes
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.data.dataset import build_loader
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.sampling.mixture import Range
from pretraining.distributed.dims import Dims
from pretraining.distributed.processes import Processes
from pretraining.durations import TokenSchedule
from pretraining.errors import ConfigError, DamagedError
from pretraining.evaluation.held_out import EvaluationRecord
from pretraining.optim.schedules import LearningRate, build_learning_rate
from pretraining.progress import Progress, TrainState
from pretraining.train.opening import Opened
from pretraining.train.plan_evaluation import EvaluationPlan, plan_evaluation


@dataclass(frozen=True)
class Rollback:
    """State that a rollback keeps of the run that has diverged in this start.

    Attributes:
        number: rollbacks since the run last got further.
        before_step: first skipped update; only checkpoints before this step are sound.
        last_step: last skipped update.
        furthest: furthest step at which the run has diverged.
        samples: global indices (first, end) of the samples of the skipped updates.
        skipped: samples to skip besides `--skip_samples`, by their numbers within datasets (`Mixture.numbers`).
        stop_step: last step of this invocation.
    """

    number: int
    before_step: int
    last_step: int
    furthest: int
    samples: Range
    skipped: Mapping[str, Sequence[Range]]
    stop_step: int


@dataclass(frozen=True)
class Plan:
    """Decisions about a run before it is built: start point, data, batch, schedule, length.

    Attributes:
        start: None = initial weights.
        rollback: None = the run has not diverged in this start.
        loads_optimizer: whether to load the optimizer state of the start point, too.
        token_schedule: tokens per step, including the steps before the start point.
        evaluation: evaluation sets, and what checkpoints record of them.
    """

    opened: Opened
    shape: LlamaShape
    start: CheckpointRef | None
    rollback: Rollback | None
    loads_optimizer: bool
    batch: BatchSizes
    token_schedule: TokenSchedule
    learning_rate: LearningRate
    loader: Loader
    evaluation: EvaluationPlan
    state: TrainState

    @property
    def config(self) -> TrainConfig:
        """Complete settings."""
        return self.opened.config

    @property
    def processes(self) -> Processes:
        """This process among those of the job."""
        return self.opened.processes

    @property
    def dims(self) -> Dims:
        """Dimensions of the job."""
        return self.opened.dims

    @property
    def data(self) -> OpenedDatasets | None:
        """Training datasets; None for dummy data."""
        return self.opened.data.training

    @property
    def restored(self) -> CheckpointRef | None:
        """Checkpoint that the run continues; None if the run begins at step 0."""
        return None if self.start is None or self.start.weights_only else self.start

    @property
    def is_return(self) -> bool:
        """Whether the run goes back, as the user asks or after a divergence."""
        return self.rollback is not None or (self.start is not None and self.start.is_rewind)

    @property
    def training_tokens(self) -> int | None:
        """Tokens of one pass over the datasets; None for dummy data, which has no end."""
        return self.data.training_tokens if self.data is not None else None


def plan_run(start: CheckpointRef | None, opened: Opened, rollback: Rollback | None = None) -> Plan:
    """Plan a run from its start point and its complete settings; pure: what is open changes nothing until it is built.

    Raises:
        DamagedError: the start point has no readable position in the data.
        PretrainError: the start point or the data do not fit the settings.
    """
    config, dims, data = opened.config, opened.dims, opened.data.training
    shape = resolve_shape(config.model)
    loads_optimizer = start is not None and _loads_optimizer(start, config)
    restored = None if start is None or start.weights_only else start
    saved = restored.manifest if restored is not None else Manifest()  # before the first step
    batch = resolve_batch_sizes(config.batch, dims.data, saved.global_batch_size or None)
    loader = build_loader(
        data, config.data, batch, dims.data_rank, config.run.seed, shape.vocab_size, group=dims.context_group
    )
    if restored is not None:
        loader.load_state_dict(saved.data)
    if rollback is not None:
        loader.skip(rollback.skipped)
    evaluation = plan_evaluation(opened, batch, recorded_evaluation(saved))
    token_schedule = TokenSchedule.of_phases(
        (phase.first_step, phase.global_batch_size * config.data.seq_length) for phase in loader.reader.mixture.phases
    )
    training_tokens = data.training_tokens if data is not None else None
    learning_rate = build_learning_rate(
        config.schedule, config.run.num_steps, token_schedule, training_tokens, _annealing_start(config, restored)
    )
    return Plan(
        opened=opened,
        shape=shape,
        start=start,
        rollback=rollback,
        loads_optimizer=loads_optimizer,
        batch=batch,
        token_schedule=token_schedule,
        learning_rate=learning_rate,
        loader=loader,
        evaluation=evaluation,
        state=_initial_state(config, token_schedule, training_tokens, saved, rollback),
    )


def _annealing_start(config: TrainConfig, restored: CheckpointRef | None) -> int:
    """Return the step at which the annealing stage begins, or began in the run that saved the start point."""
    if restored is None or config.schedule.training_stage != "annealing":
        return 0
    is_in_it = restored.config.schedule.training_stage == "annealing"
    return restored.manifest.annealing_from if is_in_it else restored.step


def recorded_evaluation(manifest: Manifest) -> EvaluationRecord:
    """Return what a checkpoint records of its run's evaluation sets; raise a DamagedError if that cannot be read."""
    try:
        return EvaluationRecord.of_state(
            manifest.state.get(EVALUATION_SETS_STATE) or manifest.average.get(EVALUATION_SETS_STATE, {})
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"the evaluation sets of the checkpoint of step {manifest.step} are damaged: {error}"
        ) from None


def _loads_optimizer(start: CheckpointRef, config: TrainConfig) -> bool:
    """Return whether the run loads the optimizer state of its start point; refuse that of another optimizer.

    After the first save under `load_optimizer=false`, the flag no longer applies: a restarted job repeats its command
    line and continues with its new optimizer.
    """
    if start.weights_only:
        return False
    saved, now = start.config, config.optimizer
    before = saved.optimizer
    changes = before.optimizer != now.optimizer or (
        now.optimizer in OPTIMIZERS and before.moments(in_matrix=True) != now.moments(in_matrix=True)
    )
    if not config.checkpoint.load_optimizer:
        return start.is_own and not saved.checkpoint.load_optimizer and not start.is_returned_to and not changes
    if changes:
        was, is_now = (f"{each.optimizer} (--momentum={each.momentum})" for each in (before.resolved(), now.resolved()))
        raise ConfigError(
            f"{start.path} holds the state of --optimizer={was}, which {is_now} cannot resume. Give the same "
            "optimizer, or --load_optimizer=false: parameters and data position stay, the optimizer state is new"
        )
    return True


def _initial_state(
    config: TrainConfig, tokens: TokenSchedule, training_tokens: int | None, saved: Manifest, rollback: Rollback | None
) -> TrainState:
    total_steps, run_steps = config.run.num_steps.to_steps(tokens, training_tokens), config.run.run_steps
    stop_step = total_steps if run_steps is None else min(total_steps, saved.step + run_steps)
    if rollback is not None:
        stop_step = rollback.stop_step
    progress = Progress(saved.step, saved.tokens_seen, saved.seconds)
    return TrainState(total_steps, stop_step, tokens.tokens_per_step, progress)
