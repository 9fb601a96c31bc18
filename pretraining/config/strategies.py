"""The table of sharding strategies, and the dimensions of a job: how many ranks do what.

Two dimensions lay out the model: `replicate` counts its copies, `shard` the ranks that share one copy. W ranks form
W x 1 without sharding, 1 x W with one sharded copy, and W / G x G with groups of G = `hsdp_group_size`, by default the
ranks of a node. A rank's number is replica * shard + its place in the replica.

Two others divide the batch, over the same ranks: `data` counts the groups of ranks with different sequences, `context`
the neighboring ranks of a group, which share their sequences (`context.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pretraining.config.training import ParallelConfig, ShardingStrategy
from pretraining.errors import ConfigError


@dataclass(frozen=True)
class Strategy:
    """A row of `STRATEGIES`.

    Attributes:
        shards_parameters: whether parameters are sharded, gathered while a block computes, and freed afterwards.
        shards_gradients: whether gradients, optimizer state and master weights are sharded.
        in_groups: whether sharding stays inside groups that replicate each other.
    """

    shards_parameters: bool
    shards_gradients: bool
    in_groups: bool


STRATEGIES: dict[ShardingStrategy, Strategy] = {
    "ddp": Strategy(shards_parameters=False, shards_gradients=False, in_groups=False),
    "zero2": Strategy(shards_parameters=False, shards_gradients=True, in_groups=False),
    "fsdp": Strategy(shards_parameters=True, shards_gradients=True, in_groups=False),
    "hsdp": Strategy(shards_parameters=True, shards_gradients=True, in_groups=True),
    "hsdp_zero2": Strategy(shards_parameters=False, shards_gradients=True, in_groups=True),
}


@dataclass(frozen=True)
class DimSizes:
    """Sizes of a job's dimensions, in ranks. `distributed.dims.Dims` adds the place and the groups of a rank.

    Attributes:
        world: all ranks, one per device.
        node: ranks on the node of this rank.
        replicate: copies of the model.
        shard: ranks that share a copy.
        context: neighboring ranks that share their sequences.
        data: groups of ranks with different sequences.
    """

    world: int
    node: int
    replicate: int
    shard: int
    context: int
    data: int

    def data_rank_of(self, rank: int) -> int:
        """Return the place of a rank in the dimension `data`: which share of a global batch its group computes."""
        return rank // self.context

    @property
    def replicas_of_shards(self) -> list[list[int]]:
        """For each shard, the ranks that hold it."""
        return [list(range(shard, self.world, self.shard)) for shard in range(self.shard)]


def dim_sizes(parallel: ParallelConfig, nodes: Sequence[int], rank: int = 0) -> DimSizes:
    """Return the sizes of a job's dimensions.

    Args:
        parallel: settings.
        nodes: for each rank, the number of ranks on its node.
        rank: this rank.

    Raises:
        ConfigError: a group size does not divide the number of processes, or is unset and nodes differ in size; or
            sharding groups cut context groups.
    """
    world, shard, context = len(nodes), _shard_size(parallel, nodes), parallel.context_parallel_size
    if world % context:
        raise ConfigError(
            f"--context_parallel_size={context} makes groups of {context} processes, and the job has {world}, which "
            f"{context} does not divide: set it to a divisor of {world}, or start another number of processes"
        )
    if STRATEGIES[parallel.sharding_strategy].in_groups and shard % context:
        raise ConfigError(
            f"--sharding_strategy={parallel.sharding_strategy} shards inside groups of {shard} processes, which cut "
            f"groups of --context_parallel_size={context}: set --hsdp_group_size to a multiple of {context}"
        )
    return DimSizes(
        world=world, node=nodes[rank], replicate=world // shard, shard=shard, context=context, data=world // context
    )


def unsharded_sizes(parallel: ParallelConfig, world: int) -> DimSizes:
    """Return the sizes for callers that ask only for data: any number of ranks, with the model whole on each."""
    return dim_sizes(replace(parallel, sharding_strategy="ddp"), [world] * world)


def _shard_size(parallel: ParallelConfig, nodes: Sequence[int]) -> int:
    strategy, world = STRATEGIES[parallel.sharding_strategy], len(nodes)
    if not strategy.shards_gradients:
        return 1
    if not strategy.in_groups:
        return world
    group = parallel.hsdp_group_size
    if group is None and len(set(nodes)) == 1:
        group = nodes[0]
    if group is None or world % group:
        processes = " or ".join(map(str, sorted(set(nodes))))
        raise ConfigError(
            f"--sharding_strategy={parallel.sharding_strategy} shards inside groups of equal size "
            f"({f'processes of a node: {processes}' if parallel.hsdp_group_size is None else f'{group} processes'}), "
            f"and the job has {world}: set --hsdp_group_size to a divisor of {world}."
        )
    return group
