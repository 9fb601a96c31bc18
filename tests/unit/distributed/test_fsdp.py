"""What ranks send each other in a step: everything once, however many micro-batches it has."""

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

from pretraining.config.training import ShardingStrategy
from pretraining.distributed.fsdp import (
    MicroBatchSync,
    clip_gradients,
    gradient_norm,
    local_gradients,
    precision_policy,
    shard_model,
)
from pretraining.distributed.mesh import AXES
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama

BLOCKS = TINY_SHAPE.num_hidden_layers
GROUPS = BLOCKS + 1  # each block, and what is left


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
    """This process is the first of four; what it sends goes nowhere, and what it receives is made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "mesh_shape", "gathers", "gathers_each", "scatters_each", "reduces"),
    [
        ("ddp", (4, 1), 0, 0, 0, GROUPS),
        ("zero2", (1, 4), GROUPS, 0, GROUPS, 0),
        ("fsdp", (1, 4), 1, 2 * BLOCKS, GROUPS, 0),
        ("hsdp", (2, 2), 1, 2 * BLOCKS, GROUPS, GROUPS),
        ("hsdp_zero2", (2, 2), GROUPS, 0, GROUPS, GROUPS),
    ],
)
def test_replicas_exchange_gradients_once_a_step_and_shards_what_they_must(
    strategy: ShardingStrategy,
    mesh_shape: tuple[int, int],
    gathers: int,
    gathers_each: int,
    scatters_each: int,
    reduces: int,
    micro_batches: int,
) -> None:
    """`_each`: of every micro-batch; the others of the step."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=AXES)
    model = Llama(TINY_SHAPE)
    initialize_weights(model, TINY_SHAPE, 0, torch.device("cpu"))
    shard_model(model, model.blocks, mesh, strategy, precision_policy(torch.float32))
    sync = MicroBatchSync(model, mesh, strategy)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with Collectives() as collectives:
        for index in range(micro_batches):
            sync.next_backward(is_last=index == micro_batches - 1)
            loss, _, _ = model(tokens, tokens)
            loss.backward()
    expected = {
        "_allgather_base_": gathers + micro_batches * gathers_each,
        "_reduce_scatter_base_": micro_batches * scatters_each,
        "allreduce_": reduces,
    }
    assert collectives.counts == Counter(expected)


# Norm and clipping


def gradients_of_norm_five() -> list[torch.Tensor]:
    return [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.usefixtures("single_process")
def test_the_norm_is_that_of_all_gradients_together() -> None:
    assert float(gradient_norm(gradients_of_norm_five(), world())) == pytest.approx(5.0)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_shows_in_the_norm(poison: float) -> None:
    gradients = gradients_of_norm_five()
    gradients[1][0, 0] = poison
    assert not torch.isfinite(gradient_norm(gradients, world()))


@pytest.mark.parametrize(("threshold", "norm_after"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_clipping_shortens_a_long_gradient_and_nothing_else(threshold: float, norm_after: float) -> None:
    gradients = gradients_of_norm_five()
    clip_gradients(gradients, torch.tensor(5.0), threshold)
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(norm_after, rel=1e-5)


@pytest.mark.parametrize(("threshold", "norm_after"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_clipping_undoes_the_scale_of_the_loss(threshold: float, norm_after: float) -> None:
    gradients = [64 * gradient for gradient in gradients_of_norm_five()]
    clip_gradients(gradients, torch.tensor(5.0), threshold, torch.tensor(64.0))
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(norm_after, rel=1e-5)


def test_parameters_without_a_gradient_are_left_out() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    assert [gradient.shape for gradient in local_gradients(layer.parameters())] == [(2, 2)]
