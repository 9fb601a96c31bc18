"""The device mesh: a process group for each axis of `config/mesh_shape.py`."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pretraining.config.mesh_shape import mesh_shape
from pretraining.config.training import ParallelConfig
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT
from pretraining.distributed.torch_private import set_timeout_of_group

AXES = ("replicate", "shard")


def build_mesh(
    parallel: ParallelConfig,
    world_size: int,
    local_world_size: int,
    device_type: str,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> DeviceMesh:
    """Makes the mesh with axes (replicate, shard) for a strategy; a collective call.

    Processes that wait in a collective give up after `timeout`.

    Raises:
        ConfigError: as `mesh_shape`.
    """
    # Ranks must not build different meshes: each would wait in groups that the others do not make.
    local_world_sizes = [0] * world_size
    dist.all_gather_object(local_world_sizes, local_world_size)
    shape = mesh_shape(parallel, local_world_sizes)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    for axis in AXES:  # else PyTorch's default for groups, 10 minutes with NCCL, whatever all processes were told
        set_timeout_of_group(mesh[axis].get_group(), timeout)
    return mesh
