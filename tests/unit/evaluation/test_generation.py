from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pretraining.config.command_line import load_train_config
from pretraining.data.tokenizer import train_tokenizer
from pretraining.distributed.processes import Processes
from pretraining.evaluation.generation import generate
from pretraining.train.run import open_sampler

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
    for temperature in (0, 1e-45, 1e-300):
        assert generate(Successor(), [3], 4, 8, CPU, temperature=temperature) == [4, 5, 6, 7]


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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_model_whose_logits_are_not_finite_writes_something(value: float) -> None:
    class Overflowing(Successor):
        def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
            return torch.full_like(super().forward(tokens_BS), value)

    for temperature in (0.0, 0.01, 0.8):
        drawn = generate(Overflowing(), [3], 4, 8, CPU, temperature=temperature)
        assert len(drawn) == 4 and set(drawn) <= set(range(10))


def test_a_run_needs_the_file_of_its_tokenizer_at_its_start_alone(tmp_path: Path) -> None:
    train_tokenizer(["a few words"], 270).save(tmp_path)
    flags = ["model_variant=tiny", "vocab_size=512", "use_dummy_dataset=true", "sample_prompt=a", "sample_tokens=2"]
    sampler = open_sampler(load_train_config([*flags, f"tokenizer_path={tmp_path}"]), Processes(0, 1, 0, 1, CPU))
    (tmp_path / "tokenizer.json").unlink()
    assert sampler is not None and sampler.sample(Successor(vocab_size=512), CPU).prompt == "a"
