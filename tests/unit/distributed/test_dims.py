from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from tiny_model import single_dims

from pretraining.config.strategies import DimSizes, dim_sizes, unsharded_sizes
from pretraining.config.training import ParallelConfig, ShardingStrategy
from pretraining.distributed import dims as dims_module
from pretraining.distributed.dims import check_groups
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
        sizes = dim_sizes(parallel, nodes, rank=1)
        assert (sizes.replicate, sizes.shard) == shape
        assert (sizes.world, sizes.node, sizes.data) == (len(nodes), nodes[1], len(nodes))


def test_replicas_of_a_shard_and_places_in_the_data_follow_from_the_numbers_of_ranks() -> None:
    sizes = DimSizes(world=6, node=3, replicate=3, shard=2, context=1, data=6)
    assert sizes.replicas_of_shards == [[0, 2, 4], [1, 3, 5]]
    assert [sizes.data_rank_of(rank) for rank in range(6)] == list(range(6))


def test_neighbors_share_their_sequences_whatever_shards_the_model() -> None:
    for strategy in ("ddp", "fsdp", "hsdp"):
        sizes = dim_sizes(ParallelConfig(sharding_strategy=strategy, context_parallel_size=2), [4] * 8)
        assert (sizes.world, sizes.context, sizes.data) == (8, 2, 4)
        assert [sizes.data_rank_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("context", "said"), [(3, "the job has 8, which 3 does not divide"), (4, "=4: set --hsdp_group_size")]
)
def test_context_groups_that_do_not_fit_are_refused_with_the_numbers(context: int, said: str) -> None:
    parallel = ParallelConfig(sharding_strategy="hsdp", hsdp_group_size=2, context_parallel_size=context)
    with pytest.raises(ConfigError, match=said):
        dim_sizes(parallel, [4] * 8)


def test_data_does_not_depend_on_how_the_model_is_laid_out() -> None:
    parallel = ParallelConfig(sharding_strategy="hsdp", hsdp_group_size=4)  # which does not divide 6
    assert unsharded_sizes(parallel, 6) == DimSizes(world=6, node=6, replicate=6, shard=1, context=1, data=6)


@pytest.mark.usefixtures("single_process")
def test_a_group_that_is_late_wrong_or_failing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dims, release = single_dims(), threading.Event()
    assert dims.mesh.mesh_dim_names == ("replicate", "shard") and dims.mesh.shape == (1, 1)
    assert (dims.world, dims.node, dims.replicate, dims.shard, dims.data, dims.data_rank) == (1, 1, 1, 1, 1, 0)
    monkeypatch.setattr(dims_module, "FIRST_ANSWER_SECONDS", 0.05)

    fails = Mock(side_effect=dist.DistBackendError("NCCL error: Duplicate GPU detected"))
    faults = (lambda tensor, group: release.wait(), lambda tensor, group: tensor.add_(1), fails)
    for fault in faults:
        monkeypatch.setattr(dist, "all_reduce", fault)
        with pytest.raises(LaunchError) as raised:
            check_groups(dims.mesh)
        assert raised.value.rank == 0
    release.set()
