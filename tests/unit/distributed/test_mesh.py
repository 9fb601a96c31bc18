from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from pretraining.config.mesh_shape import mesh_shape
from pretraining.config.training import ParallelConfig, ShardingStrategy
from pretraining.distributed import mesh as mesh_module
from pretraining.distributed.mesh import build_mesh, try_groups
from pretraining.errors import ConfigError, LaunchError


@pytest.mark.parametrize(
    ("strategy", "group", "shape"),
    [
        ("ddp", None, (8, 1)),
        ("zero2", None, (1, 8)),
        ("fsdp", None, (1, 8)),
        ("hsdp", None, (2, 4)),
        ("hsdp", 2, (4, 2)),
        ("hsdp_zero2", 8, (1, 8)),
    ],
)
def test_axes_are_replicas_and_shards(strategy: ShardingStrategy, group: int | None, shape: tuple[int, int]) -> None:
    parallel = ParallelConfig(sharding_strategy=strategy, hsdp_group_size=group)
    assert mesh_shape(parallel, [4] * 8) == shape


def test_groups_of_unequal_size_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"6 processes / 4 \(processes of a node.*= 1.50.*divisor of 6"):
        mesh_shape(ParallelConfig(sharding_strategy="hsdp"), [4] * 6)
    with pytest.raises(ConfigError, match=r"8 processes / 3 \(hsdp_group_size\)"):
        mesh_shape(ParallelConfig(sharding_strategy="hsdp_zero2", hsdp_group_size=3), [4] * 8)


def test_nodes_that_differ_need_a_group_size() -> None:
    nodes = [2, 2, 4, 4, 4, 4]
    with pytest.raises(ConfigError, match=r"different numbers of processes \(2, 4\).*--hsdp_group_size"):
        mesh_shape(ParallelConfig(sharding_strategy="hsdp"), nodes)
    assert mesh_shape(ParallelConfig(sharding_strategy="hsdp", hsdp_group_size=2), nodes) == (3, 2)
    assert mesh_shape(ParallelConfig(sharding_strategy="fsdp"), nodes) == (1, 6)


@pytest.mark.usefixtures("single_process")
def test_the_mesh_has_named_axes() -> None:
    mesh = build_mesh(ParallelConfig(), 1, 1, "cpu")
    assert mesh.mesh_dim_names == ("replicate", "shard") and mesh.shape == (1, 1)


@pytest.mark.usefixtures("single_process")
def test_a_group_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, release = build_mesh(ParallelConfig(), 1, 1, "cpu"), threading.Event()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: release.wait())
    monkeypatch.setattr(mesh_module, "FIRST_ANSWER_SECONDS", 0.05)
    with pytest.raises(LaunchError, match="all processes of the mesh gave no answer") as raised:
        try_groups(mesh)
    assert raised.value.rank == 0
    release.set()


@pytest.mark.usefixtures("single_process")
def test_a_group_that_adds_up_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = build_mesh(ParallelConfig(), 1, 1, "cpu")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(1))
    with pytest.raises(LaunchError, match="1 ones, added up over all processes of the mesh, are 2"):
        try_groups(mesh)
