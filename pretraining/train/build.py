"""Construction of a run: the only place that sees all of its components.

    Plan -> model, optimizer -> restored tensors -> Run

Errors are raised on all ranks alike (`on_rank_zero`, `on_every_rank`), so a mistake gives one message and no hang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from pretraining.best import Best
from pretraining.checkpoint.branches import Branches
from pretraining.checkpoint.chunks import tensor_state
from pretraining.checkpoint.hf_import import record_origin
from pretraining.checkpoint.manager import CheckpointManager, layout_of_run, manifest_of_run
from pretraining.checkpoint.manifest import (
    EVALUATION_SETS_STATE,
    EVALUATION_STATE,
    GUARDS_STATE,
    LOSS_STATE,
    METRIC_STATE,
    REPORTED_LOSS_STATE,
    SCHEDULE_STATE,
    TRACKERS_STATE,
    Stateful,
)
from pretraining.checkpoint.mirror import Mirror, fetch_start
from pretraining.checkpoint.own_checkpoints import NO_COPIES, branches_of_start
from pretraining.checkpoint.restore import load
from pretraining.checkpoint.run_folder import write_config
from pretraining.checkpoint.saver import Saver
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.data.prepared import keep_tokenizer
from pretraining.data.resume import newly_skipped
from pretraining.distributed.dims import Dims
from pretraining.distributed.host_sync import HostSync
from pretraining.distributed.loss_scaler import LossScaler
from pretraining.distributed.parallelize import ParallelModel, compute_dtype, parallelize
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.distributed.replica_check import Replicas
from pretraining.distributed.watchdog import collective_timeout
from pretraining.errors import DamagedError
from pretraining.evaluation.held_out import Evaluator
from pretraining.files import writing_into
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.model.init import initialize_parameters, parameter_name
from pretraining.model.llama import Llama
from pretraining.observability.block_norms import BlockNorms
from pretraining.observability.collector import Collector
from pretraining.observability.display import Display, choose_display
from pretraining.observability.events import Events
from pretraining.observability.metrics import Metrics, MetricsHook
from pretraining.observability.observer import Observer
from pretraining.observability.profiler import Profiler
from pretraining.observability.stragglers import StragglerWatch
from pretraining.observability.throughput import Stopwatch, Throughput
from pretraining.observability.trackers import Trackers, open_trackers
from pretraining.optim.registry import build_optimizer, measure_state
from pretraining.optim.state import (
    OPTIMIZER_STATE,
    OptimizerRecord,
    begin_training,
    check_shards,
    evaluation_mode,
    has_tensors,
    materialise_state,
)
from pretraining.progress import Interval
from pretraining.train.garbage import GarbageCollection
from pretraining.train.job import Job
from pretraining.train.loop import Run
from pretraining.train.messages import changed_settings, log_plan
from pretraining.train.open_data import byte_lengths, read_batches
from pretraining.train.plan import Plan
from pretraining.train.run_status import RunStatusWriter
from pretraining.train.stability import Guards, SpikeDetector
from pretraining.train.step import StepContext

log = logging.getLogger(__name__)

REPORT_STATE = "report"  # in checkpoints
MIRROR_WAIT_SHARE = 0.8
"""Share of --hang_timeout that the end of a run waits for its last checkpoint's copy; less than the watchdog waits."""
MIRROR_WAIT_SECONDS = 600.0
"""Base of the same wait if --hang_timeout is off."""


def build_run(plan: Plan, job: Job) -> Run:
    """Build a run from its plan, and restore its start point; a collective call.

    Raises:
        DamagedError: the start point is damaged.
        PretrainError: any mistake of the user, the same on all ranks.
        Preempted: a stop was requested before the first step.
    """
    plan.processes.activity.restart(step=plan.state.step)
    restore_cpu_threads(plan.start, plan.config, plan.processes, job.threads)
    _fetch_start(plan, job.status.events)
    model, optimizer = _load_model_and_optimizer(plan)
    log_plan(plan)
    _add_events(plan, job.status.events)
    if plan.start is None:  # late, since it is slow: errors in the data settings come first
        initialize_parameters(model.parameters, plan.shape, plan.config.run.seed, plan.processes.device)
    run = _assemble(plan, _build_context(plan, model, optimizer, job.hook), job)
    begin_training(optimizer)
    on_every_rank(job.requests.raise_if_pending)
    _take_over(run, job.status.events)
    on_rank_zero(lambda: _write_records(plan))
    on_every_rank(job.requests.raise_if_pending)
    job.status.mark_training(plan.state, lambda: run.checkpoints.newest_step)
    return run


def _take_over(run: Run, events: Events) -> None:
    """Make the start point the newest checkpoint of the run, and set aside what the run gives up; a collective call."""
    start, rollback, step = run.plan.start, run.plan.rollback, run.state.step
    if rollback is None and (start is None or not start.is_own):
        return
    others = run.checkpoints.take_over(start, run.state, rolls_back=rollback is not None)
    paths = [str(path) for path in others]
    if rollback is not None:
        first, last, (begin, end) = rollback.before_step, rollback.last_step, rollback.samples
        text = f"rollback {rollback.number} to before step {first}, skipping samples {begin}-{end - 1}"
        log.info("step %d  %s", last, text)
        details = {"number": rollback.number, "first_step": first, "samples": [begin, end - 1]}
        events.add("rollback", last, **details, checkpoints_dropped=paths)
    elif start is not None and start.is_rewind:
        events.add("return", step, checkpoint=str(start.path), set_aside=paths)


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


def _fetch_start(plan: Plan, events: Events) -> None:
    """Fetch what the start needs from object stores; a collective call."""
    start, config = plan.start, plan.config.checkpoint
    if start is not None and (start.copy or start.best_copy or start.aside):
        on_rank_zero(partial(fetch_start, config, start))
        on_rank_zero(partial(events.open, config.folder))  # the file may be a new one


def _write_records(plan: Plan) -> None:
    """Write the settings of an accepted start, and what exports of a new run keep of the model it starts from."""
    start, config = plan.start, plan.config.checkpoint
    if config.ckpt_save_path is None:
        return
    with writing_into(config.folder):
        write_config(plan.config)
        keep_tokenizer(plan.config.data, config.folder)
        if start is None or not start.is_own:
            named = config.ckpt_load_path or config.resume_from_checkpoint or ""
            record_origin(config.folder, None if start is None else start.path, named)


def _load_model_and_optimizer(plan: Plan) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """Build model and optimizer, and load the start point into them; a collective call."""
    model = build_model(plan.shape, plan.config, plan.dims, plan.processes.device)
    optimizer = build_optimizer(model.parameters, plan.config.optimizer)
    record = plan.start.manifest.state.get(OPTIMIZER_STATE) if plan.start is not None and plan.loads_optimizer else None
    measured = measure_state(plan.config.optimizer)
    if measured is not None and measured.is_wrapped:
        check_shards(plan.config.optimizer.optimizer, model.parameters, record)
    if plan.start is not None:
        loads_state = plan.loads_optimizer and has_tensors(record)
        if loads_state:
            materialise_state(optimizer)
        load(plan.start, tensor_state(model.parameters, optimizer if loads_state else None))
    return model, optimizer


def _add_events(plan: Plan, events: Events) -> None:
    """Record the start point, what the user changes there, and the data phase if a new one begins at this step."""
    step, start, phase, data = plan.state.step, plan.start, plan.loader.reader.mixture.phases[-1], {}
    if start is not None:
        damaged = list(start.damaged)
        events.add("restore", step, checkpoint=str(start.path), weights_only=start.weights_only, passed_over=damaged)
    if plan.rollback is None and plan.restored is not None:
        data = plan.restored.manifest.data
        if changes := changed_settings(plan.restored.config, plan.config):
            events.add("settings", step, changes={name: list(values) for name, values in changes.items()})
    skipped = newly_skipped(plan.config.data.skipped_ranges, data)
    if plan.rollback is None and skipped:
        events.add("skip_samples", step, samples=[[begin, end - 1] for begin, end in skipped])
    if phase.first_step == step:
        events.add("phase", step, global_batch_size=phase.global_batch_size, weights=phase.weights)


def build_model(shape: LlamaShape, config: TrainConfig, dims: Dims, device: torch.device) -> ParallelModel:
    """Build the model and lay it out over the ranks; its values are undefined (`initialize_parameters`).

    Parameter names are those of checkpoints, without the prefixes of compilation and activation checkpointing.
    """
    with torch.device("meta") if config.parallel.low_cpu_fsdp else device:
        model = Llama(shape, config.loss)
    parallel = parallelize(model, model.model.layers, config.parallel, dims, device, model.tie_weights)
    parallel.parameters = {parameter_name(name): parameter for name, parameter in parallel.parameters.items()}
    return parallel


def _assemble(plan: Plan, context: StepContext, job: Job) -> Run:
    config, processes, state, tokens = plan.config, plan.processes, plan.state, plan.training_tokens
    stopwatch, host_sync, events = Stopwatch(), HostSync(), job.status.events
    stopwatch.add_listener(processes.activity.turn_to)
    observer = _build_observer(plan, context, stopwatch, job.status)

    def should_stop() -> bool:
        state.request_stop(host_sync.exchange(stopwatch.elapsed, job.requests.pending()).stop)
        return state.preempted

    evaluator = _build_evaluator(plan, context, observer, should_stop)
    replicas = Replicas(list(context.model.parameters.values()), plan.dims)
    is_resumed = plan.restored is not None and plan.restored.is_own
    guards = Guards(config.guard, plan.loader, replicas, processes.activity, tokens, events, is_resumed=is_resumed)
    states: dict[str, Stateful] = {
        GUARDS_STATE: guards,
        EVALUATION_STATE: evaluator,
        LOSS_STATE: evaluator.loss,
        SCHEDULE_STATE: plan.learning_rate,
        EVALUATION_SETS_STATE: plan.evaluation.record,
        REPORT_STATE: context.collector,
        REPORTED_LOSS_STATE: observer.best_loss,
        TRACKERS_STATE: observer.trackers,
    }
    if evaluator.best is not evaluator.loss:
        states[METRIC_STATE] = evaluator.best
    if context.spikes is not None:
        states["spikes"] = context.spikes
    if context.scaler is not None:
        states["loss_scale"] = context.scaler
    if config.optimizer.optimizer not in OPTIMIZERS:
        states[OPTIMIZER_STATE] = OptimizerRecord(context.optimizer, plan.loads_optimizer)
    try:
        checkpoints = _build_checkpoints(plan, context, states, evaluator, job)
    except DamagedError:
        observer.trackers.close()  # the next try opens them again
        raise
    evaluator.best.stop_if_due(state)
    folder = Path(config.checkpoint.ckpt_save_path or "")  # a run without a folder cannot profile
    profiler = Profiler(config.profiler, folder, state.step + 1, tokens, processes.device, processes.rank, stopwatch)
    return Run(
        plan=plan,
        state=state,
        context=context,
        batches=read_batches(plan.loader, processes.rank),
        observer=observer,
        evaluator=evaluator,
        checkpoints=checkpoints,
        host_sync=host_sync,
        stop_requests=job.requests,
        stopwatch=stopwatch,
        guards=guards,
        garbage=GarbageCollection(config.run.gc_interval),
        profiler=profiler,
    )


def _build_context(
    plan: Plan, model: ParallelModel, optimizer: torch.optim.Optimizer, hook: MetricsHook | None
) -> StepContext:
    config, device = plan.config, plan.processes.device
    spikes = None
    if config.guard.spike_threshold is not None:
        # These conditions shift the usual loss, so the detector starts a new window when one of them changes.
        conditions = {"phases": len(plan.loader.reader.mixture.phases), "document_mask": config.data.document_mask}
        spikes = SpikeDetector(config.guard.spike_threshold, config.guard.spike_window, device, conditions)
    shard_group, sources = plan.dims.group("shard"), plan.loader.reader.sources
    interval = config.report.norms_interval
    metrics = on_every_rank(lambda: Metrics(config.evaluation.extra_scores, hook, model.module))
    return StepContext(
        model=model,
        optimizer=optimizer,
        learning_rate=plan.learning_rate,
        grad_clip_thresh=config.optimizer.grad_clip_thresh,
        shard_group=shard_group,
        device=device,
        spikes=spikes,
        scaler=LossScaler(device) if compute_dtype(config.parallel, device) == torch.float16 else None,
        collector=Collector(metrics, [source.name for source in sources], optimizer, shard_group),
        activity=plan.processes.activity,
        norms=BlockNorms(interval, model.module, model.parameters, shard_group) if interval else None,
    )


def _build_observer(plan: Plan, context: StepContext, stopwatch: Stopwatch, status: RunStatusWriter) -> Observer:
    # A resumed run keeps its tracker ids. A run that starts from another run's checkpoint gets new ones.
    own = plan.restored.manifest if plan.restored is not None and plan.restored.is_own else None
    run_ids, pending = (own.state.get(TRACKERS_STATE, {}), own.pending) if own else ({}, ())
    config, processes, state = plan.config, plan.processes, plan.state

    def open_all() -> Trackers:
        return open_trackers(config, state.step, run_ids, pending, status.run_id)

    display, shows_step_time = Display(), config.data.use_dummy_dataset
    if processes.is_main:
        display = choose_display(config.report.progress, state.total_steps, processes.world_size, shows_step_time)
    return Observer(
        interval=Interval(config.report.report_interval, plan.training_tokens),
        collector=context.collector,
        throughput=Throughput(config, plan.shape, processes.device, stopwatch, state.progress),
        display=display,
        stragglers=StragglerWatch(config.guard.straggler_factor, processes.activity),
        trackers=on_every_rank(lambda: open_all() if processes.is_main else Trackers()),
        events=status.events,
        last_loss=None if plan.restored is None else plan.restored.manifest.loss,
        norms=context.norms,
    )


def _build_evaluator(
    plan: Plan, context: StepContext, observer: Observer, should_stop: Callable[[], bool]
) -> Evaluator:
    evaluation, opened, metric = plan.config.evaluation, plan.opened, plan.evaluation.metric
    limit = evaluation.early_stopping_evaluations
    loss = Best(plan.evaluation.loss, limit if metric is None else 0)
    table_V = byte_lengths(plan.config, plan.processes, plan.shape.vocab_size) if plan.evaluation.sources else None
    return Evaluator(
        model=context.model.module,
        sources=plan.evaluation.sources,
        device=context.device,
        interval=Interval(evaluation.eval_interval, plan.training_tokens),
        observer=observer,
        should_stop=should_stop,
        evaluators=opened.evaluators,
        tasks=opened.tasks,
        tasks_interval=Interval(
            evaluation.eval_interval if evaluation.eval_tasks_interval is None else evaluation.eval_tasks_interval,
            plan.training_tokens,
        ),
        loss=loss,
        best=loss if metric is None else Best(metric, limit),
        byte_lengths_V=table_V,
        metrics=context.collector.metrics,
        sampler=opened.sampler if evaluation.sample_at_evaluations else None,
        evaluation_mode=partial(evaluation_mode, context.optimizer, context.model.masters_changed),
    )


def _build_checkpoints(
    plan: Plan,
    context: StepContext,
    states: Mapping[str, Stateful],
    evaluator: Evaluator,
    job: Job,
) -> CheckpointManager:
    config, status, saver, mirror = plan.config, job.status, None, None
    own = plan.restored if plan.restored is not None and plan.restored.is_own else None
    if config.checkpoint.ckpt_mirror_path is not None:
        mirror = Mirror(
            config.checkpoint,
            on_rank_zero(lambda: status.run_id),
            own.path if own is not None and own.manifest.recorded_files else None,
            expected=None if plan.start is None else plan.start.mirrored,
            is_checked=plan.rollback is None,
            spare_cores=plan.processes.device.type == "cpu",
        )
    if config.checkpoint.ckpt_save_path is not None:
        timeout = collective_timeout(config.guard)
        saver = Saver(config.checkpoint, context.model.parameters, context.optimizer, job.lease, timeout, mirror)
    manifest = manifest_of_run(config, *on_rank_zero(lambda: (status.run_id, _begin_branch(plan, mirror, status))))
    checkpoints = CheckpointManager(
        config.checkpoint,
        saver,
        manifest,
        plan.loader,
        states,
        evaluator.observer,
        evaluator.loss,
        evaluator.best,
        plan.training_tokens,
        mirror,
        mirror_wait_seconds=MIRROR_WAIT_SHARE * (config.guard.hang_timeout.amount or MIRROR_WAIT_SECONDS),
    )
    if plan.restored is not None:
        checkpoints.restore(plan.restored)
    return checkpoints


def _begin_branch(plan: Plan, mirror: Mirror | None, status: RunStatusWriter) -> Branches:
    """Begin the branch of the checkpoints that this start will save, and return its branches; on rank 0."""
    config = plan.config.checkpoint
    if config.ckpt_save_path is None:
        return ()
    copies = NO_COPIES if mirror is None else mirror.copies
    start = plan.start.manifest if plan.start is not None and plan.start.is_own else None
    branches = branches_of_start(
        config.folder, start, plan.state.step, copies, above=status.branch, is_plain=not plan.is_return
    )
    status.record_branch(branches[-1].number)
    return branches
