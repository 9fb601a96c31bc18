"""The device mesh, with a process group per axis of `config/strategies.py`."""

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
"""Time limit for the first collective of each group, in which NCCL connects."""


def build_mesh(
    parallel: ParallelConfig,
    world_size: int,
    local_world_size: int,
    device_type: str,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> DeviceMesh:
    """Build the mesh with axes (replicate, shard) for a strategy; a collective call.

    Collectives fail after `timeout`.

    Raises:
        ConfigError: as `mesh_shape`.
        LaunchError: as `check_groups`.
    """
    # With different meshes, ranks would wait in groups that others do not create.
    local_world_sizes = [0] * world_size
    dist.all_gather_object(local_world_sizes, local_world_size)
    mesh = init_device_mesh(device_type, mesh_shape(parallel, local_world_sizes), mesh_dim_names=AXES)
    for axis in AXES:  # new groups have PyTorch's default, 10 minutes with NCCL, not the timeout of the job
        set_timeout_of_group(mesh[axis].get_group(), timeout)
    if world_size > 1:
        check_groups(mesh)
    return mesh


def check_groups(mesh: DeviceMesh) -> None:
    """Sum the number 1 over each group, to find broken set-ups early.

    Raises:
        LaunchError: a sum fails, is late, or is wrong.
    """
    groups = {"all processes": dist.group.WORLD, **{f"axis {axis}": mesh[axis].get_group() for axis in AXES}}
    for name, group in groups.items():
        assert group is not None
        try:
            _check_group(group, mesh.device_type)
        except dist.DistBackendError as problem:  # such as NCCL's for two processes on one GPU
            error = LaunchError(
                f"the processes are connected, but their first collective, over {name} of the mesh, failed: {problem}."
                "\nStart `pretrain doctor` like this job to measure the links; NCCL_DEBUG=INFO shows NCCL's attempts."
            )
            error.rank = dist.get_rank()
            raise error from problem


def _check_group(group: dist.ProcessGroup, device_type: str) -> None:
    device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else 0)
    until = time.monotonic() + FIRST_ANSWER_SECONDS

    def sum_ones() -> float:
        one = torch.ones((), device=device)
        dist.all_reduce(one, group=group)
        return one.item()

    def poll() -> None:
        time.sleep(SHORTEST_PAUSE)
        if time.monotonic() > until:
            raise dist.DistBackendError(f"no answer within {FIRST_ANSWER_SECONDS:.0f} s")

    total = run_in_thread(sum_ones, poll)
    if total != group.size():
        raise dist.DistBackendError(f"the sum of {group.size()} ones is {total:g}")
