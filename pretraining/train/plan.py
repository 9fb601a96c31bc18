"""Plan of a run: everything that is decided before a tensor is made or a file is written.

    settings, start point, open data -> `plan_run` -> Plan -> `build.build_run` builds the Run
                                                           -> `--dry_run` prints it

Errors are raised on all ranks alike, so a mistake gives one message and no hang. After damage or a rollback, `plan_run`
plans the run again without the damaged checkpoint or the skipped samples.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pretraining.checkpoint.manager import layout_of_run
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
from pretraining.distributed.dims import Dims, build_dims
from pretraining.distributed.float8 import check_float8
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes, on_every_rank
from pretraining.distributed.watchdog import collective_timeout
from pretraining.errors import ConfigError, DamagedError
from pretraining.evaluation.evaluators import Evaluators
from pretraining.evaluation.held_out import EvaluationRecord, EvaluationSource, definition_of
from pretraining.evaluation.tasks import Tasks
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.model.attention import Attention
from pretraining.model.kernels import has_kernel_for_documents
from pretraining.model.llama import block_class
from pretraining.observability.metrics import Metrics
from pretraining.optim.registry import try_optimizer
from pretraining.optim.schedules import LearningRate, build_learning_rate
from pretraining.progress import BestBy, DefaultDuration, Progress, TokenSchedule, TrainState
from pretraining.train.memory_check import check_memory
from pretraining.train.open_data import OpenedData, open_evaluation_sources

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollback:
    """State that a rollback keeps of the run that has diverged in this start.

    Attributes:
        before_step: only checkpoints before this step are sound.
        skipped: samples to skip besides `--skip_samples`, by their numbers within datasets (`Mixture.numbers`).
        stop_step: last step of this invocation.
        order_version: of the order of samples, in case the run goes back to its initial weights.
    """

    before_step: int
    skipped: Mapping[str, Sequence[Range]]
    stop_step: int
    order_version: int


@dataclass(frozen=True)
class Plan:
    """Decisions about a run before it is built: start point, data, batch, schedule, length.

    Attributes:
        start: None = initial weights.
        rollback: None = the run has not diverged in this start.
        loads_optimizer: whether to load the optimizer state of the start point, too.
        data: training datasets; None for dummy data.
        token_schedule: tokens per step, including the steps before the start point.
        sources: evaluation sets.
        evaluation: what checkpoints record of the evaluation sets.
        tasks: benchmark tasks to evaluate on; None = none.
        evaluators: user-defined evaluators; None = none.
    """

    config: TrainConfig
    processes: Processes
    dims: Dims
    shape: LlamaShape
    start: CheckpointRef | None
    rollback: Rollback | None
    loads_optimizer: bool
    data: OpenedDatasets | None
    batch: BatchSizes
    token_schedule: TokenSchedule
    learning_rate: LearningRate
    loader: Loader
    sources: list[EvaluationSource]
    evaluation: EvaluationRecord
    state: TrainState
    tasks: Tasks | None = None
    evaluators: Evaluators | None = None

    @property
    def best_task(self) -> BestBy | None:
        """Metric of a task or number of an evaluator that decides which checkpoint is best; None = the loss decides."""
        name = self.config.evaluation.best_by
        if name is None or any(name in source.sets for source in self.sources):
            return None
        found = (each.best_by(name) for each in (self.tasks, self.evaluators) if each is not None)
        return next((each for each in found if each is not None), None)

    @property
    def best_set(self) -> str | None:
        """Evaluation set whose loss counts; None = the mean over all sets."""
        return None if self.best_task is not None else self.config.evaluation.best_by

    @property
    def best_definition(self) -> str | None:
        """Definition of the evaluation sets whose loss counts."""
        return definition_of(self.sources, self.best_set)

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


def plan_run(
    config: TrainConfig,
    processes: Processes,
    dims: Dims,
    opened: OpenedData,
    start: CheckpointRef | None,
    rollback: Rollback | None = None,
    threads: CpuThreads | None = None,
    tasks: Tasks | None = None,
    evaluators: Evaluators | None = None,
) -> Plan:
    """Plan a run from its start point; a collective call.

    Args:
        config: fully resolved settings.
        rollback: as in `Plan`.
        threads: as in `restore_cpu_threads`.
        tasks, evaluators: as in `Plan`.

    Raises:
        DamagedError: the start point has no readable position in the data.
        PretrainError: the start point or the data do not fit the settings.
    """
    processes.activity.restart(step=start.step if start is not None else 0)
    restore_cpu_threads(start, config, processes, threads)
    data, shape = opened.training, resolve_shape(config.model)
    loads_optimizer = start is not None and _loads_optimizer(start, config)
    restored = None if start is None or start.weights_only else start
    saved = restored.manifest if restored is not None else Manifest()  # before the first step
    batch = resolve_batch_sizes(config.batch, dims.data, saved.global_batch_size or None)
    loader = on_every_rank(
        lambda: build_loader(
            data, config.data, batch, dims.data_rank, config.run.seed, shape.vocab_size, group=dims.context_group
        )
    )
    if rollback is not None and restored is None:
        loader.keep_order(rollback.order_version)
    if restored is not None:
        on_every_rank(lambda: loader.load_state_dict(saved.data))
    if rollback is not None:
        loader.skip(rollback.skipped)
    record, order = recorded_evaluation(saved), loader.order_version
    sources, record = open_evaluation_sources(
        config, opened, batch, processes, dims, record, order, (tasks, evaluators)
    )
    token_schedule = TokenSchedule.of_phases(
        (phase.first_step, phase.global_batch_size * config.data.seq_length) for phase in loader.reader.mixture.phases
    )
    training_tokens = data.training_tokens if data is not None else None
    warmup = config.schedule.warmup_steps
    if isinstance(warmup, DefaultDuration):
        fitting = warmup.fit(config.run.num_steps, token_schedule, training_tokens)
        if str(fitting) != str(warmup):
            log.info("warmup_steps is %s: the %s of another system's default are not below the run", fitting, warmup)
        config = replace(config, schedule=replace(config.schedule, warmup_steps=fitting))
    learning_rate = build_learning_rate(
        config.schedule, config.run.num_steps, token_schedule, training_tokens, _annealing_start(config, restored)
    )
    return Plan(
        config=config,
        processes=processes,
        dims=dims,
        shape=shape,
        start=start,
        rollback=rollback,
        loads_optimizer=loads_optimizer,
        data=data,
        batch=batch,
        token_schedule=token_schedule,
        learning_rate=learning_rate,
        loader=loader,
        sources=sources,
        evaluation=record,
        tasks=tasks,
        evaluators=evaluators,
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


def restore_cpu_threads(
    start: CheckpointRef | None, config: TrainConfig, processes: Processes, threads: CpuThreads | None
) -> None:
    """Set the number of CPU threads to that of the checkpoint, if the layout is the same and the threads fit.

    The number of threads decides the last bits of sums, so a log line reports it.

    Args:
        threads: threads chosen for this process; None = keep the current number.
    """
    if start is None or start.weights_only or threads is None or processes.device.type != "cpu":
        return
    layout, now = dict(start.manifest.world), torch.get_num_threads()
    saved = layout.pop("cpu_threads", None)
    if type(saved) is not int or saved == now or layout != layout_of_run(config):
        return
    if threads.is_chosen and 1 <= saved <= threads.fitting:
        torch.set_num_threads(saved)
        log.info("cpu_threads is %d as before: sums stay bit-equal", saved)
    else:
        log.info("cpu_threads was %d and is now %d: sums differ in their last bits", saved, now)


def _initial_state(
    config: TrainConfig, tokens: TokenSchedule, training_tokens: int | None, saved: Manifest, rollback: Rollback | None
) -> TrainState:
    total_steps, run_steps = config.run.num_steps.to_steps(tokens, training_tokens), config.run.run_steps
    stop_step = total_steps if run_steps is None else min(total_steps, saved.step + run_steps)
    if rollback is not None:
        stop_step = rollback.stop_step
    progress = Progress(saved.step, saved.tokens_seen, saved.seconds)
    return TrainState(total_steps, stop_step, tokens.tokens_per_step, progress)


def check_and_build_dims(config: TrainConfig, processes: Processes) -> Dims:
    """Check that the model can train with these settings, and build the job's dimensions; a collective call.

    Raises:
        ConfigError: the device does not support the kernels, the optimizer or a score cannot be built, or the model
            does not fit in memory.
    """
    shape = resolve_shape(config.model)
    check_kernels(config, shape, processes.device)
    on_every_rank(lambda: try_optimizer(config.optimizer))
    on_every_rank(lambda: Metrics(config.evaluation.extra_scores))
    dims = build_run_dims(config, processes)
    on_every_rank(lambda: check_memory(config, shape, dims, processes))
    return dims


def build_run_dims(config: TrainConfig, processes: Processes) -> Dims:
    """Build the dimensions of a run, and enable deterministic kernels under `--deterministic`; a collective call."""
    if config.run.deterministic:
        use_deterministic_kernels()
    return build_dims(config.parallel, processes, timeout=collective_timeout(config.guard))


def check_kernels(config: TrainConfig, shape: LlamaShape, device: torch.device) -> None:
    """Refuse settings that no kernel of the device or attention of the block supports; a collective call."""
    if (scaling := config.parallel.float8) is not None:
        on_every_rank(lambda: check_float8(scaling, device))
    dtype = compute_dtype(config.parallel, device)
    is_fixed = not config.data.document_mask or has_kernel_for_documents(device, dtype, shape.head_dim)
    if config.parallel.use_torch_compile and not is_fixed:
        raise ConfigError(
            "--use_torch_compile=true needs fixed shapes, and --document_mask=true changes them in each step on "
            f"{device.type} in {str(dtype).removeprefix('torch.')} with head size {shape.head_dim}. Drop one of them"
        )
    if config.parallel.context_parallel_size > 1 and shape.block is not None:
        on_every_rank(lambda: check_shared_attention(shape))


def check_shared_attention(shape: LlamaShape) -> None:
    """Check that a user-defined block can attend to tokens of other ranks.

    Raises:
        ConfigError: its attention is no subclass of `Attention`, and would see the tokens of this rank alone.
    """
    with torch.device("meta"):
        block = block_class(shape)(shape, 0)
    if not any(isinstance(module, Attention) for module in block.modules()):
        raise ConfigError(
            f"--block={shape.block} has no module of pretraining.model.attention.Attention, and other attention would "
            "see only this rank's part of a sequence: use it or a subclass, or give --context_parallel_size=1"
        )


def use_deterministic_kernels() -> None:
    """Make PyTorch use kernels that give the same bits each time."""
    # Libraries read these variables at their first use, which is later. NCCL picks algorithms by measuring otherwise.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Filling every new buffer finds reads of uninitialised memory, but costs time and makes nothing deterministic.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
