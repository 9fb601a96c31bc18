"""Communication of a step: everything is sent once, whatever the number of micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_shape import TINY_SHAPE
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pretraining.config.training import ParallelConfig, ShardingStrategy
from pretraining.distributed.dims import Dims
from pretraining.distributed.parallelize import parallelize
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama

BLOCKS = TINY_SHAPE.num_hidden_layers
GROUPS = BLOCKS + 1  # each block, and the root
GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Make this process the first of four, with a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "mesh_shape", "of_step", "of_micro_batch"),
    [
        ("ddp", (4, 1), {"allreduce_": 1}, {}),  # all gradients of a small model at once
        ("zero2", (1, 4), {GATHER: GROUPS}, {SCATTER: GROUPS}),
        ("fsdp", (1, 4), {GATHER: 1}, {GATHER: 2 * BLOCKS, SCATTER: GROUPS}),
        ("hsdp", (2, 2), {GATHER: 1, "allreduce_": GROUPS}, {GATHER: 2 * BLOCKS, SCATTER: GROUPS}),
        ("hsdp_zero2", (2, 2), {GATHER: GROUPS, "allreduce_": GROUPS}, {SCATTER: GROUPS}),
    ],
)
def test_replicas_all_reduce_gradients_once_per_step(
    strategy: ShardingStrategy,
    mesh_shape: tuple[int, int],
    of_step: dict[str, int],
    of_micro_batch: dict[str, int],
    micro_batches: int,
) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    dims = Dims(world=4, node=4, replicate=mesh_shape[0], shard=mesh_shape[1], context=1, data=4, rank=0, mesh=mesh)
    model, cpu = Llama(TINY_SHAPE), torch.device("cpu")
    initialize_weights(model, TINY_SHAPE, 0, cpu)
    settings = ParallelConfig(sharding_strategy=strategy, mixed_precision=False, low_cpu_fsdp=False)
    laid_out = parallelize(model, model.model.layers, settings, dims, cpu, model.tie_weights)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with Collectives() as collectives:
        for index in range(micro_batches):
            laid_out.next_backward(is_last=index == micro_batches - 1)
            loss, *_ = model(tokens, tokens)
            loss.backward()
        laid_out.finish_gradients()
    assert collectives.counts == sum([Counter(of_micro_batch)] * micro_batches, Counter(of_step))
