from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from pretraining.config.strategies import mesh_shape
from pretraining.config.training import ParallelConfig, ShardingStrategy
from pretraining.distributed import dims as dims_module
from pretraining.distributed.dims import build_mesh, check_groups
from pretraining.errors import ConfigError, LaunchError

UNEVEN = [2, 2, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("strategy", "group", "nodes", "shape"),
    [
        ("ddp", None, [4] * 8, (8, 1)),
        ("zero2", None, [4] * 8, (1, 8)),
        ("fsdp", None, [4] * 8, (1, 8)),
        ("fsdp", None, UNEVEN, (1, 6)),
        ("hsdp", None, [4] * 8, (2, 4)),
        ("hsdp", 2, [4] * 8, (4, 2)),
        ("hsdp", 2, UNEVEN, (3, 2)),
        ("hsdp_zero2", 8, [4] * 8, (1, 8)),
        ("hsdp", None, [4] * 6, None),
        ("hsdp_zero2", 3, [4] * 8, None),
        ("hsdp", None, UNEVEN, None),
    ],
)
def test_axes_are_replicas_and_shards_and_groups_of_unequal_size_are_refused(
    strategy: ShardingStrategy, group: int | None, nodes: list[int], shape: tuple[int, int] | None
) -> None:
    parallel = ParallelConfig(sharding_strategy=strategy, hsdp_group_size=group)
    with nullcontext() if shape else pytest.raises(ConfigError):
        assert mesh_shape(parallel, nodes) == shape


@pytest.mark.usefixtures("single_process")
def test_a_group_that_is_late_wrong_or_failing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, release = build_mesh(ParallelConfig(), 1, 1, "cpu"), threading.Event()
    assert mesh.mesh_dim_names == ("replicate", "shard") and mesh.shape == (1, 1)
    monkeypatch.setattr(dims_module, "FIRST_ANSWER_SECONDS", 0.05)

    def fails(tensor: torch.Tensor, group: object) -> None:
        raise dist.DistBackendError("NCCL error: Duplicate GPU detected")

    faults = (lambda tensor, group: release.wait(), lambda tensor, group: tensor.add_(1), fails)
    for fault in faults:
        monkeypatch.setattr(dist, "all_reduce", fault)
        with pytest.raises(LaunchError) as raised:
            check_groups(mesh)
        assert raised.value.rank == 0
    release.set()
