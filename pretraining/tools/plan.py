"""`pretrain plan`: what a run takes of GPUs and how long it takes, before any is paid for.

    settings + GPUs -> mesh, batch -> memory of a GPU (estimate/memory.py) -> fits?
                                   -> time of a step (estimate/step_time.py) -> tokens/s, days, GPU-hours

With `search`, the same for every strategy, group, checkpointing and micro-batch that fits, the fastest first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pretraining.config.batch_plan import BatchPlan, plan_batch
from pretraining.config.commands import PlanConfig
from pretraining.config.mesh_shape import mesh_shape
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.training import ParallelConfig, ShardingStrategy
from pretraining.config.values import did_you_mean
from pretraining.config.variants import LlamaShape, name_of_model, parameter_count, resolve_shape
from pretraining.errors import ConfigError
from pretraining.estimate.devices import GPUS, Gpu
from pretraining.estimate.flops import flops_per_token
from pretraining.estimate.memory import MASTER_BYTES, MemoryEstimate, estimate_memory, optimizer_state_bytes
from pretraining.estimate.step_time import COMPUTE_BYTES, Cluster, StepTime, estimate_step_time
from pretraining.files import output_errors
from pretraining.progress import TokenSchedule

ROOM = 0.9
"""Share of a GPU's memory that a search fills: allocators keep reserves, and the estimate may be wrong."""
CHECKPOINTING = ("none", "op", "1/2", "full")
"""What a search tries of activation checkpointing."""
LARGEST_MICRO_BATCH_TOKENS = 2**16
SHOWN = 15
"""Lines of a search's table."""


@dataclass(frozen=True)
class Plan:
    """What one way to lay a run out comes to.

    Attributes:
        shard_size: GPUs that share one copy of the model.
        parallel: how it is laid out.
        memory: of one GPU.
        memory_bytes: that one GPU has.
        tokens: that a step trains on.
        step: its time.
        mfu: share of the GPUs' peak.
    """

    shard_size: int
    parallel: ParallelConfig
    batch: BatchPlan
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
        """Of the training, without evaluations and saves."""
        return self.tokens / self.step.total / self.batch.data_parallel_ranks


def plan(config: PlanConfig) -> None:
    """Prints the plan of a run, or those that fit.

    Raises:
        ConfigError: the GPU is not known, GPUs do not make groups, or the run's length cannot be told without data.
    """
    asked, shape = config.plan, resolve_shape(config.model)
    cluster = _cluster(config)
    if asked.search:
        plans = sorted(search(config, shape, cluster), key=lambda each: -each.tokens_per_second_per_gpu)
        if not plans:
            raise ConfigError(_nothing_fits(config, shape, cluster))
        if asked.json:
            print("\n".join(json.dumps(as_document(config, shape, each)) for each in plans))
        else:
            print("\n".join(_table(config, shape, cluster, plans)))
        return
    chosen = make_plan(config, shape, cluster)
    if asked.json:
        print(json.dumps(as_document(config, shape, chosen)))
    else:
        print("\n".join(_account(config, shape, cluster, chosen)))
    if asked.picture is not None:
        _draw(chosen, Path(asked.picture))


def _draw(chosen: Plan, path: Path) -> None:
    from pretraining.tools.pictures import draw_plan

    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture={path} must end in .png or .svg")
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draw_plan(asdict(chosen.memory), chosen.memory_bytes, asdict(chosen.step), path)
        except ImportError:
            raise ConfigError(f"--picture={path} needs matplotlib: pip install 'pretraining[report]'") from None


def make_plan(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> Plan:
    """Works out what the settings come to on a cluster.

    Raises:
        ConfigError: GPUs do not make groups, or the batch does not fit the number of GPUs.
    """
    nodes, left = divmod(cluster.gpus, cluster.gpus_per_node)
    on_nodes = [cluster.gpus_per_node] * (nodes * cluster.gpus_per_node) + [left] * left
    _, shard_size = mesh_shape(config.parallel, on_nodes)
    batch = plan_batch(config.batch, cluster.gpus)
    config = replace(config, batch=replace(config.batch, batch_size=batch.micro_batch_size))
    memory = estimate_memory(config, shape, shard_size=shard_size, compute_bytes=COMPUTE_BYTES, device_type="cuda")
    own_bytes = config.plan.optimizer_state_bytes
    if own_bytes is not None:
        own = -(-parameter_count(shape) // shard_size)
        memory = replace(memory, optimizer_state=round(own_bytes * own))
    step = estimate_step_time(config, shape, batch, cluster, shard_size)
    tokens = batch.global_batch_size * config.data.seq_length
    flops = flops_per_token(shape, config.data.seq_length) * tokens
    return Plan(
        shard_size=shard_size,
        parallel=config.parallel,
        batch=batch,
        memory=memory,
        memory_bytes=round(cluster.gpu.memory_gib * 2**30),
        tokens=tokens,
        step=step,
        mfu=flops / step.total / cluster.gpus / (cluster.gpu.peak_tflops * 1e12),
    )


def search(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> Iterator[Plan]:
    """Yields what fits of all strategies, groups, kinds of checkpointing and micro-batches."""
    for strategy, group in _strategies(cluster):
        for checkpointing in CHECKPOINTING:
            parallel = replace(
                config.parallel,
                sharding_strategy=strategy,
                hsdp_group_size=group,
                fsdp_activation_checkpointing=checkpointing != "none",
                selective_checkpointing="1" if checkpointing in ("none", "full") else checkpointing,
            )
            size = 1
            while size * config.data.seq_length <= LARGEST_MICRO_BATCH_TOKENS or size == 1:
                tried = replace(config, parallel=parallel, batch=replace(config.batch, batch_size=size))
                try:
                    found = make_plan(tried, shape, cluster)
                except ConfigError:  # this size does not make the global batch that is asked for
                    break
                if found.memory.total > ROOM * found.memory_bytes:
                    break
                if found.batch.micro_batch_size == size:  # else another size gives the same
                    yield found
                size *= 2


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


def _cluster(config: PlanConfig) -> Cluster:
    asked = config.plan
    name = asked.gpu.lower()
    if name not in GPUS:
        hint = did_you_mean(name, GPUS, "did you mean {}? ")
        raise ConfigError(f"--gpu={asked.gpu} is not known: {hint}Known are {', '.join(GPUS)}")
    gpu: Gpu = GPUS[name]
    return Cluster(gpu, asked.gpus, min(asked.gpus, asked.gpus_per_node), asked.network or gpu.network_gbits)


def as_document(config: PlanConfig, shape: LlamaShape, chosen: Plan) -> dict[str, object]:
    """Returns a plan as what `--json` prints; seconds and bytes."""
    length = _length(config, chosen)
    return {
        "model": name_of_model(config.model),
        "parameters": parameter_count(shape),
        "gpu": config.plan.gpu.lower(),
        "gpus": config.plan.gpus,
        "sharding_strategy": chosen.parallel.sharding_strategy,
        "group_size": chosen.shard_size,
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
        "steps": length.steps,
        "tokens": length.tokens,
        "seconds": length.seconds,
        "gpu_hours": length.seconds / 3600 * config.plan.gpus,
        "checkpoint_bytes": _checkpoint_bytes(config, shape),
    }


@dataclass(frozen=True)
class _Length:
    steps: int
    tokens: int
    seconds: float


def _length(config: PlanConfig, chosen: Plan) -> _Length:
    steps = config.run.num_steps.to_steps(TokenSchedule.steady(chosen.tokens), None)
    return _Length(steps, steps * chosen.tokens, steps * chosen.step.total)


def _account(config: PlanConfig, shape: LlamaShape, cluster: Cluster, chosen: Plan) -> Iterator[str]:
    """Yields the lines about one plan."""
    yield _heading(config, shape, cluster)
    yield f"layout      {_layout(chosen)}; {chosen.batch.describe()}, {config.data.seq_length} tokens each"
    room = chosen.memory.total / chosen.memory_bytes
    verdict = "fits" if room <= ROOM else "may fit, with little room" if chosen.fits else "does not fit"
    yield f"memory      {_gib(chosen.memory.total)} of {_gib(chosen.memory_bytes)} a GPU, {room:.0%}: {verdict}"
    for name, size in asdict(chosen.memory).items():
        yield f"  {name.replace('_', ' '):16}{_gib(size):>12}"
    if config.plan.optimizer_state_bytes is None and config.optimizer.optimizer not in OPTIMIZERS:
        yield "  (the optimizer is counted as AdamW: give --optimizer_state_bytes)"
    step = chosen.step
    yield f"step        {step.total:.3g} s on {chosen.tokens:,} tokens"
    yield f"  compute         {step.compute:9.3f} s" + (f", {step.recompute:.3f} s of it again" * bool(step.recompute))
    yield f"  not hidden      {step.unhidden:9.3f} s of gathers, reductions, optimizer and launches"
    yield f"  communication   {step.exposed:9.3f} s exposed, {step.hidden:.3f} s behind computation"
    yield (
        f"speed       {chosen.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, "
        f"{chosen.tokens_per_second_per_gpu * cluster.gpus:,.0f} in all; MFU {chosen.mfu:.0%} of "
        f"{cluster.gpu.peak_tflops:g} TFLOP/s"
    )
    length = _length(config, chosen)
    yield (
        f"run         {length.steps:,} steps, {length.tokens:,} tokens: {_time(length.seconds)}, "
        f"{length.seconds / 3600 * cluster.gpus:,.1f} GPU-hours"
    )
    yield f"checkpoint  {_gib(_checkpoint_bytes(config, shape))} each"
    if not chosen.fits:
        best = max(search(config, shape, cluster), key=lambda each: each.tokens_per_second_per_gpu, default=None)
        yield "what fits   " + (_nothing_fits(config, shape, cluster) if best is None else _flags(best))


def _table(config: PlanConfig, shape: LlamaShape, cluster: Cluster, plans: Sequence[Plan]) -> Iterator[str]:
    """Yields the lines of a search."""
    yield _heading(config, shape, cluster)
    yield f"{'tokens/s a GPU':>14}  {'MFU':>4}  {'GiB':>5}  {'run':>9}  flags"
    for each in plans[:SHOWN]:
        run = _time(_length(config, each).seconds)
        speed, memory = f"{each.tokens_per_second_per_gpu:,.0f}", f"{each.memory.total / 2**30:.1f}"
        yield f"{speed:>14}  {each.mfu:>4.0%}  {memory:>5}  {run:>9}  {_flags(each)}"
    if len(plans) > SHOWN:
        yield f"{'':14}  and {len(plans) - SHOWN} slower ones; --json=true prints all"


def _heading(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> str:
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    where = (
        f"{nodes} nodes of {cluster.gpus_per_node}, {cluster.network_gbits:g} Gbit/s each" if nodes > 1 else "a node"
    )
    return (
        f"plan        {name_of_model(config.model)}, {parameter_count(shape):,} parameters, on {cluster.gpus} x "
        f"{config.plan.gpu.lower()} ({where}), in bfloat16, compiled"
    )


def _layout(chosen: Plan) -> str:
    strategy, recomputed = chosen.parallel.sharding_strategy, _checkpointing(chosen.parallel)
    group = f", groups of {chosen.shard_size}" if strategy.startswith("hsdp") else ""
    return f"{strategy}{group}, checkpointing {recomputed}"


def _flags(chosen: Plan) -> str:
    """Writes the flags that make a layout."""
    parallel = chosen.parallel
    flags = [f"--sharding_strategy={parallel.sharding_strategy}"]
    if parallel.hsdp_group_size is not None:
        flags.append(f"--hsdp_group_size={parallel.hsdp_group_size}")
    if parallel.fsdp_activation_checkpointing:
        flags.append("--fsdp_activation_checkpointing=true")
        if parallel.selective_checkpointing != "1":
            flags.append(f"--selective_checkpointing={parallel.selective_checkpointing}")
    return " ".join([*flags, f"--batch_size={chosen.batch.micro_batch_size}"])


def _checkpointing(parallel: ParallelConfig) -> str:
    if not parallel.fsdp_activation_checkpointing:
        return "none"
    return "full" if parallel.selective_checkpointing == "1" else parallel.selective_checkpointing


def _nothing_fits(config: PlanConfig, shape: LlamaShape, cluster: Cluster) -> str:
    state = MASTER_BYTES * 2 * parameter_count(shape) + optimizer_state_bytes(config.optimizer, shape)
    needed = -(-state // round(ROOM * cluster.gpu.memory_gib * 2**30))
    return (
        f"nothing fits on {cluster.gpus} x {config.plan.gpu.lower()}: parameters, gradients and optimizer alone take "
        f"{_gib(state)}, which is {needed} GPUs full. Give more --gpus, a shorter --seq_length or a smaller model"
    )


def _checkpoint_bytes(config: PlanConfig, shape: LlamaShape) -> int:
    own = config.plan.optimizer_state_bytes
    state = optimizer_state_bytes(config.optimizer, shape) if own is None else round(own * parameter_count(shape))
    return MASTER_BYTES * parameter_count(shape) + state


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _time(seconds: float) -> str:
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.1f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
