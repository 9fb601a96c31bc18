from __future__ import annotations

import pytest
import torch
from torch import nn

from pretraining.evaluation.generation import generate

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("single_process")


class Successor(nn.Module):
    """Says that the likeliest next token is the last one plus one; keeps what it was shown."""

    def __init__(self, vocab_size: int = 10) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.windows: list[list[int]] = []

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        self.windows.append(tokens_BS[0].tolist())
        following = (tokens_BS + 1) % self.vocab_size
        return 3.0 * nn.functional.one_hot(following, self.vocab_size).float()


def test_at_temperature_zero_the_likeliest_token_follows() -> None:
    assert generate(Successor(), [3], 4, 8, CPU, temperature=0) == [4, 5, 6, 7]


def test_the_model_sees_at_most_its_context() -> None:
    model = Successor()
    generate(model, [1, 2, 3], 3, 4, CPU, temperature=0)
    assert model.windows == [[1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


def test_draws_depend_on_the_seed_alone() -> None:
    draws = [generate(Successor(), [0], 20, 8, CPU, seed=seed, temperature=2.0) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_only_the_likeliest_are_drawn_from() -> None:
    assert generate(Successor(), [3], 4, 8, CPU, temperature=5.0, top_k=1) == [4, 5, 6, 7]
    assert len(generate(Successor(vocab_size=3), [0], 5, 8, CPU, top_k=50)) == 5
