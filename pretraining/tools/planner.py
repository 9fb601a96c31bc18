"""`pretrain plan`: an estimate of the memory and the time of a run, made without a GPU.

    settings + GPUs -> mesh, batch -> memory of a GPU (estimate/memory.py) -> fits?
                                   -> time of a step (estimate/step_time.py) -> tokens/s, days, GPU-hours

With `search`, the command estimates every strategy, group size, checkpointing and micro-batch, and lists those that
fit, fastest first. The global batch stays that of the settings, so all of them learn the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from pretraining.config.batch_sizes import BatchSizes, resolve_batch_sizes
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.strategies import STRATEGIES, DimSizes, dim_sizes, unsharded_sizes
from pretraining.config.training import ALL_BLOCKS, DataConfig, ParallelConfig, ShardingStrategy
from pretraining.config.values import format_value
from pretraining.config.variants import LlamaShape, name_of_model, resolve_shape
from pretraining.errors import ConfigError
from pretraining.estimate.advice import memory_advice
from pretraining.estimate.costs import flops_per_token, parameter_count
from pretraining.estimate.devices import GPUS, Gpu
from pretraining.estimate.memory import MASTER_BYTES, MemoryEstimate, Rank, estimate_memory, optimizer_state_bytes
from pretraining.estimate.step_time import COMPUTE_BYTES, Cluster, StepTime, estimate_step_time
from pretraining.progress import TokenSchedule
from pretraining.text import count_of, describe_passes, describe_repeats, format_gib, format_seconds, format_table
from pretraining.tools.commands import PlanConfig

USABLE_FRACTION = 0.9
"""Fraction of a GPU's memory that a search fills: allocators keep reserves, and the estimate has an error."""
CHECKPOINTING = ("none", "op", "1/2", "full")
"""Kinds of activation checkpointing that a search tries."""
LARGEST_MICRO_BATCH_TOKENS = 2**16
ROWS_SHOWN = 15
"""Rows of a search's table."""


@dataclass(frozen=True)
class LayoutEstimate:
    """Memory and speed of a run with one parallel layout.

    Attributes:
        memory: estimate for one GPU.
        memory_bytes: memory of one GPU.
        tokens: tokens of a step.
        step: time of a step.
        mfu: model FLOPs utilization, a fraction of the GPUs' peak.
    """

    dims: DimSizes
    parallel: ParallelConfig
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
    """Print the estimate of a run, or of all layouts that fit.

    Raises:
        ConfigError: the GPUs do not divide into groups, nothing fits, or flags contradict each other.
    """
    config, shape = _with_state_bytes(config), resolve_shape(config.model)
    options = config.plan
    cluster = cluster_of(config)
    plans = search(config, shape, cluster) if options.search else [make_plan(config, shape, cluster)]
    if not plans:
        raise ConfigError(_nothing_fits(config, shape, cluster))
    if options.json:
        lines: Iterable[str] = (json.dumps(as_document(config, shape, each)) for each in plans)
    else:
        lines = _table(config, shape, cluster, plans) if options.search else _report(config, shape, cluster, plans[0])
    print("\n".join(lines))


def make_plan(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> LayoutEstimate:
    """Estimate memory and speed of the settings on a cluster.

    Raises:
        ConfigError: the GPUs do not divide into groups, or the batch does not fit the number of GPUs.
    """
    dims = dims_on(cluster, config.parallel)
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
    return LayoutEstimate(
        dims=dims,
        parallel=config.parallel,
        batch=batch,
        memory=memory,
        memory_bytes=round(cluster.gpu.memory_gib * 2**30),
        tokens=tokens,
        step=step,
        mfu=flops / step.total / cluster.gpus / (cluster.gpu.peak_tflops * 1e12),
    )


def dims_on(cluster: Cluster, parallel: ParallelConfig) -> DimSizes:
    """Return the dimensions of a job on a cluster, whose last node may have fewer GPUs than the others."""
    nodes, left = divmod(cluster.gpus, cluster.gpus_per_node)
    return dim_sizes(parallel, [cluster.gpus_per_node] * (nodes * cluster.gpus_per_node) + [left] * left)


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


def search(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> list[LayoutEstimate]:
    """Return the layouts that fit: all strategies, group sizes, kinds of checkpointing and micro-batches.

    All have the global batch of the settings. The fastest is first; among equals, the one with least memory.
    """
    batch, ranks = config.batch, unsharded_sizes(config.parallel, cluster.gpus).data
    size = batch.global_batch_size or batch.batch_size * (batch.grad_accum_steps or 1) * ranks
    batch = replace(batch, global_batch_size=size, grad_accum_steps=None)
    found = _fitting(replace(config, batch=batch), shape, cluster)
    return sorted(found, key=lambda each: (-round(each.tokens_per_second_per_gpu), each.memory.total))


def _fitting(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> Iterator[LayoutEstimate]:
    for parallel in _layouts(config, cluster):
        for size in _micro_batches(config, dims_on(cluster, parallel).data):
            tried = replace(config, parallel=parallel, batch=replace(config.batch, batch_size=size))
            found = make_plan(tried, shape, cluster)
            is_new = found.batch.micro_batch_size == size  # otherwise it repeats another size
            if found.memory.total <= USABLE_FRACTION * found.memory_bytes and is_new:
                yield found
            elif found.batch.grad_accum_steps == 1:  # larger sizes need more; with accumulation, they may need less
                break


def _micro_batches(config: PlanConfig, ranks: int) -> list[int]:
    """Return powers of two and the divisors of a data-parallel rank's share of the global batch."""
    largest = max(1, LARGEST_MICRO_BATCH_TOKENS // config.data.seq_length)
    share = -(-(config.batch.global_batch_size or 1) // ranks)
    divisors = {size for size in range(1, min(share, largest) + 1) if share % size == 0}
    return sorted(divisors | {2**power for power in range(largest.bit_length())})


def _layouts(config: PlanConfig, cluster: Cluster) -> Iterator[ParallelConfig]:
    for context in _context_sizes(config, cluster):
        for strategy, group in _strategies(cluster):
            if group is not None and group % context:
                continue
            for checkpointing in CHECKPOINTING:
                yield replace(
                    config.parallel,
                    sharding_strategy=strategy,
                    hsdp_group_size=group,
                    context_parallel_size=context,
                    fsdp_activation_checkpointing=checkpointing != "none",
                    selective_checkpointing=ALL_BLOCKS if checkpointing in ("none", "full") else checkpointing,
                )


def _context_sizes(config: PlanConfig, cluster: Cluster) -> list[int]:
    """Return the given number of GPUs that share sequences; if it is 1, also powers of two within a node."""
    given, most = config.parallel.context_parallel_size, min(cluster.gpus, cluster.gpus_per_node)
    if given > 1:
        return [given]
    sizes = [2**power for power in range(most.bit_length())]
    return [size for size in sizes if size == 1 or cluster.gpus % size == config.data.seq_length % (2 * size) == 0]


def _strategies(cluster: Cluster) -> Iterator[tuple[ShardingStrategy, int | None]]:
    yield "ddp", None
    if cluster.gpus > 1:
        yield "zero2", None
        yield "fsdp", None
    group = 2
    while group < cluster.gpus:
        if cluster.gpus % group == 0 and (group <= cluster.gpus_per_node or group % cluster.gpus_per_node == 0):
            yield "hsdp", group
        group *= 2


def cluster_of(config: PlanConfig) -> Cluster:
    """Return the GPUs that a plan is for."""
    options = config.plan
    gpu: Gpu = GPUS[options.gpu]
    network = gpu.network_gbits if options.network is None else options.network
    return Cluster(gpu, options.gpus, min(options.gpus, options.gpus_per_node), network)


def as_document(config: PlanConfig, shape: LlamaShape, chosen: LayoutEstimate) -> dict[str, object]:
    """Return the JSON object of an estimate, in seconds and bytes."""
    return {
        "model": name_of_model(config.model),
        "parameters": parameter_count(shape),
        "gpu": config.plan.gpu,
        "gpus": config.plan.gpus,
        "sharding_strategy": chosen.parallel.sharding_strategy,
        "group_size": chosen.dims.shard,
        "context_parallel_size": chosen.dims.context,
        "checkpointing": _checkpointing(chosen.parallel),
        "micro_batch_size": chosen.batch.micro_batch_size,
        "grad_accum_steps": chosen.batch.grad_accum_steps,
        "global_batch_size": chosen.batch.global_batch_size,
        "seq_length": config.data.seq_length,
        "memory_bytes": {**asdict(chosen.memory), "total": chosen.memory.total, "of_gpu": chosen.memory_bytes},
        "fits": chosen.fits,
        "step_seconds": {**asdict(chosen.step), "total": chosen.step.total},
        "tokens_per_second_per_gpu": chosen.tokens_per_second_per_gpu,
        "mfu": chosen.mfu,
        **_length(config, chosen),
        "checkpoint_bytes": _checkpoint_bytes(config, shape),
        "not_counted": not_counted(config),
    }


def _length(config: PlanConfig, chosen: LayoutEstimate) -> dict[str, Any]:
    """Return steps, tokens, seconds and GPU-hours of a run; None if num_steps is in epochs, which needs the data."""
    if config.run.num_steps.unit == "epochs":
        return dict.fromkeys(("steps", "tokens", "seconds", "gpu_hours"))
    steps = config.run.num_steps.to_steps(TokenSchedule.steady(chosen.tokens), None)
    seconds = steps * chosen.step.total
    gpu_hours = seconds / 3600 * config.plan.gpus
    return {"steps": steps, "tokens": steps * chosen.tokens, "seconds": seconds, "gpu_hours": gpu_hours}


def _report(config: PlanConfig, shape: LlamaShape, cluster: Cluster, chosen: LayoutEstimate) -> Iterator[str]:
    yield _heading(config, shape, cluster)
    yield f"layout      {_layout(chosen)}; {chosen.batch.describe()}, {count_of(config.data.seq_length, 'token')} each"
    room = chosen.memory.total / chosen.memory_bytes
    verdict = "fits" if room <= USABLE_FRACTION else "may fit, with little room" if chosen.fits else "does not fit"
    needed, available = format_gib(chosen.memory.total), format_gib(chosen.memory_bytes)
    yield f"memory      {needed} of {available} per GPU, {room:.0%}: {verdict}"
    for name, size in asdict(chosen.memory).items():
        if name != "later_gradients":
            yield f"  {name.replace('_', ' '):16}{format_gib(size):>12}"
    if chosen.memory.later_gradients:
        later = format_gib(-chosen.memory.later_gradients)
        yield f"  {'not at once':16}{later:>12}  gradients that are made after the peak"
    if config.optimizer.optimizer not in OPTIMIZERS:
        size = config.plan.optimizer_state_bytes
        counted = "as AdamW, since it cannot be made here" if size is None else f"{size:.2f} bytes per parameter"
        yield f"  (the state of the optimizer is counted {counted}: set --optimizer_state_bytes to change it)"
    step = chosen.step
    yield f"step        {step.total:.3g} s on {chosen.tokens:,} tokens"
    recomputed = f", {step.recompute:.3f} s of it recomputation" if step.recompute else ""
    yield f"  compute         {step.compute:9.3f} s{recomputed}"
    yield f"  not hidden      {step.unhidden:9.3f} s of gathers, reductions, optimizer and launches"
    yield f"  communication   {step.exposed:9.3f} s exposed, {step.hidden:.3f} s overlapped with computation"
    yield (
        f"speed       {chosen.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, "
        f"{chosen.tokens_per_second_per_gpu * cluster.gpus:,.0f} in all; MFU {chosen.mfu:.0%} of "
        f"{cluster.gpu.peak_tflops:g} TFLOP/s"
    )
    yield f"run         {_run(config, chosen)}"
    tokens, passes = _count_reads(config.data, _length(config, chosen)["tokens"])
    lines = [*describe_passes(tokens, passes), describe_repeats(passes)] if tokens else []
    yield from (f"{'data' if number == 0 else '':11} {line}" for number, line in enumerate(filter(None, lines)))
    yield f"checkpoint  {format_gib(_checkpoint_bytes(config, shape))} each"
    if not chosen.fits:
        fitting = search(config, shape, cluster)
        yield "what fits   " + (_flags(config, fitting[0]) if fitting else _nothing_fits(config, shape, cluster))


def _count_reads(data: DataConfig, tokens: int | None) -> tuple[dict[str, int], dict[str, float]]:
    """Return the tokens and the passes of a run per dataset; empty unless prepare.json has the sizes."""
    if data.data_path is None or tokens is None:
        return {}, {}
    # These import NumPy, which no other plan needs.
    from pretraining.data.storage.dataset_files import prepared_folders
    from pretraining.object_store import location
    from pretraining.tools.prepare.records import read_summary

    root, sizes = location(data.data_path), dict[str, float]()
    for name in data.datasets or [each.name for each in prepared_folders(root)]:
        with suppress(FileNotFoundError, NotADirectoryError):
            summary = read_summary(root / name)
            # The end of text is a token of each document.
            sizes[name.strip("/")] = (summary.tokens + summary.documents) * (1 - data.held_out_fraction)
    if len(sizes) < len(data.datasets):
        return {}, {}
    weights = dict(zip(sizes, data.weights, strict=True)) if data.weights else sizes
    read = {name: round(tokens * weight / sum(weights.values())) for name, weight in weights.items() if weight}
    return read, {name: count / sizes[name] for name, count in read.items()}


def _run(config: PlanConfig, chosen: LayoutEstimate) -> str:
    length = _length(config, chosen)
    if length["steps"] is None:
        return f"{config.run.num_steps} are passes over the data, which a plan does not read: use steps or tokens"
    size = f"{count_of(length['steps'], 'step')}, {length['tokens']:,} tokens"
    return f"{size}: {format_seconds(length['seconds'])}, {length['gpu_hours']:,.1f} GPU-hours"


def _table(config: PlanConfig, shape: LlamaShape, cluster: Cluster, plans: Sequence[LayoutEstimate]) -> Iterator[str]:
    yield _heading(config, shape, cluster)
    size = plans[0].batch.global_batch_size
    yield f"batch       {size} sequences per step in all rows; set --global_batch_size to change it"
    rows = [("tokens/s per GPU", "MFU", "GiB", "run", "flags")]
    for each in plans[:ROWS_SHOWN]:
        seconds = _length(config, each)["seconds"]
        run = "-" if seconds is None else format_seconds(seconds)
        speed, memory = f"{each.tokens_per_second_per_gpu:,.0f}", f"{each.memory.total / 2**30:.1f}"
        rows.append((speed, f"{each.mfu:.0%}", memory, run, _flags(config, each)))
    yield from format_table(rows, right=range(4))
    if len(plans) > ROWS_SHOWN:
        yield f"and {len(plans) - ROWS_SHOWN} slower layouts; --json=true prints all"


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


def _layout(chosen: LayoutEstimate) -> str:
    strategy, recomputed = chosen.parallel.sharding_strategy, _checkpointing(chosen.parallel)
    group = f", groups of {chosen.dims.shard}" if STRATEGIES[strategy].in_groups else ""
    context = f", sequences shared by {chosen.dims.context} GPUs" if chosen.dims.context > 1 else ""
    return f"{strategy}{group}{context}, checkpointing {recomputed}"


def _flags(config: PlanConfig, chosen: LayoutEstimate) -> str:
    """Return the flags that select a layout if they are added to the given settings."""
    given = vars(config.parallel)
    flags = [
        f"--{name}={format_value(value)}"
        for name, value in vars(chosen.parallel).items()
        if name == "sharding_strategy" or value != given[name]
    ]
    flags += [f"--global_batch_size={chosen.batch.global_batch_size}", f"--batch_size={chosen.batch.micro_batch_size}"]
    if config.batch.grad_accum_steps is not None:
        flags.append(f"--grad_accum_steps={chosen.batch.grad_accum_steps}")
    return " ".join([*flags, "--use_torch_compile=true"])


def _checkpointing(parallel: ParallelConfig) -> str:
    if not parallel.fsdp_activation_checkpointing:
        return "none"
    return "full" if parallel.selective_checkpointing == "1" else parallel.selective_checkpointing


def _nothing_fits(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> str:
    """Return an error with what fits instead, for the layout that needs least memory."""
    batch = replace(config.batch, batch_size=1, global_batch_size=None, grad_accum_steps=None)
    parallel = replace(
        config.parallel,
        sharding_strategy="fsdp",
        fsdp_activation_checkpointing=True,
        selective_checkpointing=ALL_BLOCKS,
    )
    least, limit = replace(config, batch=batch, parallel=parallel), USABLE_FRACTION * cluster.gpu.memory_gib * 2**30
    problem = f"nothing fits on {cluster.gpus} x {config.plan.gpu} with this global batch"
    planned = make_plan(least, shape, cluster)
    if planned.memory.total <= limit:
        return f"{problem}. It fits with --global_batch_size={planned.dims.data} or less"
    advice = memory_advice(least, shape, _rank(least, planned.dims), limit)
    layout = "--sharding_strategy=fsdp --fsdp_activation_checkpointing=true --batch_size=1"
    return f"{problem}. With {layout}, this fits: {'; '.join(advice) or 'a smaller model'}"


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
