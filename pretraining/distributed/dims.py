"""The dimensions of a job as a rank sees them: sizes, its place, the device mesh, process groups.

settings, processes of each node -> sizes (`config/strategies.py`) -> device mesh -> checked groups -> `Dims`
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pretraining.config.strategies import DimSizes, dim_sizes
from pretraining.config.training import ParallelConfig
from pretraining.context_group import ContextGroup
from pretraining.distributed.grad_norm import is_sharded
from pretraining.distributed.processes import Processes
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT, SHORTEST_PAUSE, run_in_thread
from pretraining.distributed.torch_private import all_gather, set_timeout_of_group
from pretraining.errors import LaunchError

Axis = Literal["replicate", "shard"]
"""A dimension that lays out the model: an axis of the mesh, with a process group."""
FIRST_ANSWER_SECONDS = 300.0
"""Time limit for the first collective of each group, in which NCCL connects."""


@dataclass(frozen=True)
class Dims(DimSizes):
    """Dimensions of this job: sizes in ranks, the place of this rank, and the mesh over which the model is laid out.

    Attributes:
        rank: this rank.
        mesh: device mesh with the axes of `Axis`.
        context_group: ranks that share their sequences with this one; None = none do.
    """

    rank: int
    mesh: DeviceMesh
    context_group: ContextGroup | None = None

    @property
    def data_rank(self) -> int:
        """Place of this rank in the dimension `data`."""
        return self.data_rank_of(self.rank)

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Return this rank's process group along an axis."""
        return self.mesh[axis].get_group()


def group_along(tensor: torch.Tensor, axis: Axis) -> dist.ProcessGroup | None:
    """Return the group that holds the shards of a parameter, or its replicas; None = this process alone."""
    if is_sharded(tensor):
        mesh = tensor.device_mesh
        return mesh[axis].get_group() if axis in (mesh.mesh_dim_names or ()) else None
    return dist.group.WORLD if axis == "replicate" and dist.is_initialized() else None


def build_dims(parallel: ParallelConfig, processes: Processes, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Dims:
    """Resolve the dimensions of a job, and build its mesh; a collective call.

    Collectives fail after `timeout`.

    Raises:
        ConfigError: as `dim_sizes`.
        LaunchError: as `check_groups`.
    """
    # With different meshes, ranks would wait in groups that others do not create.
    on_nodes = [0] * processes.world_size
    dist.all_gather_object(on_nodes, processes.local_world_size)
    sizes, axes = dim_sizes(parallel, on_nodes, processes.rank), get_args(Axis)
    mesh = init_device_mesh(processes.device.type, (sizes.replicate, sizes.shard), mesh_dim_names=axes)
    for axis in axes:  # new groups have PyTorch's default, 10 minutes with NCCL, not the timeout of the job
        set_timeout_of_group(mesh[axis].get_group(), timeout)
    context = None
    if sizes.context > 1:
        context, _ = dist.new_subgroups(sizes.context, timeout=timeout)
    if sizes.world > 1:
        check_groups(mesh, context)
    shared = None if context is None else build_context_group(context)
    return Dims(**vars(sizes), rank=processes.rank, mesh=mesh, context_group=shared)


def build_context_group(group: dist.ProcessGroup) -> ContextGroup:
    """Return the view of context parallelism on a process group of neighboring ranks."""
    return ContextGroup(group.rank(), group.size(), partial(_gather_rows, group), partial(_any_of_group, group))


def _gather_rows(group: dist.ProcessGroup, part: torch.Tensor) -> torch.Tensor:
    parts = all_gather(part[None], group)
    firsts, seconds = parts.chunk(2, dim=-3)
    return torch.cat((*firsts.unbind(0), *reversed(seconds.unbind(0))), dim=-3)


def _any_of_group(group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    counts = values.int()
    dist.all_reduce(counts, group=group)
    return counts > 0


def check_groups(mesh: DeviceMesh, context: dist.ProcessGroup | None = None) -> None:
    """Sum the number 1 over each group, to find broken set-ups early.

    Raises:
        LaunchError: a sum fails, is late, or is wrong.
    """
    groups = {"all processes": dist.group.WORLD, **{f"axis {axis}": mesh[axis].get_group() for axis in get_args(Axis)}}
    if context is not None:
        groups["axis context"] = context
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
