"""The composition root: the only place that sees every part of a run.

    config + processes -> start point -> data -> model -> restored tensors, optimizer -> place in the data -> Run

What can fail here fails on all ranks alike (`on_rank_zero`, `on_every_rank`), so that a mistake is one message and no
hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pretraining.checkpoint.lease import Lease, look_at_lease
from pretraining.checkpoint.manager import CheckpointContents, CheckpointManager
from pretraining.checkpoint.manifest import EVALUATION_STATE, GUARDS_STATE, Stateful, unfinished_saves
from pretraining.checkpoint.start_point import CheckpointRef, check_run_folder, write_config
from pretraining.config.batch_plan import BatchPlan, plan_batch
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.data.dataset import build_loader
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets
from pretraining.distributed.float8 import check_float8
from pretraining.distributed.host_sync import HostSync
from pretraining.distributed.loss_scaler import LossScaler
from pretraining.distributed.mesh import build_mesh
from pretraining.distributed.parallelize import ParallelModel, compute_dtype, parallelize
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.distributed.replicas import Replicas
from pretraining.distributed.watchdog import collective_timeout
from pretraining.errors import ConfigError
from pretraining.evaluation.early_stopping import EarlyStopping
from pretraining.evaluation.generation import TextSampler
from pretraining.evaluation.held_out import EvaluationSource, Evaluator
from pretraining.evaluation.scores import Scores
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.model.attention import has_kernel_for_documents
from pretraining.model.init import initialize_parameters, parameter_name
from pretraining.model.llama import Llama
from pretraining.observability.custom_metrics import MetricsHook, NoMetrics, custom_metrics
from pretraining.observability.events import Events
from pretraining.observability.observer import Observer, build_observer
from pretraining.observability.out_of_memory import MemoryWatch
from pretraining.observability.profiler import Profiler
from pretraining.observability.throughput import Stopwatch
from pretraining.observability.trackers import Trackers, check_trackers, open_trackers
from pretraining.optim.registry import try_optimizer
from pretraining.optim.schedules import LearningRate, build_learning_rate
from pretraining.progress import Interval, Progress, TokenSchedule, TrainState
from pretraining.train.garbage import GarbageCollection
from pretraining.train.loop import Run
from pretraining.train.memory_check import check_memory
from pretraining.train.messages import announce
from pretraining.train.open_data import OpenedData, batches_of, byte_lengths, evaluation_sources, open_data
from pretraining.train.preemption import StopRequests
from pretraining.train.restore import (
    choose_start_point,
    find_start_point,
    restore,
    settle_going_back,
    take_threads,
    takes_optimizer,
)
from pretraining.train.run_status import StatusKeeper
from pretraining.train.spikes import SpikeDetector
from pretraining.train.stability import Guards
from pretraining.train.step import StepContext

TRACKERS_STATE, REPORT_STATE = "trackers", "report"  # in checkpoints


@dataclass(frozen=True)
class Job:
    """What a run shares with those that take its place after a rollback.

    Attributes:
        stop_requests: what asks this rank to end early.
        status: run_status.json; None = nobody reads it.
        lease: on the run's folder, checked before each commit; None = nobody else writes there.
        memory: told whose memory to measure where it runs out.
        threads: that were chosen for this process; None = it keeps those that it has.
        events: what happens to the run.
        launcher: what has started the processes.
        hook: makes the user's own metrics; None = there are none.
        sampler: has the model write text; None = it writes none.
    """

    processes: Processes
    stop_requests: StopRequests = field(default_factory=StopRequests)
    status: StatusKeeper | None = None
    lease: Lease | None = None
    memory: MemoryWatch | None = None
    threads: CpuThreads | None = None
    events: Events = field(default_factory=Events)
    launcher: str = "single"
    hook: MetricsHook | None = None
    sampler: TextSampler | None = None


@dataclass(frozen=True)
class RunOutline:
    """What a run is about to do, as far as that can be told without its tensors.

    Attributes:
        start: what the run starts from; None = initial weights.
        restored: `start`, if the run continues it; None if it begins at step 0.
        abandoned: what interrupted saves have left in the run's folder.
        data: the datasets; None for made-up data.
        training_tokens: of one pass over the datasets; made-up data has no end.
        token_schedule: tokens of each step, also of those before the start point.
        sources: what is evaluated on.
        threads: how many compute on a CPU, beside those of before, in words; None = nothing to say.
    """

    config: TrainConfig
    processes: Processes
    shape: LlamaShape
    start: CheckpointRef | None
    restored: CheckpointRef | None
    abandoned: list[Path]
    data: OpenedDatasets | None
    training_tokens: int | None
    batch: BatchPlan
    token_schedule: TokenSchedule
    learning_rate: LearningRate
    loader: Loader
    sources: list[EvaluationSource]
    state: TrainState
    threads: str | None


@dataclass(frozen=True)
class RunPlan(RunOutline):
    """What a run is put together from: its model is restored, its data open, its place in both known.

    Attributes:
        parameters: of the model, by name, without what the layout adds to names.
    """

    mesh: DeviceMesh
    model: ParallelModel
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer


def build_run(
    config: TrainConfig,
    job: Job,
    *,
    given: TrainConfig | None = None,
    mesh: DeviceMesh | None = None,
    stop_step: int | None = None,
) -> Run:
    """Puts a run together and restores what it starts from; a collective call.

    Args:
        given: what goes into the run's folder as its settings, once nothing is refused any more; None = nothing.
        mesh: of an earlier run with the same settings; None = make one.
        stop_step: where this invocation ends; None = as the settings say.

    Raises:
        PretrainError: any mistake of the user, the same on all ranks.
        Preempted: a signal came before the first step.
    """
    processes = job.processes
    processes.activity.restart(step=0)
    if config.run.deterministic:
        use_deterministic_kernels()
    if (scaling := config.parallel.float8) is not None:
        on_every_rank(lambda: check_float8(scaling, processes.device))
    plan = _plan_run(config, job, mesh, stop_step)
    processes.activity.step = plan.state.step
    announce(plan)
    _add_events(plan, job.events)
    if plan.start is None:  # late: mistakes in the settings of the data need not wait for it
        initialize_parameters(plan.parameters, plan.shape, config.run.seed, processes.device)
    run = _assemble(plan, job)
    if given is not None:
        on_rank_zero(lambda: write_config(given))
    on_every_rank(job.stop_requests.end_before_training)
    if plan.start is not None and plan.start.going_back:
        start = plan.start
        on_rank_zero(lambda: settle_going_back(config.checkpoint, start, job.status))
    if job.status is not None:
        job.status.training(plan.state)
    if job.memory is not None:
        job.memory.watch(plan.optimizer, plan.state, plan.mesh["shard"].size())
    return run


def _add_events(plan: RunPlan, events: Events) -> None:
    """Tells what the run starts from, and the phase of its data that begins here, if one does."""
    step, phase = plan.state.step, plan.loader.reader.mixture.phases[-1]
    if plan.start is not None:
        start = {"checkpoint": str(plan.start.path), "weights_only": plan.start.weights_only}
        events.add("restore", step, **start, passed_over=list(plan.start.passed_over))
    if phase.first_step == step:
        events.add("phase", step, global_batch_size=phase.global_batch_size, weights=phase.weights)


def outline_run(
    config: TrainConfig, processes: Processes, status: StatusKeeper, threads: CpuThreads | None, index_folder: str
) -> RunOutline:
    """Finds out what `build_run` would do, without a tensor and without a trace in the run's folder; a collective call.

    Args:
        index_folder: where indices go that the data does not have yet.

    Raises:
        PretrainError: as `build_run` and what comes before it, as far as that can be told without tensors.
    """
    shape, device = resolve_shape(config.model), processes.device
    if (scaling := config.parallel.float8) is not None:
        on_every_rank(lambda: check_float8(scaling, device))
    start = None if config.checkpoint.ckpt_save_path is None else _outline_start(config, status)
    opened = open_data(config, processes, index_folder)
    shard_size = build_run_mesh(config, processes)["shard"].size()
    on_every_rank(lambda: check_memory(config, shape, shard_size, processes))
    if config.parallel.use_torch_compile:
        _check_shapes_are_fixed(config, shape, device)
    on_every_rank(lambda: try_optimizer(config.optimizer))
    if start is not None and not start.weights_only:
        takes_optimizer(start, config)
    outline = _outline(config, processes, start, opened, threads, stop_step=None)
    on_rank_zero(lambda: check_trackers(config))
    on_rank_zero(lambda: Scores(config.evaluation.extra_scores))
    return outline


def _outline_start(config: TrainConfig, status: StatusKeeper) -> CheckpointRef | None:
    """Find what a run would start from, and check that its folder lets it; a collective call."""
    run = config.checkpoint.folder
    on_rank_zero(lambda: look_at_lease(run))
    start = find_start_point(config, status)
    step, goes_back = (start.step, start.going_back) if start is not None else (0, False)
    on_rank_zero(lambda: check_run_folder(run))
    on_rank_zero(lambda: status.refuse_crash_loop(run, step, goes_back=goes_back))
    return start


def _plan_run(config: TrainConfig, job: Job, mesh: DeviceMesh | None, stop_step: int | None) -> RunPlan:
    processes = job.processes
    shape = resolve_shape(config.model)
    start = choose_start_point(config, job.status)
    on_every_rank(job.stop_requests.end_before_training)
    processes.activity.step = start.step if start is not None else 0
    opened = open_data(config, processes)

    if mesh is None:  # later runs of a job take the memory of the first
        mesh = build_run_mesh(config, processes)
        shard_size = mesh["shard"].size()
        on_every_rank(lambda: check_memory(config, shape, shard_size, processes))
    model = build_model(shape, config, mesh, processes.device, initialize=False)
    parameters = {parameter_name(name): parameter for name, parameter in model.parameters.items()}
    start, optimizer = restore(start, parameters, config, job.status)
    outline = _outline(config, processes, start, opened, job.threads, stop_step)
    return RunPlan(**vars(outline), mesh=mesh, model=model, parameters=parameters, optimizer=optimizer)


def _outline(
    config: TrainConfig,
    processes: Processes,
    start: CheckpointRef | None,
    opened: OpenedData,
    threads: CpuThreads | None,
    stop_step: int | None,
) -> RunOutline:
    """Finds the place of a run in its data, and its length; a collective call."""
    shape, data = resolve_shape(config.model), opened.training
    is_kept = config.checkpoint.ckpt_save_path is not None
    abandoned = on_rank_zero(lambda: unfinished_saves(config.checkpoint.folder) if is_kept else [])
    restored = start if start is not None and not start.weights_only else None
    told = None
    if restored is not None and threads is not None and processes.device.type == "cpu":
        told = take_threads(restored.manifest.world, config.parallel, processes.world_size, threads)

    batch = plan_batch(config.batch, processes.world_size, restored.manifest.global_batch_size if restored else None)
    loader = on_every_rank(
        lambda: build_loader(data, config.data, batch, processes.rank, config.run.seed, shape.vocab_size)
    )
    if restored is not None:
        on_every_rank(lambda: loader.load_state_dict(restored.manifest.data))
    sources = evaluation_sources(config, opened, batch, processes, shape.vocab_size)
    token_schedule = _token_schedule(loader, config.data.seq_length)
    training_tokens = data.training_tokens if data is not None else None
    learning_rate = build_learning_rate(config.schedule, config.run.num_steps, token_schedule, training_tokens)
    return RunOutline(
        config=config,
        processes=processes,
        shape=shape,
        start=start,
        restored=restored,
        abandoned=abandoned,
        data=data,
        training_tokens=training_tokens,
        batch=batch,
        token_schedule=token_schedule,
        learning_rate=learning_rate,
        loader=loader,
        sources=sources,
        state=_initial_state(config, token_schedule, training_tokens, restored, stop_step),
        threads=told,
    )


def _initial_state(
    config: TrainConfig,
    token_schedule: TokenSchedule,
    training_tokens: int | None,
    restored: CheckpointRef | None,
    stop_step: int | None,
) -> TrainState:
    progress = Progress(0, 0)
    if restored is not None:
        progress = Progress(restored.manifest.step, restored.manifest.tokens_seen, restored.manifest.seconds)
    total_steps = config.run.num_steps.to_steps(token_schedule, training_tokens)
    if stop_step is None:
        run_steps = config.run.run_steps
        stop_step = total_steps if run_steps is None else min(total_steps, progress.steps + run_steps)
    return TrainState(total_steps, stop_step, token_schedule.tokens_per_step, progress)


def _token_schedule(loader: Loader, seq_length: int) -> TokenSchedule:
    """Tokens of a run's steps, from the first."""
    phases = loader.reader.mixture.phases
    segments, tokens = [], 0
    for phase, after in zip(phases, (*phases[1:], None), strict=True):
        tokens_per_step = phase.global_batch_size * seq_length
        segments.append((phase.first_step, tokens, tokens_per_step))
        if after is not None:
            tokens += (after.first_step - phase.first_step) * tokens_per_step
    return TokenSchedule(tuple(segments))


def build_model(
    shape: LlamaShape, config: TrainConfig, mesh: DeviceMesh, device: torch.device, *, initialize: bool
) -> ParallelModel:
    """Makes the model, laid out on its devices; without `initialize` its values are undefined.

    Raises:
        ConfigError: its blocks cannot be compiled for the documents of the data.
    """
    if config.parallel.use_torch_compile:
        _check_shapes_are_fixed(config, shape, device)
    with torch.device("meta") if config.parallel.low_cpu_fsdp else device:
        model = Llama(shape, config.loss)
    laid_out = parallelize(model, model.model.layers, config.parallel, mesh, device, model.tie_weights)
    if initialize:
        initialize_parameters(laid_out.parameters, shape, config.run.seed, device)
    return laid_out


def _check_shapes_are_fixed(config: TrainConfig, shape: LlamaShape, device: torch.device) -> None:
    """Refuses attention whose shapes change from step to step, for which blocks would be compiled each time."""
    dtype = compute_dtype(config.parallel, device)
    if config.data.document_mask and not has_kernel_for_documents(device, dtype, shape.head_dim):
        raise ConfigError(
            "--use_torch_compile=true compiles for fixed shapes, and with --document_mask=true attention has those of "
            f"the documents here, others in each step ({device.type}, {str(dtype).removeprefix('torch.')}, head size "
            f"{shape.head_dim}; a GPU of compute capability 8.0 takes all at once, in bfloat16 or float16, at head "
            "sizes of 8, 16, ... 256). Leave one of them out"
        )


def build_run_mesh(config: TrainConfig, processes: Processes) -> DeviceMesh:
    """Makes the mesh that a run is laid out on; a collective call."""
    sizes = (processes.world_size, processes.local_world_size)
    return build_mesh(config.parallel, *sizes, processes.device.type, timeout=collective_timeout(config.guard))


def _assemble(plan: RunPlan, job: Job) -> Run:
    config, processes, state, tokens = plan.config, plan.processes, plan.state, plan.training_tokens
    stopwatch = Stopwatch(turn_to=processes.activity.turn_to)
    host_sync = HostSync()
    scores = on_every_rank(lambda: Scores(config.evaluation.extra_scores))
    trackers = _open_trackers(plan)
    observer = build_observer(
        *(config, plan.shape, processes, state, stopwatch, tokens, trackers),
        optimizer=plan.optimizer,
        shard_group=plan.mesh["shard"].get_group(),
        events=job.events,
        datasets=tuple(source.name for source in plan.loader.reader.sources),
        score_columns=scores.columns,
        score_values=scores.values,
    )
    if plan.restored is not None:
        observer.last_loss = plan.restored.manifest.loss
    metrics = custom_metrics(job.hook, plan.model.module, processes.device)
    context = _step_context(plan, metrics, scores)

    def should_stop() -> bool:
        state.request_stop(host_sync.exchange(stopwatch.elapsed, job.stop_requests.pending()).stop)
        return state.preempted

    evaluator = _evaluator(plan, stopwatch, observer, should_stop, metrics, scores, job.sampler)
    replicas = Replicas(list(plan.parameters.values()), plan.mesh)
    guards = Guards(config.guard, plan.loader, replicas, processes.activity, tokens, job.events)
    states: dict[str, Stateful] = {
        GUARDS_STATE: guards,
        EVALUATION_STATE: evaluator,
        REPORT_STATE: observer,
        TRACKERS_STATE: trackers,
    }
    if context.spikes is not None:
        states["spikes"] = context.spikes
    if context.scaler is not None:
        states["loss_scale"] = context.scaler
    contents = CheckpointContents(config, plan.parameters, plan.optimizer, plan.loader, observer, states)
    checkpoints = CheckpointManager(
        *(config.checkpoint, contents, stopwatch),
        training_tokens=tokens,
        restored=plan.restored,
        lease=job.lease,
        events=job.events,
        decided_by=_decided_by(plan) if plan.sources else None,
    )
    evaluator.early_stopping.end_if_due(state)
    folder = Path(config.checkpoint.ckpt_save_path or "")  # without one, there is nothing to profile
    profiler = Profiler(config.profiler, folder, state.step + 1, tokens, processes.device, processes.rank, stopwatch)
    return Run(
        state=state,
        context=context,
        batches=batches_of(plan.loader, processes.rank),
        observer=observer,
        evaluator=evaluator,
        checkpoints=checkpoints,
        host_sync=host_sync,
        stop_requests=job.stop_requests,
        stopwatch=stopwatch,
        guards=guards,
        garbage=GarbageCollection(config.run.gc_interval),
        profiler=profiler,
        mesh=plan.mesh,
    )


def _evaluator(
    plan: RunPlan,
    stopwatch: Stopwatch,
    observer: Observer,
    should_stop: Callable[[], bool],
    metrics: NoMetrics,
    scores: Scores,
    sampler: TextSampler | None,
) -> Evaluator:
    config, processes = plan.config, plan.processes
    is_chosen = config.evaluation.best_by is not None or bool(config.evaluation.eval_datasets)
    stops_by = _decided_by(plan) if is_chosen else ()
    return Evaluator(
        model=plan.model.module,
        sources=plan.sources,
        device=processes.device,
        interval=Interval(config.evaluation.eval_interval, plan.training_tokens),
        stopwatch=stopwatch,
        observer=observer,
        should_stop=should_stop,
        best_by=config.evaluation.best_by,
        early_stopping=EarlyStopping(config.evaluation.early_stopping_evaluations, stops_by),
        byte_lengths_V=byte_lengths(config, processes, plan.shape.vocab_size) if plan.sources else None,
        metrics=metrics,
        scores=scores,
        sampler=sampler if config.evaluation.sample_at_evaluations else None,
    )


def _decided_by(plan: RunPlan) -> tuple[str, ...]:
    """Returns the names of the evaluation sets that decide which checkpoint is the best."""
    best_by = plan.config.evaluation.best_by
    return tuple(sorted(each for source in plan.sources for each in source.sets if best_by in (None, each)))


def _open_trackers(plan: RunPlan) -> Trackers:
    """Opens rank 0's trackers, by the ids that they had for the run before; a collective call."""
    is_same_run = plan.restored is not None and plan.restored.is_own  # another one's shall not get its points
    run_ids = plan.restored.manifest.state.get(TRACKERS_STATE, {}) if plan.restored and is_same_run else {}
    is_main = plan.processes.is_main
    return on_every_rank(lambda: open_trackers(plan.config, plan.state.step, run_ids) if is_main else Trackers())


def _spike_detector(plan: RunPlan) -> SpikeDetector | None:
    guard, data = plan.config.guard, plan.config.data
    if guard.spike_threshold is None:
        return None
    # Another mixture, another batch or a document mask shifts the losses: what was usual before says nothing then.
    conditions = {"phases": len(plan.loader.reader.mixture.phases), "document_mask": data.document_mask}
    return SpikeDetector(guard.spike_threshold, guard.spike_window, plan.processes.device, conditions)


def _step_context(plan: RunPlan, metrics: NoMetrics, scores: Scores) -> StepContext:
    config, device = plan.config, plan.processes.device
    in_float16 = compute_dtype(config.parallel, device) == torch.float16
    return StepContext(
        model=plan.model,
        optimizer=plan.optimizer,
        learning_rate=plan.learning_rate,
        grad_clip_thresh=config.optimizer.grad_clip_thresh,
        shard_group=plan.mesh["shard"].get_group(),
        device=device,
        spikes=_spike_detector(plan),
        scaler=LossScaler(device) if in_float16 else None,
        metrics=metrics,
        scores=scores,
        activity=plan.processes.activity,
    )


def use_deterministic_kernels() -> None:
    """Makes PyTorch choose kernels that give the same bits each time."""
    # Libraries read these when they are first used, which is later. NCCL would choose algorithms by what it measures.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # It would fill every buffer that is made, to find reads of memory that nobody wrote: a search, not a promise.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
