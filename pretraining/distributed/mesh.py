"""The device mesh: a process group for each axis of `config/strategies.py`."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pretraining.config.strategies import mesh_shape
from pretraining.config.training import ParallelConfig
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT, SHORTEST_PAUSE, run_in_thread
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
    """Make the mesh with axes (replicate, shard) for a strategy; a collective call.

    Processes that wait in a collective give up after `timeout`.

    Raises:
        ConfigError: as `mesh_shape`.
        LaunchError: as `try_groups`.
    """
    # Ranks must not build different meshes: each would wait in groups that the others do not make.
    local_world_sizes = [0] * world_size
    dist.all_gather_object(local_world_sizes, local_world_size)
    mesh = init_device_mesh(device_type, mesh_shape(parallel, local_world_sizes), mesh_dim_names=AXES)
    for axis in AXES:  # else PyTorch's default for groups, 10 minutes with NCCL, whatever all processes were told
        set_timeout_of_group(mesh[axis].get_group(), timeout)
    if world_size > 1:
        try_groups(mesh)
    return mesh


def try_groups(mesh: DeviceMesh) -> None:
    """Sum a number over each group, so that a mistake of the set-up is named before anything depends on it.

    Raises:
        LaunchError: a group fails, does not answer in time, or adds up to something else than its size.
    """
    groups = {"all processes": dist.group.WORLD, **{f"axis {axis}": mesh[axis].get_group() for axis in AXES}}
    for name, group in groups.items():
        assert group is not None
        try:
            _try_group(group, mesh.device_type)
        except dist.DistBackendError as problem:  # such as NCCL's for two processes on one GPU
            error = LaunchError(
                f"the processes have met, but their first collective, over {name} of the mesh, failed: {problem}.\n"
                "`pretrain doctor`, started as this job is, measures the links; NCCL_DEBUG=INFO shows what NCCL tries."
            )
            error.rank = dist.get_rank()
            raise error from problem


def _try_group(group: dist.ProcessGroup, device_type: str) -> None:
    device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else 0)
    until = time.monotonic() + FIRST_ANSWER_SECONDS

    def add_up() -> float:
        one = torch.ones((), device=device)
        dist.all_reduce(one, group=group)
        return one.item()

    def poll() -> None:
        time.sleep(SHORTEST_PAUSE)
        if time.monotonic() > until:
            raise dist.DistBackendError(f"no answer within {FIRST_ANSWER_SECONDS:.0f} s")

    found = run_in_thread(add_up, poll)
    if found != group.size():
        raise dist.DistBackendError(f"{group.size()} ones add up to {found:g}")
