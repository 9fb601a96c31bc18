"""The composition root: the only place that sees every part.

    config + processes -> restore point -> data -> model -> optimizer -> restored state -> Run

Whatever can fail here fails on all ranks alike (`on_rank_zero`, `on_every_rank`), so that a mistake is one message and
no hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pretraining.checkpoint import store
from pretraining.checkpoint.manager import CheckpointManager, Restorable, find_checkpoint
from pretraining.checkpoint.state import FORMAT_VERSION, Manifest, check_same_model, tensor_state
from pretraining.config.batch import BatchPlan, plan_batch
from pretraining.config.durations import Progress, resolve_warmup_steps
from pretraining.config.intervals import Interval
from pretraining.config.recipes import dump_config
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.data.batch import StepBatch
from pretraining.data.dataset import OpenedDatasets, SplitName
from pretraining.data.loader import Loader
from pretraining.errors import CheckpointError, PretrainError
from pretraining.evaluation.held_out import Evaluator
from pretraining.model.flops import flops_per_token
from pretraining.model.init import initialize_weights, parameter_name
from pretraining.model.llama import Llama
from pretraining.observability.observer import Observer
from pretraining.observability.progress import ProgressDisplay, Silent, choose_display
from pretraining.observability.throughput import Stopwatch, peak_tflops
from pretraining.observability.trackers import Tracker, open_trackers
from pretraining.optim.adamw import build_adamw, materialise_state
from pretraining.optim.schedules import WarmupCosine
from pretraining.parallel.agreement import Agreement
from pretraining.parallel.mesh import build_mesh
from pretraining.parallel.precision import compute_dtype, precision_policy
from pretraining.parallel.processes import Processes, on_every_rank, on_rank_zero
from pretraining.parallel.sharding import shard_model
from pretraining.train.data import open_data, open_loader
from pretraining.train.loop import Run
from pretraining.train.messages import announce
from pretraining.train.state import TrainState
from pretraining.train.step import StepContext

CONFIG_FILE = "config.yaml"
LOGS = "logs"


@dataclass(frozen=True)
class Parts:
    """What a run is made of before it has a state; gathered for the functions below."""

    config: TrainConfig
    processes: Processes
    shape: LlamaShape
    restorable: Restorable | None
    data: OpenedDatasets | None
    plan: BatchPlan
    total_steps: int

    @property
    def training_tokens(self) -> int | None:
        """Tokens of one pass over the datasets; made-up data has no end."""
        return self.data.training_tokens if self.data is not None else None

    def loader(self, split: SplitName) -> Loader:
        """This rank's loader of a split; a collective call."""
        return open_loader(self.data, self.config, self.plan, self.processes.rank, self.shape.vocab_size, split)


def build_run(config: TrainConfig, processes: Processes) -> Run:
    """Put a run together and restore what it starts from; a collective call.

    Raises:
        PretrainError: any mistake of the user, the same on all ranks.
    """
    if config.run.deterministic:
        _use_deterministic_kernels()
    shape = resolve_shape(config.model)
    restorable = on_rank_zero(lambda: find_checkpoint(config.checkpoint))
    if restorable is not None:
        check_same_model(restorable.manifest, shape, str(restorable.path))
    on_rank_zero(lambda: _make_run_folder(config))
    data = open_data(config, processes, say=print)
    restored_batch = restorable.manifest.global_batch_size if restorable else None
    plan = plan_batch(config.batch, processes.world_size, restored_batch)
    tokens_per_step = plan.global_batch_size * config.data.seq_length
    training_tokens = data.training_tokens if data is not None else None
    total_steps = config.run.num_steps.to_steps(tokens_per_step, training_tokens)
    parts = Parts(config, processes, shape, restorable, data, plan, total_steps)

    mesh = build_mesh(config.parallel, processes.world_size, processes.local_world_size, processes.device.type)
    model = build_model(shape, config, mesh, processes.device, initialize=restorable is None)
    # Taken now: while parameters are gathered, a module shows whole copies in place of its shards.
    parameters = {parameter_name(name): parameter for name, parameter in model.named_parameters()}
    optimizer = build_adamw(model, config.optimizer)
    state = _initial_state(parts)
    loader = parts.loader("train")
    if restorable is not None:
        materialise_state(optimizer)
        store.load_tensors(restorable.path, tensor_state(parameters, optimizer))
        on_every_rank(lambda: loader.load_state_dict(restorable.manifest.data))
    return _assemble(parts, mesh, model, parameters, optimizer, state, loader)


def build_model(
    shape: LlamaShape, config: TrainConfig, mesh: DeviceMesh, device: torch.device, *, initialize: bool
) -> Llama:
    """The model on its devices: described on the meta device, sharded, then given memory and values shard by shard.

    Args:
        shape: dimensions.
        config: strategy, precision and seed.
        mesh: with axes (replicate, shard).
        device: of this rank.
        initialize: whether to draw initial weights; a restored run overwrites them.
    """
    with torch.device("meta"):
        model = Llama(shape)
    policy = precision_policy(compute_dtype(config.parallel.mixed_precision, device))
    shard_model(model, model.blocks, mesh, config.parallel.sharding_strategy, policy)
    model.to_empty(device=device)
    model.tie_weights()
    if initialize:
        initialize_weights(model, shape, config.run.seed, device)
    return model


def _assemble(
    parts: Parts,
    mesh: DeviceMesh,
    model: Llama,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    loader: Loader,
) -> Run:
    config, processes = parts.config, parts.processes
    warmup_steps = resolve_warmup_steps(
        config.schedule.warmup_steps, parts.total_steps, state.tokens_per_step, parts.training_tokens
    )
    schedule = WarmupCosine(
        config.optimizer.learning_rate, warmup_steps, parts.total_steps, config.schedule.min_lr_ratio
    )
    context = StepContext(
        model=model,
        parameters=list(parameters.values()),
        optimizer=optimizer,
        schedule=schedule,
        grad_clip_thresh=config.optimizer.grad_clip_thresh,
        mesh=mesh,
        device=processes.device,
    )
    stopwatch = Stopwatch()
    observer = _build_observer(parts, stopwatch, state)
    evaluator = Evaluator(
        model=model,
        open_batches=_held_out_batches(parts),
        device=processes.device,
        interval=Interval(config.evaluation.eval_interval, parts.training_tokens),
        activity=stopwatch.activity,
        report=observer.after_evaluation,
    )

    def manifest_for(progress: Progress, evaluation_loss: float | None, files: dict[str, int]) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            step=progress.steps,
            tokens_seen=progress.tokens,
            loss=observer.last_loss,
            evaluation_loss=evaluation_loss,
            data=loader.state_dict(),
            global_batch_size=parts.plan.global_batch_size,
            model=asdict(parts.shape),
            world=store.world_description(config.parallel.sharding_strategy),
            torch_version=torch.__version__,
            files=files,
            config=dump_config(config),
        )

    checkpoints = CheckpointManager(
        run=Path(config.checkpoint.ckpt_save_path),
        interval=Interval(config.checkpoint.checkpoint_interval, parts.training_tokens),
        tensors=lambda: tensor_state(parameters, optimizer),
        manifest_for=manifest_for,
        activity=stopwatch.activity,
        note=observer.note,
    )
    announce(config, processes, parts.shape, parts.plan, state, parts.restorable, observer.note)
    return Run(
        state, context, _batches(loader, processes.rank), observer, evaluator, checkpoints, Agreement(), stopwatch
    )


def _initial_state(parts: Parts) -> TrainState:
    """Where the run stands, from the checkpoint if there is one."""
    progress = Progress(0, 0)
    if parts.restorable is not None:
        progress = Progress(parts.restorable.manifest.step, parts.restorable.manifest.tokens_seen)
    run_steps = parts.config.run.run_steps
    stop_step = parts.total_steps if run_steps is None else min(parts.total_steps, progress.steps + run_steps)
    tokens_per_step = parts.plan.global_batch_size * parts.config.data.seq_length
    return TrainState(parts.total_steps, stop_step, tokens_per_step, progress)


def _build_observer(parts: Parts, stopwatch: Stopwatch, state: TrainState) -> Observer:
    config, device = parts.config, parts.processes.device
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    display: ProgressDisplay = Silent()
    trackers: list[Tracker] = []
    if parts.processes.is_main:
        logs = Path(config.checkpoint.ckpt_save_path) / LOGS
        tracker_dir = Path(config.report.tracker_dir) if config.report.tracker_dir else logs
        trackers = open_trackers(config.report.tracker, logs, tracker_dir, state.step)
        display = choose_display(config.report.progress, parts.total_steps, peak)
    return Observer(
        interval=Interval(config.report.report_interval, parts.training_tokens),
        total_steps=parts.total_steps,
        flops_per_token=flops_per_token(parts.shape, config.data.seq_length),
        peak_tflops=peak,
        device=device,
        stopwatch=stopwatch,
        display=display,
        trackers=trackers,
    )


def _held_out_batches(parts: Parts) -> Callable[[], AbstractContextManager[Iterable[StepBatch]]] | None:
    """Opens the batches of an evaluation, the same ones each time; None where nothing is held out."""
    if parts.config.data.held_out_fraction == 0:
        return None
    loader = parts.loader("held_out")  # made at once: too few held-out documents should not show after a thousand steps

    @contextmanager
    def open_batches() -> Iterator[Iterable[StepBatch]]:
        loader.rewind()
        with closing(_batches(loader, parts.processes.rank)) as batches:
            yield batches

    return open_batches


def _batches(loader: Loader, rank: int) -> Generator[StepBatch, None, None]:
    """The loader's batches until closed; an error in reading them, which only this rank knows of, names the rank."""
    try:
        with loader:
            yield from loader
    except PretrainError as error:
        error.rank = rank
        raise


def _make_run_folder(config: TrainConfig) -> None:
    """Make the run's folder and write the resolved settings into it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = Path(config.checkpoint.ckpt_save_path)
    try:
        (folder / store.CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        temporary = folder / (CONFIG_FILE + ".tmp")
        temporary.write_text(dump_config(config), encoding="utf-8")
        temporary.replace(folder / CONFIG_FILE)
    except OSError as error:
        raise CheckpointError(
            f"--ckpt_save_path={folder} cannot be written: {error}. Give a folder that this user may write."
        ) from None


def _use_deterministic_kernels() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
