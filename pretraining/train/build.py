"""The composition root: the only place that sees every part.

    config + processes -> restore point -> data -> model -> restored tensors, optimizer -> place in the data -> Run

Whatever can fail here fails on all ranks alike (`on_rank_zero`, `on_every_rank`), so that a mistake is one message and
no hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.listing import incomplete_checkpoints
from pretraining.checkpoint.state import Stateful
from pretraining.config.batch import plan_batch
from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.batch import StepBatch
from pretraining.data.loader import Loader
from pretraining.distributed.float8 import check_float8
from pretraining.distributed.fsdp import MicroBatchSync, compute_dtype
from pretraining.distributed.host_sync import HostSync
from pretraining.distributed.loss_scaler import LossScaler
from pretraining.distributed.mesh import build_mesh
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.distributed.watchdog import collective_timeout
from pretraining.errors import DataError, PretrainError
from pretraining.evaluation.held_out import Evaluator
from pretraining.model.init import initialize_weights, parameter_name
from pretraining.model.llama import Llama
from pretraining.observability.throughput import Stopwatch
from pretraining.optim.schedules import WarmupCosine
from pretraining.progress import Interval, Progress, TrainState, resolve_warmup_steps
from pretraining.train.build_checkpoints import build_checkpoints
from pretraining.train.build_guards import build_guards, build_spike_detector
from pretraining.train.build_model import build_model
from pretraining.train.build_origin import choose_start_point, restore
from pretraining.train.build_profiler import build_profiler
from pretraining.train.data import open_data, open_loader, token_schedule_of
from pretraining.train.garbage import GarbageCollection
from pretraining.train.loop import Run
from pretraining.train.messages import announce
from pretraining.train.parts import Parts
from pretraining.train.preemption import StopRequests
from pretraining.train.run_folder import build_observer, write_config
from pretraining.train.run_status import StatusKeeper
from pretraining.train.spikes import SpikeDetector
from pretraining.train.step import StepContext


def build_run(
    config: TrainConfig,
    processes: Processes,
    *,
    stop_requests: StopRequests | None = None,
    status: StatusKeeper | None = None,
    lease: Lease | None = None,
    mesh: DeviceMesh | None = None,
) -> Run:
    """Put a run together and restore what it starts from; a collective call.

    Args:
        config: the settings.
        processes: this process among the others.
        stop_requests: what tells this rank to end early; the loop looks at them. None = nothing.
        status: told where the start begins.
        lease: on the run's folder, looked at before each commit; None = nobody else writes there.
        mesh: of an earlier run with the same settings; None = make one.

    Raises:
        PretrainError: any mistake of the user, the same on all ranks.
    """
    processes.pulse.restart(step=0)
    if config.run.deterministic:
        _use_deterministic_kernels()
    if (scaling := config.parallel.float8) is not None:
        on_every_rank(lambda: check_float8(scaling, processes.device))
    shape = resolve_shape(config.model)
    origin = choose_start_point(config, shape, status)
    abandoned = on_rank_zero(lambda: incomplete_checkpoints(Path(config.checkpoint.ckpt_save_path)))
    processes.pulse.step = origin.step if origin is not None else 0
    data = open_data(config, processes)

    mesh = mesh if mesh is not None else _build_mesh(config, processes)
    model = build_model(shape, config, mesh, processes.device, initialize=False)
    # Taken now: while parameters are gathered, a module shows whole copies in place of its shards.
    parameters = {parameter_name(name): parameter for name, parameter in model.named_parameters()}
    origin, optimizer = restore(origin, model, parameters, config, shape, status)
    restorable = origin.checkpoint if origin is not None and not origin.weights_only else None
    weights = origin.checkpoint if origin is not None and origin.weights_only else None

    restored_batch = restorable.manifest.global_batch_size if restorable else None
    plan = plan_batch(config.batch, processes.world_size, restored_batch)
    loader = open_loader(data, config, plan, processes.rank, shape.vocab_size, "train")
    if restorable is not None:
        on_every_rank(lambda: loader.load_state_dict(restorable.manifest.data))
    token_schedule = token_schedule_of(loader, config.data.seq_length)
    total_steps = config.run.num_steps.to_steps(token_schedule, data.training_tokens if data is not None else None)
    parts = Parts(config, processes, shape, restorable, weights, abandoned, data, plan, token_schedule, total_steps)
    state = _initial_state(parts)
    processes.pulse.step = state.step
    if origin is None:  # late: mistakes in the settings of the data should not have to wait for it
        initialize_weights(model, shape, config.run.seed, processes.device)
    return _assemble(parts, mesh, model, parameters, optimizer, state, loader, stop_requests or StopRequests(), lease)


def _build_mesh(config: TrainConfig, processes: Processes) -> DeviceMesh:
    sizes = (processes.world_size, processes.local_world_size)
    return build_mesh(config.parallel, *sizes, processes.device.type, timeout=collective_timeout(config.guard))


def _assemble(
    parts: Parts,
    mesh: DeviceMesh,
    model: Llama,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    loader: Loader,
    stop_requests: StopRequests,
    lease: Lease | None,
) -> Run:
    config, processes = parts.config, parts.processes
    spikes = build_spike_detector(parts, loader)
    context = _build_step(parts, mesh, model, parameters, optimizer, spikes)
    stopwatch = Stopwatch(turn_to=processes.pulse.turn_to)
    host_sync = HostSync()
    observer = build_observer(parts, stopwatch, state)

    def told_to_end() -> bool:
        state.heed(host_sync.exchange(stopwatch.elapsed, stop_requests.pending()).stop)
        return state.preempted

    evaluator = Evaluator(
        model=model,
        open_batches=_held_out_batches(parts),
        device=processes.device,
        interval=Interval(config.evaluation.eval_interval, parts.training_tokens),
        activity=stopwatch.activity,
        report=observer.after_evaluation,
        told_to_end=told_to_end,
    )
    guards = build_guards(parts, mesh, context, loader, observer)
    states: dict[str, Stateful] = {"guards": guards, "evaluation": evaluator}
    if spikes is not None:
        states["spikes"] = spikes
    if context.scaler is not None:
        states["loss_scale"] = context.scaler
    checkpoints = build_checkpoints(parts, parameters, optimizer, loader, observer, stopwatch, states, lease)
    on_rank_zero(lambda: write_config(config))
    announce(parts, state, loader.changes_at_resume, observer.note)
    return Run(
        state=state,
        restored_from=parts.restorable.path if parts.restorable else None,
        context=context,
        batches=_batches(loader, processes.rank),
        observer=observer,
        evaluator=evaluator,
        checkpoints=checkpoints,
        host_sync=host_sync,
        stop_requests=stop_requests,
        stopwatch=stopwatch,
        guards=guards,
        garbage=GarbageCollection(config.run.gc_interval),
        profiler=build_profiler(parts, stopwatch, state, observer.note),
        mesh=mesh,
    )


def _build_step(
    parts: Parts,
    mesh: DeviceMesh,
    model: Llama,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    spikes: SpikeDetector | None,
) -> StepContext:
    config = parts.config
    warmup_steps = resolve_warmup_steps(
        config.schedule.warmup_steps, config.run.num_steps, parts.token_schedule, parts.training_tokens
    )
    schedule = WarmupCosine(
        config.optimizer.learning_rate, warmup_steps, parts.total_steps, config.schedule.min_lr_ratio
    )
    in_float16 = compute_dtype(config.parallel, parts.processes.device) == torch.float16
    return StepContext(
        model=model,
        sync=MicroBatchSync(model, mesh, config.parallel.sharding_strategy),
        parameters=list(parameters.values()),
        optimizer=optimizer,
        schedule=schedule,
        grad_clip_thresh=config.optimizer.grad_clip_thresh,
        shard_group=mesh["shard"].get_group(),
        device=parts.processes.device,
        spikes=spikes,
        scaler=LossScaler(parts.processes.device) if in_float16 else None,
    )


def _initial_state(parts: Parts) -> TrainState:
    """Where the run stands, from the checkpoint if there is one."""
    progress = Progress(0, 0)
    if parts.restorable is not None:
        manifest = parts.restorable.manifest
        progress = Progress(manifest.step, manifest.tokens_seen, manifest.seconds)
    run_steps = parts.config.run.run_steps
    stop_step = parts.total_steps if run_steps is None else min(parts.total_steps, progress.steps + run_steps)
    return TrainState(parts.total_steps, stop_step, parts.token_schedule.tokens_per_step, progress)


def _held_out_batches(parts: Parts) -> Callable[[], AbstractContextManager[Iterable[StepBatch]]] | None:
    """Opens the batches of an evaluation, the same ones each time; None where nothing is held out."""
    if parts.config.data.held_out_fraction == 0:
        return None
    loader = parts.held_out_loader()  # made at once: too few held-out documents should not show after a thousand steps

    @contextmanager
    def open_batches() -> Iterator[Iterable[StepBatch]]:
        loader.rewind()
        with closing(_batches(loader, parts.processes.rank)) as batches:
            yield parts.processes.pulse.watch(batches)

    return open_batches


def _batches(loader: Loader, rank: int) -> Generator[StepBatch, None, None]:
    """The loader's batches until closed; an error in reading them, which only this rank knows of, names the rank.

    What a thread that reads dies of comes here, too, once its step does.
    """
    try:
        with loader:
            yield from loader
    except PretrainError as error:
        error.rank = rank
        raise
    except Exception as error:  # a bug: it keeps its traceback
        error.add_note(f"on rank {rank}, reading the batch of step {loader.next_step + 1}")
        raise
    except SystemExit as ending:
        died = DataError(f"a thread that reads data has ended itself ({ending!r}), for step {loader.next_step + 1}")
        died.rank = rank
        raise died from ending


def _use_deterministic_kernels() -> None:
    # Libraries read these when they are first used, which is later. NCCL would choose algorithms by what it measures.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # It would fill every buffer that is made, to find reads of memory that nobody wrote: a search, not a promise.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
