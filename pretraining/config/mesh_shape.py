"""The mesh of devices: axis `replicate` holds copies of each other, axis `shard` the pieces of one copy.

strategy      (replicate, shard)        W processes, groups of G
ddp           (W, 1)
zero2, fsdp   (1, W)
hsdp*         (W / G, G)                G: hsdp_group_size, by default the processes of a node
"""

from __future__ import annotations

from collections.abc import Sequence

from pretraining.config.training import ParallelConfig
from pretraining.errors import ConfigError


def mesh_shape(parallel: ParallelConfig, local_world_sizes: Sequence[int]) -> tuple[int, int]:
    """Returns the sizes of the axes (replicate, shard); `local_world_sizes` has the processes on each rank's node.

    Raises:
        ConfigError: the group size does not divide the number of processes, or would be that of a node and nodes
            differ.
    """
    strategy, world_size = parallel.sharding_strategy, len(local_world_sizes)
    if strategy == "ddp":
        return world_size, 1
    if strategy in ("zero2", "fsdp"):
        return 1, world_size
    if parallel.hsdp_group_size is None and len(set(local_world_sizes)) > 1:
        raise ConfigError(
            f"--sharding_strategy={strategy} shards inside a node by default, and nodes have different numbers of "
            f"processes ({', '.join(map(str, sorted(set(local_world_sizes))))}). Set --hsdp_group_size."
        )
    group = parallel.hsdp_group_size or local_world_sizes[0]
    if world_size % group:
        source = (
            "hsdp_group_size" if parallel.hsdp_group_size else "processes of a node, the default of hsdp_group_size"
        )
        raise ConfigError(
            f"--sharding_strategy={strategy} needs groups of equal size: {world_size} processes / {group} ({source}) = "
            f"{world_size / group:.2f}. Set --hsdp_group_size to a divisor of {world_size}."
        )
    return world_size // group, group
