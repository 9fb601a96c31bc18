"""The table of sharding strategies, and the shape of the device mesh of each.

The mesh has two axes: `replicate` over copies of the model, `shard` over the shards of one copy. W processes form
(W, 1) without sharding, (1, W) with one sharded copy, and (W / G, G) with groups of G = `hsdp_group_size`, by default
the processes of a node.
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


def mesh_shape(parallel: ParallelConfig, local_world_sizes: Sequence[int]) -> tuple[int, int]:
    """Return the sizes of the axes (replicate, shard); `local_world_sizes` has the processes on each rank's node.

    Raises:
        ConfigError: the group size does not divide the number of processes, or is unset and nodes differ in size.
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
