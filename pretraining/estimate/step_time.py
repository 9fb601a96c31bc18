"""How long a training step takes on GPUs, worked out from what the step computes and sends.

    compute        FLOPs of the model and of what is recomputed / (what matrix products sustain / SLOWDOWN)
    unhidden       UNHIDDEN_SECONDS a parameter and micro-batch: gathering the first block, reducing the last, the
                   optimizer, launches
    communication  bytes of parameters and gradients / the slowest link on their way; hidden behind computation as far
                   as there is any
    step           n x (compute + unhidden + communication beyond it)

SLOWDOWN and UNHIDDEN_SECONDS are the only fitted numbers: to half of the runs that docs/planner.md lists, and compared
with the other half there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.strategies import STRATEGIES
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, parameter_count
from pretraining.estimate.devices import Gpu
from pretraining.estimate.flops import flops_per_token, recomputed_flops_per_token, recomputed_share

SLOWDOWN = 1.245
"""Time of all computation, as a multiple of that of its matrix products at the rate that large ones sustain."""
UNHIDDEN_SECONDS = 42e-12
"""A parameter and micro-batch."""
COMPUTE_BYTES = 2
"""Of a parameter as it is gathered: bfloat16."""
REDUCED_BYTES = 4
"""Of a gradient as it is reduced: float32."""


@dataclass(frozen=True)
class Cluster:
    """Which GPUs train, and how they are connected.

    Attributes:
        gpus: in all.
        gpus_per_node: on a node; fewer where there are fewer.
        network_gbits: of a node to others, Gbit/s.
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    network_gbits: float

    def seconds_to_gather(self, total_bytes: float, group: int) -> float:
        """Return how long a group of GPUs, next to each other, takes to hand all parts of so many bytes to each."""
        share = total_bytes * (group - 1) / group
        if group <= self.gpus_per_node:
            return share / (self.gpu.link_gbs * 1e9)
        # A ring crosses into each node once; all of its adapters carry it.
        return share / min(self.gpu.link_gbs * 1e9, self.network_gbits / 8 * 1e9)

    def seconds_between_groups(self, bytes_per_gpu: float, groups: int) -> float:
        """Return how long GPUs of the same place in different groups take to sum so many bytes of each."""
        moved = 2 * bytes_per_gpu * (groups - 1) / groups
        if self.gpus <= self.gpus_per_node:
            return moved / (self.gpu.link_gbs * 1e9)
        return moved / (self.network_gbits / 8 * 1e9 / min(self.gpus, self.gpus_per_node))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, by what they go to.

    Attributes:
        compute: of the model, with what is recomputed.
        recompute: of these, what activation checkpointing repeats.
        unhidden: of communication, the optimizer and launches, which nothing runs beside.
        exposed: communication beyond what computation hides.
        hidden: communication that computation hides; no part of the step's time.
    """

    compute: float
    recompute: float
    unhidden: float
    exposed: float
    hidden: float

    @property
    def total(self) -> float:
        """Of the step."""
        return self.compute + self.unhidden + self.exposed


def estimate_step_time(
    config: TrainConfig, shape: LlamaShape, batch: BatchSizes, cluster: Cluster, shard_size: int
) -> StepTime:
    """Estimate the time of a step in bfloat16.

    Args:
        config: the settings.
        shape: dimensions of the model.
        batch: how the global batch is cut for the cluster's GPUs.
        cluster: what trains.
        shard_size: GPUs that share one copy of the model.
    """
    tokens = batch.micro_batch_size * config.data.seq_length
    steps = batch.grad_accum_steps
    share = recomputed_share(config.parallel, shape, config.data.seq_length)
    model = flops_per_token(shape, config.data.seq_length)
    repeated = recomputed_flops_per_token(shape, share, config.data.seq_length)
    per_flop = SLOWDOWN / (cluster.gpu.sustained_tflops * 1e12)
    compute, recompute = ((model + repeated) * tokens * per_flop, repeated * tokens * per_flop)
    parameters = parameter_count(shape)
    within, last = _communication(config, parameters, steps, cluster, shard_size)
    hidden = min(within, steps * compute) + min(last, max(0.0, compute - within / steps))
    return StepTime(
        compute=steps * compute,
        recompute=steps * recompute,
        unhidden=steps * UNHIDDEN_SECONDS * parameters,
        exposed=within + last - hidden,
        hidden=hidden,
    )


def _communication(
    config: TrainConfig, parameters: int, steps: int, cluster: Cluster, shard_size: int
) -> tuple[float, float]:
    """Return seconds within the groups that share a model, in all micro-batches, and between them, in the last one."""
    groups = cluster.gpus // shard_size
    within = 0.0
    if shard_size > 1:
        gathers = 2 * steps if STRATEGIES[config.parallel.sharding_strategy].shards_parameters else 1
        within = gathers * cluster.seconds_to_gather(COMPUTE_BYTES * parameters, shard_size)
        within += steps * cluster.seconds_to_gather(REDUCED_BYTES * parameters, shard_size)
    if groups == 1:
        return within, 0.0
    return within, cluster.seconds_between_groups(REDUCED_BYTES * parameters / shard_size, groups)
