"""Compiled blocks compute the same with every kind of checkpointing, and compile once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiers import first_quick
from tiny_model import loss_and_gradients, model_with
from torch import nn
from torch._dynamo.utils import counters

from pretraining.distributed.compile import compile_blocks, without_compiling

pytestmark = pytest.mark.usefixtures("single_process", "fresh_compiler")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Start and end without compiled code; PyTorch runs the graphs, which saves the time of a C++ compiler."""
    counters.clear()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("selective", first_quick("2", None, "1", "op"))
def test_compiled_blocks_compute_the_same_and_compile_in_the_first_step_only(selective: str | None) -> None:
    flags = [] if selective is None else ["fsdp_activation_checkpointing=true", f"selective_checkpointing={selective}"]
    plain, compiled = model_with(*flags), model_with(*flags, "use_torch_compile=true")
    compare(loss_and_gradients(plain), loss_and_gradients(compiled))
    graphs = 2 if selective == "2" else 1  # not one per block
    assert counters["stats"]["unique_graphs"] == graphs
    for seed in (1, 2, 3):
        compare(loss_and_gradients(plain, seed), loss_and_gradients(compiled, seed))
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_text_is_generated_without_compiling() -> None:
    model = model_with("use_torch_compile=true")
    with torch.no_grad(), without_compiling():
        for length in range(2, 12):
            model.module(torch.zeros(1, length, dtype=torch.int64))
    assert counters["stats"]["unique_graphs"] == 0


def test_a_later_model_has_the_full_limit_of_recompilations() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            block = Plus(number)
            compile_blocks([block])
            block(torch.zeros(2))
    assert counters["stats"]["unique_graphs"] == 4


class Plus(nn.Module):
    """A function whose graph depends on the number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = float(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number
