from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pretraining.config.command_line import load_train_config
from pretraining.data.tokenizer import train_tokenizer
from pretraining.distributed.processes import Processes
from pretraining.errors import ConfigError
from pretraining.evaluation.generation import Sampling, TextSampler, check_prompt, draw_tokens, open_sampler

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("single_process")


class Successor(nn.Module):
    """Model whose likeliest next token is the last token plus one; records its inputs."""

    def __init__(self, vocab_size: int = 10) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.windows: list[list[int]] = []

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        self.windows.append(tokens_BS[0].tolist())
        following = (tokens_BS + 1) % self.vocab_size
        return 3.0 * nn.functional.one_hot(following, self.vocab_size).float()


def draw(model: nn.Module, prompt: list[int], count: int, ends: Sequence[int] = (), **options: Any) -> list[int]:
    def next_logits(tokens: Sequence[int]) -> torch.Tensor:
        logits_V: torch.Tensor = model(torch.tensor([tokens]))[0, -1]
        return logits_V

    sampling = Sampling(**{"seed": 0, "temperature": 0.8, "top_k": 50, "top_p": 1.0, **options})
    return list(draw_tokens(next_logits, prompt, count, sampling, ends))


def test_tokens_follow_until_an_end_token_and_draws_depend_on_the_seed_alone() -> None:
    assert draw(Successor(), [3], 9, ends=[7], temperature=0.0) == [4, 5, 6]
    assert draw(Successor(), [3], 4, temperature=5.0, top_k=1) == [4, 5, 6, 7]
    draws = [draw(Successor(), [0], 20, seed=seed, temperature=2.0) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_the_model_sees_at_most_its_context() -> None:
    model = Successor(vocab_size=3)
    TextSampler("", [1, 2, 0], (), 3, 4, 0, None).sample(model, CPU)
    assert [len(window) for window in model.windows] == [3, 4, 4]
    assert model.windows[2][:3] == model.windows[1][1:]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_model_whose_logits_are_not_finite_writes_something(value: float) -> None:
    class Overflowing(Successor):
        def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
            return torch.full_like(super().forward(tokens_BS), value)

    for temperature in (0.0, 0.01, 0.8):
        drawn = draw(Overflowing(), [3], 4, temperature=temperature)
        assert len(drawn) == 4 and set(drawn) <= set(range(10))


class Chosen(nn.Module):
    """Model whose next token has these probabilities."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits_V = torch.tensor(probabilities).log()

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return self.logits_V.expand(*tokens_BS.shape, -1)


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 0, "top_p": 0.0}, {0}),
        ({"top_k": 0, "top_p": 0.5}, {0}),
        ({"top_k": 0, "top_p": 0.81}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.9}, {0, 1}),
    ],
)
def test_tokens_are_drawn_among_the_likeliest_as_transformers_do(options: dict[str, Any], drawn: set[int]) -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert set(draw(Chosen(probabilities), [0], 300, temperature=1.0, **options)) == drawn
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits_BV = torch.tensor([probabilities]).log()
    if options.get("top_k"):
        logits_BV = warpers.TopKLogitsWarper(options["top_k"])(None, logits_BV)
    if options.get("top_p"):
        logits_BV = warpers.TopPLogitsWarper(options["top_p"])(None, logits_BV)
        assert {token for token in range(4) if logits_BV[0, token].isfinite()} == drawn


FLAGS = ["model_variant=tiny", "vocab_size=512", "use_dummy_dataset=true", "sample_tokens=4", "seq_length=8"]


def sampler_of(tmp_path: Path, *flags: str) -> TextSampler:
    train_tokenizer(["a few words"], 270).save(tmp_path)
    config = load_train_config([*FLAGS, f"tokenizer_path={tmp_path}", *flags])
    sampler = open_sampler(config, Processes(0, 1, 0, 1, CPU))
    assert sampler is not None
    return sampler


@pytest.mark.parametrize(
    ("flags", "prompt", "ends"),
    [
        (["sample_prompt=a"], [65], (0,)),
        (["sample_prompt=a", "bos_token=5", "sep_token=7"], [5, 65], (7,)),
        (["sample_prompt=", "sep_token=7"], [7], (7,)),
        (["sample_prompt=a<|endoftext|>a"], [65, 0, 65], (0,)),
        (["sample_prompt=<|endoftext|>a", "bos_token=0"], [0, 65], (0,)),
        (["sample_prompt=a", "bos_token=none", "sep_token=none"], [65], (0,)),
    ],
)
def test_a_prompt_begins_as_in_training_and_its_text_ends_at_the_end_of_the_text(
    tmp_path: Path, flags: list[str], prompt: list[int], ends: tuple[int, ...]
) -> None:
    sampler = sampler_of(tmp_path, *flags)
    assert (sampler.prompt_tokens, sampler.ends) == (prompt, ends)
    (tmp_path / "tokenizer.json").unlink()  # which is needed at the start alone
    assert isinstance(sampler.sample(Successor(vocab_size=512), CPU), str)


def test_a_model_with_fewer_rows_than_the_tokenizer_has_entries_is_refused_with_the_number_it_needs(
    tmp_path: Path,
) -> None:
    for flags, source in (([], "the beginning of generated text"), (["sample_prompt=a"], "--sample_prompt")):
        with pytest.raises(ConfigError, match=f"^{source} gives token .*the model has 512 rows"):
            sampler_of(tmp_path, *flags, "bos_token=700")
    tokenizer = train_tokenizer(["a few words"], 270)
    with pytest.raises(ConfigError, match="the model has 260 rows"):
        check_prompt("--prompt", [265], tokenizer, 260, 8)


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    flags = ["sample_prompt=abcdefghi", "bos_token=5"]
    with pytest.raises(ConfigError, match="--sample_prompt gives 10 tokens, and the model has a context of 8"):
        sampler_of(tmp_path, *flags)
