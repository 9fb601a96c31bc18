"""Compiled blocks compute the same with every kind of checkpointing, compile once, and say whose flag it was if not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiers import first_quick
from tiny_shape import TINY_SHAPE
from torch import nn
from torch._dynamo.utils import counters
from training_runs import TINY

from pretraining.config.command_line import load_train_config
from pretraining.distributed.compile import compile_blocks, naming_the_flag, without_compiling
from pretraining.distributed.mesh import build_mesh
from pretraining.distributed.parallelize import ParallelModel
from pretraining.errors import ConfigError, DataError
from pretraining.train.build import build_model

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("single_process", "fresh_compiler")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before or after; graphs are run by PyTorch, which spares the time of a C++ compiler."""
    counters.clear()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
    torch.compiler.reset()


def model_with(*flags: str) -> ParallelModel:
    config = load_train_config([*TINY, "use_dummy_dataset=true", *flags])
    return build_model(TINY_SHAPE, config, build_mesh(config.parallel, 1, 1, "cpu"), CPU, initialize=True)


def loss_and_gradients(model: ParallelModel, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a batch with positions of its own, as documents in rows have them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TINY_SHAPE.vocab_size, (2, 17), generator=generator)
    positions = torch.randint(16, (2, 16), generator=generator)
    for parameter in model.parameters.values():
        parameter.grad = None
    loss, *_ = model.module(tokens[:, :-1], tokens[:, 1:], positions)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters.values()]
    return loss, [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("selective", first_quick("2", None, "1", "op"))
def test_compiled_blocks_compute_the_same_and_compile_in_the_first_step_only(selective: str | None) -> None:
    flags = [] if selective is None else ["fsdp_activation_checkpointing=true", f"selective_checkpointing={selective}"]
    plain, compiled = model_with(*flags), model_with(*flags, "use_torch_compile=true")
    compare(loss_and_gradients(plain), loss_and_gradients(compiled))
    graphs = 2 if selective == "2" else 1  # not one a block
    assert counters["stats"]["unique_graphs"] == graphs
    for seed in (1, 2, 3):
        compare(loss_and_gradients(plain, seed), loss_and_gradients(compiled, seed))
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def compare(expected: tuple[torch.Tensor, list[torch.Tensor]], found: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert len(found[1]) == len(expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_text_is_generated_without_compiling() -> None:
    model = model_with("use_torch_compile=true")
    with torch.no_grad(), without_compiling():
        for length in range(2, 12):
            model.module(torch.zeros(1, length, dtype=torch.int64))
    assert counters["stats"]["unique_graphs"] == 0


def test_a_model_after_another_has_all_its_variants_to_itself() -> None:
    models = torch._dynamo.config.recompile_limit + 2
    for number in range(models):
        block = Plus(number)
        compile_blocks([block])
        block(torch.zeros(2))
    assert counters["stats"]["unique_graphs"] == models


class Plus(nn.Module):
    """Another graph for each number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number / 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


class Unreadable(nn.Module):
    """What no compiler makes one graph of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_an_error_of_the_compiler_names_the_flag_and_what_it_said() -> None:
    block = Unreadable()
    compile_blocks([block])
    with torch.compiler.set_stance("default"), pytest.raises(ConfigError) as error, naming_the_flag(rank=3):
        block(torch.ones(2))
    assert error.value.settings == ("use_torch_compile",) and error.value.rank == 3
    assert "graph_break" in str(error.value) and len(str(error.value).splitlines()) == 2


def test_other_errors_stay_what_they_are() -> None:
    for other in (DataError("gone"), RuntimeError("shape")):
        with pytest.raises(type(other)) as error, naming_the_flag(rank=None):
            raise other
        assert error.value is other
