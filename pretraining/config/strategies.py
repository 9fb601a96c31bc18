"""The sharding strategies: what of a model's state is spread over devices, and the mesh that follows from it.

The mesh has two axes: along `replicate` lie copies of each other, along `shard` the pieces of one copy. W processes are
(W, 1) if nothing is sharded, (1, W) if all share one copy, (W / G, G) in groups of G: `hsdp_group_size`, by default the
processes of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pretraining.config.training import ParallelConfig, ShardingStrategy
from pretraining.errors import ConfigError


@dataclass(frozen=True)
class Strategy:
    """A row of `STRATEGIES`.

    Attributes:
        shards_parameters: whole parameters are gathered for the time that a block computes, and freed after it.
        shards_gradients: each device keeps its part of gradients, optimizer state and masters.
        in_groups: this holds inside groups, which are replicas of each other.
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


def mesh_shape(parallel: ParallelConfig, local_world_sizes: Sequence[int]) -> tuple[int, int]:
    """Return the sizes of the axes (replicate, shard); `local_world_sizes` has the processes on each rank's node.

    Raises:
        ConfigError: the group size does not divide the number of processes, or would be that of a node and nodes
            differ.
    """
    strategy, world_size = STRATEGIES[parallel.sharding_strategy], len(local_world_sizes)
    if not strategy.shards_gradients:
        return world_size, 1
    if not strategy.in_groups:
        return 1, world_size
    group = parallel.hsdp_group_size
    if group is None and len(set(local_world_sizes)) == 1:
        group = local_world_sizes[0]
    if group is None or world_size % group:
        processes = " or ".join(map(str, sorted(set(local_world_sizes))))
        raise ConfigError(
            f"--sharding_strategy={parallel.sharding_strategy} shards inside groups of equal size "
            f"({f'processes of a node: {processes}' if parallel.hsdp_group_size is None else f'{group} processes'}), "
            f"and the job has {world_size}: set --hsdp_group_size to a divisor of {world_size}."
        )
    return world_size // group, group
