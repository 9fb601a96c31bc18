"""The time of a training step on GPUs, estimated from its computation and communication.

    compute        FLOPs of model and recomputation / (sustained rate of matrix products / SLOWDOWN)
    unhidden       UNHIDDEN_SECONDS per parameter and micro-batch: gathering the first block, reducing the last one, the
                   optimizer, launches
    communication  bytes of parameters and gradients / the slowest link on their way; hidden by computation as far as
                   there is any; bytes of keys and values of shared sequences, which nothing hides
    step           n x (compute + unhidden + communication that is not hidden)

Only SLOWDOWN and UNHIDDEN_SECONDS are fitted, to half of the runs in docs/planner.md; the page compares the other half.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.strategies import STRATEGIES, DimSizes
from pretraining.config.training import TrainConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape
from pretraining.estimate.costs import flops_per_token, parameter_count, recomputed_flops_per_token
from pretraining.estimate.devices import Gpu

SLOWDOWN = 1.245
"""Time of all computation, relative to its matrix products at the sustained rate."""
UNHIDDEN_SECONDS = 42e-12
"""Per parameter and micro-batch."""
COMPUTE_BYTES = 2
"""Bytes per parameter in a gather: bfloat16."""
REDUCED_BYTES = 4
"""Bytes per gradient in a reduction: float32."""


@dataclass(frozen=True)
class Cluster:
    """GPUs and their connections.

    Attributes:
        gpus: number of GPUs; may be fewer than `gpus_per_node`.
        network_gbits: network bandwidth per node, Gbit/s.
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    network_gbits: float

    def seconds_to_gather(self, total_bytes: float, group: int) -> float:
        """Return the seconds of an all-gather (or reduce-scatter) of this size in a group of neighboring GPUs."""
        share = total_bytes * (group - 1) / group
        if group <= self.gpus_per_node:
            return share / (self.gpu.link_gbs * 1e9)
        # A ring enters each node once, over all of its adapters.
        return share / min(self.gpu.link_gbs * 1e9, self.network_gbits / 8 * 1e9)

    def seconds_between_groups(self, bytes_per_gpu: float, groups: int) -> float:
        """Return the seconds of an all-reduce of this size between corresponding GPUs of the groups."""
        moved = 2 * bytes_per_gpu * (groups - 1) / groups
        if self.gpus <= self.gpus_per_node:
            return moved / (self.gpu.link_gbs * 1e9)
        return moved / (self.network_gbits / 8 * 1e9 / min(self.gpus, self.gpus_per_node))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step by purpose.

    Attributes:
        compute: the model, with recomputation.
        recompute: the part of `compute` that activation checkpointing repeats.
        unhidden: communication, optimizer and launches that never overlap with computation.
        exposed: communication that does not fit behind computation.
        hidden: communication behind computation, not part of the total.
    """

    compute: float
    recompute: float
    unhidden: float
    exposed: float
    hidden: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.unhidden + self.exposed


def estimate_step_time(
    config: TrainConfig, shape: LlamaShape, batch: BatchSizes, cluster: Cluster, dims: DimSizes
) -> StepTime:
    """Estimate the time of a step in bfloat16.

    Args:
        config: settings.
        shape: dimensions of the model.
        batch: batch sizes on the cluster's GPUs.
        cluster: GPUs and their connections.
        dims: dimensions of the job on these GPUs.
    """
    tokens = batch.micro_batch_size * config.data.seq_length // dims.context
    steps = batch.grad_accum_steps
    model = flops_per_token(shape, config.data.seq_length)
    repeated = recomputed_flops_per_token(config.parallel, shape, config.data.seq_length)
    per_flop = SLOWDOWN / (cluster.gpu.sustained_tflops * 1e12)
    compute, recompute = ((model + repeated) * tokens * per_flop, repeated * tokens * per_flop)
    parameters = parameter_count(shape)
    within, last = _communication(config, parameters, steps, cluster, dims)
    hidden = min(within, steps * compute) + min(last, max(0.0, compute - within / steps))
    return StepTime(
        compute=steps * compute,
        recompute=steps * recompute,
        unhidden=steps * UNHIDDEN_SECONDS * parameters,
        exposed=within + last - hidden + steps * _context_seconds(config, shape, batch, cluster, dims),
        hidden=hidden,
    )


def _context_seconds(
    config: TrainConfig, shape: LlamaShape, batch: BatchSizes, cluster: Cluster, dims: DimSizes
) -> float:
    """Return seconds in which the ranks of a context group gather keys and values, and reduce their gradients."""
    if dims.context == 1:
        return 0.0
    parallel, layers = config.parallel, shape.num_hidden_layers
    repeated = 0
    if parallel.fsdp_activation_checkpointing:
        repeated = len(checkpointed_blocks(parallel.selective_checkpointing, layers))
    tokens = batch.micro_batch_size * config.data.seq_length
    of_layer = COMPUTE_BYTES * 2 * shape.key_width * tokens
    return (2 * layers + repeated) * cluster.seconds_to_gather(of_layer, dims.context)


def _communication(
    config: TrainConfig, parameters: int, steps: int, cluster: Cluster, dims: DimSizes
) -> tuple[float, float]:
    """Return seconds inside sharding groups, of all micro-batches, and between groups, of the last micro-batch."""
    within = 0.0
    if dims.shard > 1:
        gathers = 2 * steps if STRATEGIES[config.parallel.sharding_strategy].shards_parameters else 1
        within = gathers * cluster.seconds_to_gather(COMPUTE_BYTES * parameters, dims.shard)
        within += steps * cluster.seconds_to_gather(REDUCED_BYTES * parameters, dims.shard)
    if dims.replicate == 1:
        return within, 0.0
    return within, cluster.seconds_between_groups(REDUCED_BYTES * parameters / dims.shard, dims.replicate)
