"""The device mesh: a process group for each axis of `config/mesh_shape.py`."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pretraining.config.mesh_shape import mesh_shape
from pretraining.config.training import ParallelConfig
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT, Patience, attend
from pretraining.distributed.torch_private import set_timeout_of_group
from pretraining.errors import LaunchError

AXES = ("replicate", "shard")
FIRST_ANSWER_SECONDS = 300.0
"""How long the first collective of each group may take: NCCL makes its connections in it."""


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
        LaunchError: as `try_groups`.
    """
    # Ranks must not build different meshes: each would wait in groups that the others do not make.
    local_world_sizes = [0] * world_size
    dist.all_gather_object(local_world_sizes, local_world_size)
    shape = mesh_shape(parallel, local_world_sizes)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    for axis in AXES:  # else PyTorch's default for groups, 10 minutes with NCCL, whatever all processes were told
        set_timeout_of_group(mesh[axis].get_group(), timeout)
    if world_size > 1:
        try_groups(mesh)
    return mesh


def try_groups(mesh: DeviceMesh) -> None:
    """Sums a number over each group, so that a mistake of the set-up is named before anything depends on it.

    Raises:
        LaunchError: a group does not answer in time, or adds up to something else than its size.
    """
    groups = {"all processes": dist.group.WORLD, **{f"axis {axis}": mesh[axis].get_group() for axis in AXES}}
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else 0)

    for name, group in groups.items():

        def add_up(group: dist.ProcessGroup | None = group) -> float:
            one = torch.ones((), device=device)
            dist.all_reduce(one, group=group)
            return one.item()

        until = time.monotonic() + FIRST_ANSWER_SECONDS

        def look(name: str = name, until: float = until) -> None:
            if time.monotonic() > until:
                raise _first_collective_failed(f"{name} of the mesh gave no answer within {FIRST_ANSWER_SECONDS:.0f} s")

        found, size = attend(add_up, Patience(), look), dist.get_world_size(group)
        if found != size:
            raise _first_collective_failed(f"{size} ones, added up over {name} of the mesh, are {found:g}")


def _first_collective_failed(fault: str) -> LaunchError:
    error = LaunchError(
        f"the processes have met, but their first collective failed: {fault}. `pretrain doctor`, started as this job "
        "is, measures the links; NCCL_DEBUG=INFO shows what NCCL tries"
    )
    error.rank = dist.get_rank()
    return error
