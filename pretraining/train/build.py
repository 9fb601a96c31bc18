"""The composition root: the only place that sees every part of a run.

    Plan -> model, optimizer -> restored tensors -> Run

What can fail here fails on all ranks alike (`on_rank_zero`, `on_every_rank`), so that a mistake is one message and no
hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.manager import CheckpointManager, manifest_of_run
from pretraining.checkpoint.manifest import EVALUATION_STATE, GUARDS_STATE, Stateful, tensor_state
from pretraining.checkpoint.mirror import Mirror
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.run_path import write_config
from pretraining.checkpoint.saver import Saver
from pretraining.checkpoint.start_point import load
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.distributed.host_sync import HostSync
from pretraining.distributed.loss_scaler import LossScaler
from pretraining.distributed.parallelize import ParallelModel, compute_dtype, parallelize
from pretraining.distributed.processes import on_every_rank, on_rank_zero
from pretraining.distributed.replicas import Replicas
from pretraining.distributed.watchdog import collective_timeout
from pretraining.evaluation.early_stopping import EarlyStopping
from pretraining.evaluation.generation import TextSampler
from pretraining.evaluation.held_out import Evaluator
from pretraining.evaluation.scores import Scores
from pretraining.model.init import initialize_parameters, parameter_name
from pretraining.model.llama import Llama
from pretraining.observability.custom_metrics import CustomMetrics, MetricsHook
from pretraining.observability.events import Events
from pretraining.observability.observer import Observer
from pretraining.observability.profiler import Profiler
from pretraining.observability.throughput import Stopwatch
from pretraining.observability.trackers import Trackers, open_trackers
from pretraining.optim.optimizer import materialise_state
from pretraining.optim.registry import build_optimizer
from pretraining.progress import Interval
from pretraining.train.garbage import GarbageCollection
from pretraining.train.loop import Run
from pretraining.train.messages import announce
from pretraining.train.open_data import batches_of, byte_lengths
from pretraining.train.plan import Plan
from pretraining.train.preemption import StopRequests
from pretraining.train.run_status import StatusKeeper
from pretraining.train.spikes import SpikeDetector
from pretraining.train.stability import Guards
from pretraining.train.step import StepContext

TRACKERS_STATE, REPORT_STATE = "trackers", "report"  # in checkpoints
COPYING_SHARE = 0.8
"""Of --hang_timeout: how long the end of a run waits for the copy of its last checkpoint. The watchdog waits longer."""
COPYING_SECONDS = 600.0
"""The same where nothing counts as a hang."""


def build_run(
    plan: Plan,
    stop_requests: StopRequests,
    status: StatusKeeper,
    lease: Lease | None = None,
    hook: MetricsHook | None = None,
    sampler: TextSampler | None = None,
) -> Run:
    """Put a run together and restore what it starts from; a collective call.

    Args:
        stop_requests: what asks this rank to end early.
        status: is told how far the run is, and what happens to it.
        lease: on the run's folder, checked before each commit; None = the run keeps nothing.
        hook: makes the user's own metrics; None = there are none.
        sampler: has the model write text; None = it writes none.

    Raises:
        DamagedError: what the run starts from is damaged.
        PretrainError: any mistake of the user, the same on all ranks.
        Preempted: a signal came before the first step.
    """
    model, optimizer = _restore(plan)
    announce(plan)
    _add_events(plan, status.events)
    if plan.start is None:  # late: mistakes in the settings of the data need not wait for it
        initialize_parameters(model.parameters, plan.shape, plan.config.run.seed, plan.processes.device)
    context = _build_context(plan, model, optimizer, hook)
    run = _assemble(plan, context, stop_requests, status.events, lease, sampler)
    on_rank_zero(lambda: write_config(plan.config))
    on_every_rank(stop_requests.end_before_training)
    if plan.start is not None and plan.start.newer:  # nothing refuses the start any more
        on_rank_zero(partial(set_aside, plan.config.checkpoint.folder, plan.start.newer))
    status.training(plan.state)
    return run


def _restore(plan: Plan) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """Make the model and the optimizer, and read what the run starts from into them; a collective call.

    Raises:
        DamagedError: what the run starts from is damaged.
        CheckpointError: it does not fit.
    """
    model = build_model(plan.shape, plan.config, plan.mesh, plan.processes.device, initialize=False)
    optimizer = build_optimizer(model.parameters, plan.config.optimizer)
    if plan.start is not None:
        if plan.restored is not None:
            materialise_state(optimizer)
        load(plan.start, tensor_state(model.parameters, optimizer if plan.takes_optimizer else None))
    return model, optimizer


def _add_events(plan: Plan, events: Events) -> None:
    """Tell what the run starts from, and the phase of its data that begins here, if one does."""
    step, phase = plan.state.step, plan.loader.reader.mixture.phases[-1]
    if plan.start is not None:
        events.add(
            "restore",
            step,
            checkpoint=str(plan.start.path),
            weights_only=plan.start.weights_only,
            passed_over=list(plan.start.damaged),
        )
    if phase.first_step == step:
        events.add("phase", step, global_batch_size=phase.global_batch_size, weights=phase.weights)


def build_model(
    shape: LlamaShape, config: TrainConfig, mesh: DeviceMesh, device: torch.device, *, initialize: bool
) -> ParallelModel:
    """Make the model, laid out on its devices; without `initialize` its values are undefined.

    Its parameters have the names of checkpoints, without what compilation and activation checkpointing add.
    """
    with torch.device("meta") if config.parallel.low_cpu_fsdp else device:
        model = Llama(shape, config.loss)
    laid_out = parallelize(model, model.model.layers, config.parallel, mesh, device, model.tie_weights)
    laid_out.parameters = {parameter_name(name): parameter for name, parameter in laid_out.parameters.items()}
    if initialize:
        initialize_parameters(laid_out.parameters, shape, config.run.seed, device)
    return laid_out


def _assemble(
    plan: Plan,
    context: StepContext,
    stop_requests: StopRequests,
    events: Events,
    lease: Lease | None,
    sampler: TextSampler | None,
) -> Run:
    config, processes, state, tokens = plan.config, plan.processes, plan.state, plan.training_tokens
    stopwatch, host_sync = Stopwatch(), HostSync()
    stopwatch.add_listener(processes.activity.turn_to)
    observer = _build_observer(plan, context, stopwatch, events)

    def should_stop() -> bool:
        state.request_stop(host_sync.exchange(stopwatch.elapsed, stop_requests.pending()).stop)
        return state.preempted

    evaluator = _build_evaluator(plan, context, observer, should_stop, sampler)
    replicas = Replicas(list(context.model.parameters.values()), plan.mesh)
    guards = Guards(config.guard, plan.loader, replicas, processes.activity, tokens, events)
    states: dict[str, Stateful] = {
        GUARDS_STATE: guards,
        EVALUATION_STATE: evaluator,
        REPORT_STATE: observer,
        TRACKERS_STATE: observer.trackers,
    }
    if context.spikes is not None:
        states["spikes"] = context.spikes
    if context.scaler is not None:
        states["loss_scale"] = context.scaler
    checkpoints = _build_checkpoints(plan, context, states, observer, lease)
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
        stop_requests=stop_requests,
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
        # Another mixture, another batch or a document mask shifts the losses: what was usual before says nothing then.
        conditions = {"phases": len(plan.loader.reader.mixture.phases), "document_mask": config.data.document_mask}
        spikes = SpikeDetector(config.guard.spike_threshold, config.guard.spike_window, device, conditions)
    return StepContext(
        model=model,
        optimizer=optimizer,
        learning_rate=plan.learning_rate,
        grad_clip_thresh=config.optimizer.grad_clip_thresh,
        shard_group=plan.mesh["shard"].get_group(),
        device=device,
        spikes=spikes,
        scaler=LossScaler(device) if compute_dtype(config.parallel, device) == torch.float16 else None,
        metrics=CustomMetrics(hook, model.module, device),
        scores=on_every_rank(lambda: Scores(config.evaluation.extra_scores)),
        activity=plan.processes.activity,
    )


def _build_observer(plan: Plan, context: StepContext, stopwatch: Stopwatch, events: Events) -> Observer:
    # Trackers go on under the ids that they had for this run; another one's shall not get its points.
    is_same_run = plan.restored is not None and plan.restored.is_own
    run_ids = plan.restored.manifest.state.get(TRACKERS_STATE, {}) if plan.restored and is_same_run else {}
    is_main = plan.processes.is_main
    observer = Observer(
        plan.config,
        plan.shape,
        plan.processes,
        plan.state,
        stopwatch,
        plan.training_tokens,
        on_every_rank(lambda: open_trackers(plan.config, plan.state.step, run_ids) if is_main else Trackers()),
        optimizer=context.optimizer,
        shard_group=context.shard_group,
        events=events,
        datasets=tuple(source.name for source in plan.loader.reader.sources),
        score_columns=context.scores.columns,
        score_values=context.scores.values,
    )
    if plan.restored is not None:
        observer.last_loss = plan.restored.manifest.loss
    return observer


def _build_evaluator(
    plan: Plan, context: StepContext, observer: Observer, should_stop: Callable[[], bool], sampler: TextSampler | None
) -> Evaluator:
    evaluation = plan.config.evaluation
    is_chosen = evaluation.best_by is not None or bool(evaluation.eval_datasets)
    table_V = byte_lengths(plan.config, plan.processes, plan.shape.vocab_size) if plan.sources else None
    return Evaluator(
        model=context.model.module,
        sources=plan.sources,
        device=context.device,
        interval=Interval(evaluation.eval_interval, plan.training_tokens),
        stopwatch=observer.stopwatch,
        observer=observer,
        should_stop=should_stop,
        best_by=evaluation.best_by,
        early_stopping=EarlyStopping(evaluation.early_stopping_evaluations, _decided_by(plan) if is_chosen else ()),
        byte_lengths_V=table_V,
        metrics=context.metrics,
        scores=context.scores,
        sampler=sampler if evaluation.sample_at_evaluations else None,
    )


def _build_checkpoints(
    plan: Plan, context: StepContext, states: Mapping[str, Stateful], observer: Observer, lease: Lease | None
) -> CheckpointManager:
    config, saver, mirror = plan.config, None, None
    own = plan.restored if plan.restored is not None and plan.restored.is_own else None
    if config.checkpoint.ckpt_mirror_path is not None:
        step, newest = (own.step, own.path if own.manifest.files else None) if own else (0, None)
        mirror = Mirror(config.checkpoint, step, newest, spare_cores=plan.processes.device.type == "cpu")
    if config.checkpoint.ckpt_save_path is not None:
        timeout = collective_timeout(config.guard)
        saver = Saver(config.checkpoint, context.model.parameters, context.optimizer, lease, timeout, mirror)
    checkpoints = CheckpointManager(
        config.checkpoint,
        saver,
        manifest_of_run(config),
        plan.loader,
        states,
        observer,
        plan.training_tokens,
        mirror,
        patience=COPYING_SHARE * (config.guard.hang_timeout.amount or COPYING_SECONDS),
    )
    if plan.restored is not None:
        checkpoints.restore(plan.restored, _decided_by(plan) if plan.sources else None)
    return checkpoints


def _decided_by(plan: Plan) -> tuple[str, ...]:
    """Return the names of the evaluation sets that decide which checkpoint is the best."""
    best_by = plan.config.evaluation.best_by
    return tuple(sorted(each for source in plan.sources for each in source.sets if best_by in (None, each)))
