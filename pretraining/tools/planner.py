"""`pretrain plan`: an estimate of the memory and the time of a run, made without a GPU.

settings + GPUs -> mesh, batch -> memory of a GPU (estimate/memory.py) -> fits?
                               -> time of a step (estimate/step_time.py) -> tokens/s, days, GPU-hours
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from pretraining.config.batch_sizes import BatchSizes, resolve_batch_sizes
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.strategies import STRATEGIES, DimSizes, dim_sizes
from pretraining.config.training import ALL_BLOCKS, DataConfig, ParallelConfig
from pretraining.config.variants import LlamaShape, name_of_model, resolve_shape
from pretraining.durations import TokenSchedule
from pretraining.errors import ConfigError
from pretraining.estimate.advice import memory_advice
from pretraining.estimate.costs import flops_per_token, parameter_count
from pretraining.estimate.devices import GPUS, Gpu
from pretraining.estimate.memory import MASTER_BYTES, MemoryEstimate, Rank, estimate_memory, optimizer_state_bytes
from pretraining.estimate.step_time import COMPUTE_BYTES, Cluster, StepTime, estimate_step_time
from pretraining.launch.program import FAILED
from pretraining.text import count_of, describe_passes, describe_repeats, format_gib, format_seconds
from pretraining.tools.command_settings import PlanConfig

USABLE_FRACTION = 0.9
"""Fraction of a GPU's memory to fill: allocators keep reserves, and the estimate has an error."""


@dataclass(frozen=True)
class RunEstimate:
    """Memory and speed of a run.

    Attributes:
        memory: estimate for one GPU.
        memory_bytes: memory of one GPU.
        tokens: tokens of a step.
        step: time of a step.
        mfu: model FLOPs utilization, a fraction of the GPUs' peak.
    """

    dims: DimSizes
    batch: BatchSizes
    memory: MemoryEstimate
    memory_bytes: int
    tokens: int
    step: StepTime
    mfu: float

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the memory of a GPU."""
        return self.memory.total <= self.memory_bytes

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Training speed, without evaluations and saves."""
        return self.tokens / self.step.total / self.dims.world


def plan(config: PlanConfig) -> None:
    """Print the estimate of a run; exit with code 1 if it does not fit.

    Raises:
        ConfigError: the GPUs do not divide into groups, or flags contradict each other.
    """
    config, shape = _with_state_bytes(config), resolve_shape(config.model)
    cluster = cluster_of(config)
    estimate = estimate_run(config, shape, cluster)
    if config.plan.json:
        print(json.dumps(as_document(config, shape, estimate)))
    else:
        print("\n".join(_report(config, shape, cluster, estimate)))
    if not estimate.fits:
        sys.exit(FAILED)


def estimate_run(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> RunEstimate:
    """Estimate memory and speed of the settings on a cluster.

    Raises:
        ConfigError: the GPUs do not divide into groups, or the batch does not fit the number of GPUs.
    """
    nodes, left = divmod(cluster.gpus, cluster.gpus_per_node)  # the last node may have fewer GPUs than the others
    dims = dim_sizes(config.parallel, [cluster.gpus_per_node] * (nodes * cluster.gpus_per_node) + [left] * left)
    batch = resolve_batch_sizes(config.batch, dims.data)
    resolved = replace(
        config.batch,
        batch_size=batch.micro_batch_size,
        grad_accum_steps=batch.grad_accum_steps,
        global_batch_size=None,
    )
    config = replace(config, batch=resolved)
    memory = estimate_memory(config, shape, _rank(config, dims))
    step = estimate_step_time(config, shape, batch, cluster, dims)
    tokens = batch.global_batch_size * config.data.seq_length
    flops = flops_per_token(shape, config.data.seq_length) * tokens
    return RunEstimate(
        dims=dims,
        batch=batch,
        memory=memory,
        memory_bytes=round(cluster.gpu.memory_gib * 2**30),
        tokens=tokens,
        step=step,
        mfu=flops / step.total / cluster.gpus / (cluster.gpu.peak_tflops * 1e12),
    )


def _rank(config: PlanConfig, dims: DimSizes) -> Rank:
    itemsize = MASTER_BYTES if config.parallel.mixed_precision is False else COMPUTE_BYTES
    return Rank(dims.shard, itemsize, "cuda", config.plan.optimizer_state_bytes)


def not_counted(config: PlanConfig) -> list[str]:
    """Return a line for each setting that changes memory or speed of a run but not the estimate."""
    parallel = config.parallel
    lines = {
        "--mixed_precision=false is counted in memory but not in time: float32 is slower": (
            parallel.mixed_precision is False
        ),
        f"--float8={parallel.float8} is not counted: memory and time are without it": bool(parallel.float8),
        "--document_mask=true is not counted: attention covers whole sequences": config.data.document_mask,
        "--deterministic=true is not counted: its kernels are slower": config.run.deterministic,
        "--low_cpu_fsdp=false is not counted: each GPU holds the whole model at the start": not parallel.low_cpu_fsdp,
        "--device=cpu is not counted: a plan assumes GPUs": parallel.device == "cpu",
    }
    return [line for line, is_set in lines.items() if is_set]


def cluster_of(config: PlanConfig) -> Cluster:
    """Return the GPUs that a plan is for."""
    options = config.plan
    gpu: Gpu = GPUS[options.gpu]
    network = gpu.network_gbits if options.network is None else options.network
    return Cluster(gpu, options.gpus, min(options.gpus, options.gpus_per_node), network)


def as_document(config: PlanConfig, shape: LlamaShape, estimate: RunEstimate) -> dict[str, object]:
    """Return the JSON object of an estimate, in seconds and bytes."""
    return {
        "model": name_of_model(config.model),
        "parameters": parameter_count(shape),
        "gpu": config.plan.gpu,
        "gpus": config.plan.gpus,
        "sharding_strategy": config.parallel.sharding_strategy,
        "group_size": estimate.dims.shard,
        "context_parallel_size": estimate.dims.context,
        "checkpointing": _checkpointing(config.parallel),
        "micro_batch_size": estimate.batch.micro_batch_size,
        "grad_accum_steps": estimate.batch.grad_accum_steps,
        "global_batch_size": estimate.batch.global_batch_size,
        "seq_length": config.data.seq_length,
        "memory_bytes": {**asdict(estimate.memory), "total": estimate.memory.total, "of_gpu": estimate.memory_bytes},
        "fits": estimate.fits,
        "step_seconds": {**asdict(estimate.step), "total": estimate.step.total},
        "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
        "mfu": estimate.mfu,
        **_length(config, estimate),
        "checkpoint_bytes": _checkpoint_bytes(config, shape),
        "not_counted": not_counted(config),
    }


def _length(config: PlanConfig, estimate: RunEstimate) -> dict[str, Any]:
    """Return steps, tokens, seconds and GPU-hours of a run; None if num_steps is in epochs, which needs the data."""
    if config.run.num_steps.unit == "epochs":
        return dict.fromkeys(("steps", "tokens", "seconds", "gpu_hours"))
    steps = config.run.num_steps.to_steps(TokenSchedule.steady(estimate.tokens), None)
    seconds = steps * estimate.step.total
    gpu_hours = seconds / 3600 * config.plan.gpus
    return {"steps": steps, "tokens": steps * estimate.tokens, "seconds": seconds, "gpu_hours": gpu_hours}


def _report(config: PlanConfig, shape: LlamaShape, cluster: Cluster, estimate: RunEstimate) -> Iterator[str]:
    yield _heading(config, shape, cluster)
    length = count_of(config.data.seq_length, "token")
    yield f"layout      {_layout(config, estimate)}; {estimate.batch.describe()}, {length} each"
    room = estimate.memory.total / estimate.memory_bytes
    verdict = "fits" if room <= USABLE_FRACTION else "may fit, with little room" if estimate.fits else "does not fit"
    needed, available = format_gib(estimate.memory.total), format_gib(estimate.memory_bytes)
    yield f"memory      {needed} of {available} per GPU, {room:.0%}: {verdict}"
    for name, size in asdict(estimate.memory).items():
        if name != "later_gradients":
            yield f"  {name.replace('_', ' '):16}{format_gib(size):>12}"
    if estimate.memory.later_gradients:
        later = format_gib(-estimate.memory.later_gradients)
        yield f"  {'not at once':16}{later:>12}  gradients that are made after the peak"
    if config.optimizer.optimizer not in OPTIMIZERS:
        size = config.plan.optimizer_state_bytes
        counted = "as AdamW, since it cannot be made here" if size is None else f"{size:.2f} bytes per parameter"
        yield f"  (the state of the optimizer is counted {counted}: set --optimizer_state_bytes to change it)"
    step = estimate.step
    yield f"step        {step.total:.3g} s on {estimate.tokens:,} tokens"
    recomputed = f", {step.recompute:.3f} s of it recomputation" if step.recompute else ""
    yield f"  compute         {step.compute:9.3f} s{recomputed}"
    yield f"  not hidden      {step.unhidden:9.3f} s of gathers, reductions, optimizer and launches"
    yield f"  communication   {step.exposed:9.3f} s exposed, {step.hidden:.3f} s overlapped with computation"
    yield (
        f"speed       {estimate.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, "
        f"{estimate.tokens_per_second_per_gpu * cluster.gpus:,.0f} in all; MFU {estimate.mfu:.0%} of "
        f"{cluster.gpu.peak_tflops:g} TFLOP/s"
    )
    yield f"run         {_run(config, estimate)}"
    tokens, passes = _count_reads(config.data, _length(config, estimate)["tokens"])
    lines = [*describe_passes(tokens, passes), describe_repeats(passes)] if tokens else []
    yield from (f"{'data' if number == 0 else '':11} {line}" for number, line in enumerate(filter(None, lines)))
    yield f"checkpoint  {format_gib(_checkpoint_bytes(config, shape))} each"
    if not estimate.fits:
        yield from _what_fits(config, shape, estimate)


def _what_fits(config: PlanConfig, shape: LlamaShape, estimate: RunEstimate) -> Iterator[str]:
    """Yield changes after which a run fits: of these settings, and of the layout that needs least memory."""
    parallel = replace(
        config.parallel,
        sharding_strategy="fsdp",
        fsdp_activation_checkpointing=True,
        selective_checkpointing=ALL_BLOCKS,
    )
    least = replace(config, parallel=parallel, batch=replace(config.batch, batch_size=1))
    flags = "--sharding_strategy=fsdp --fsdp_activation_checkpointing=true --batch_size=1"
    rank, limit = _rank(config, estimate.dims), USABLE_FRACTION * estimate.memory_bytes
    sharded = replace(rank, shard_size=estimate.dims.world)
    needed = estimate_memory(least, shape, sharded).total
    lines = memory_advice(config, shape, rank, limit)
    if needed <= limit:
        lines.append(f"{flags} (about {format_gib(needed)})")
    else:
        lines += [f"with {flags}:", *(f"  {change}" for change in memory_advice(least, shape, sharded, limit))]
    for number, line in enumerate(lines):
        yield f"{'' if number else 'what fits':11} {line}"


def _count_reads(data: DataConfig, tokens: int | None) -> tuple[dict[str, int], dict[str, float]]:
    """Return the tokens and the passes of a run per dataset; empty unless prepare.json has the sizes."""
    if data.data_path is None or tokens is None:
        return {}, {}
    # These import NumPy, which no other plan needs.
    from pretraining.data.storage.dataset_files import prepared_folders
    from pretraining.object_store import location
    from pretraining.tools.prepare.records import read_summary

    root, sizes = location(data.data_path), dict[str, float]()
    for name in data.datasets or [folder.name for folder in prepared_folders(root)]:
        with suppress(FileNotFoundError, NotADirectoryError):
            summary = read_summary(root / name)
            # The end of text is a token of each document.
            sizes[name.strip("/")] = (summary.tokens + summary.documents) * (1 - data.held_out_fraction)
    if len(sizes) < len(data.datasets):
        return {}, {}
    weights = dict(zip(sizes, data.weights, strict=True)) if data.weights else sizes
    read = {name: round(tokens * weight / sum(weights.values())) for name, weight in weights.items() if weight}
    return read, {name: count / sizes[name] for name, count in read.items()}


def _run(config: PlanConfig, estimate: RunEstimate) -> str:
    length = _length(config, estimate)
    if length["steps"] is None:
        return f"{config.run.num_steps} are passes over the data, which a plan does not read: use steps or tokens"
    size = f"{count_of(length['steps'], 'step')}, {length['tokens']:,} tokens"
    return f"{size}: {format_seconds(length['seconds'])}, {length['gpu_hours']:,.1f} GPU-hours"


def _heading(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> str:
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    where = (
        f"{nodes} nodes of {cluster.gpus_per_node}, {cluster.network_gbits:g} Gbit/s each" if nodes > 1 else "a node"
    )
    precision = "float32" if config.parallel.mixed_precision is False else config.parallel.mp_dtype
    compiled = "compiled" if config.parallel.use_torch_compile else "as if compiled (--use_torch_compile=true)"
    heading = (
        f"plan        {name_of_model(config.model)}, {parameter_count(shape):,} parameters, on {cluster.gpus} x "
        f"{config.plan.gpu} ({where}), in {precision}, {compiled}"
    )
    return "\n".join([heading, *(f"            {line}" for line in not_counted(config))])


def _layout(config: PlanConfig, estimate: RunEstimate) -> str:
    strategy, recomputed = config.parallel.sharding_strategy, _checkpointing(config.parallel)
    group = f", groups of {estimate.dims.shard}" if STRATEGIES[strategy].in_groups else ""
    context = f", sequences shared by {estimate.dims.context} GPUs" if estimate.dims.context > 1 else ""
    return f"{strategy}{group}{context}, checkpointing {recomputed}"


def _checkpointing(parallel: ParallelConfig) -> str:
    if not parallel.fsdp_activation_checkpointing:
        return "none"
    return "full" if parallel.selective_checkpointing == "1" else parallel.selective_checkpointing


def _checkpoint_bytes(config: PlanConfig, shape: LlamaShape) -> int:
    state = optimizer_state_bytes(config.optimizer, shape, 1, config.plan.optimizer_state_bytes)
    return MASTER_BYTES * parameter_count(shape) + state


def _with_state_bytes(config: PlanConfig) -> PlanConfig:
    """Return the settings with the measured state of a user-defined optimizer, unless it is given or not known here."""
    options, optimizer = config.plan, config.optimizer
    if optimizer.optimizer in OPTIMIZERS or options.optimizer_state_bytes is not None or find_spec("torch") is None:
        return config
    from pretraining.optim.registry import measure_state  # imports torch, which no other plan needs

    with suppress(ConfigError):  # its module may be on the cluster only
        if (measured := measure_state(optimizer)) is not None:
            return replace(config, plan=replace(options, optimizer_state_bytes=measured.bytes_per_parameter))
    return config
