"""The numbers that learning sees, per system: rate at five steps, groups of the optimizer, batch, tokens."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.make_translations import FOLDER, PAIRS
from torch import nn

from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.command_line import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.optim.registry import build_optimizer, own_arguments, settings_of_groups
from pretraining.optim.schedules import build_learning_rate
from pretraining.progress import TokenSchedule
from pretraining.tools.translate.hook import translate_when_needed

load = partial(load_train_config, translate=translate_when_needed)
WITHOUT_DATA = {name: {"use_dummy_dataset": "true"} for name in ("deepspeed", "composed")}
SHAPES = {"model.layers.0.mlp.up_proj.weight": (4, 4), "model.norm.weight": (4,)}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


def numbers(config: TrainConfig, ranks: int = 2) -> dict[str, Any]:
    """Return what a run of these settings learns with, on a number of ranks."""
    batch = resolve_batch_sizes(config.batch, ranks)
    tokens = batch.global_batch_size * config.data.seq_length
    schedule = build_learning_rate(config.schedule, config.run.num_steps, TokenSchedule.steady(tokens), 10**8)
    total = schedule.horizon.total_steps
    peak = config.optimizer.peak_learning_rate
    return {
        "rates": [schedule.at(total * part // 4 - (part > 0), peak) for part in range(5)],
        "decay": [group["weight_decay"] for group in settings_of_groups(SHAPES, config.optimizer)],
        "clip": config.optimizer.grad_clip_thresh,
        "batch": (batch.global_batch_size, batch.micro_batch_size, batch.grad_accum_steps),
        "tokens": (tokens, tokens * total),
    }


def cosine(peak: float, warmup: int, total: int, lowest: float, stable: int = 0) -> list[float]:
    """Return the rates at the steps of `numbers`: up in a line, the peak for a while, then half a cosine."""
    rates = []
    for step in (total * part // 4 - (part > 0) for part in range(5)):
        done = max(0.0, (step - warmup - stable) / (total - 1 - warmup - stable))
        decayed = lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * done))
        rates.append(peak * (step + 1) / (warmup + 1) if step < warmup else decayed)
    return rates


EXPECTED: dict[str, dict[str, Any]] = {
    # torch's AdamW, bare: a cosine to zero, 100 of 1000 steps warm-up, nothing clipped.
    "stub": {
        "rates": cosine(3e-4, 100, 1000, 0.0),
        "decay": [0.05, 0.0],
        "clip": 0.0,
        "batch": (8, 4, 1),
        "tokens": (8192, 8192 * 1000),
    },
    # 3 passes over 10^8 tokens of 64 x 256 a step: 18,311 steps; the guide's own rate, warm-up and decay.
    "guide": {
        "rates": cosine(1e-4, 1000, 18311, 0.0),
        "decay": [0.01, 0.0],
        "clip": 1.0,
        "batch": (64, 8, 4),
        "tokens": (64 * 256, 64 * 256 * 18311),
    },
    # DeepSpeed without a scheduler: constant from the first step.
    "deepspeed": {
        "rates": [3e-4] * 5,
        "decay": [0.01, 0.0],
        "clip": 0.0,
        "batch": (32, 4, 4),
        "tokens": (32 * 4096, 32 * 4096 * 1000),
    },
    # 0.5 x (1 - 0.9), linear to zero over 2000 steps, 100 of them warm-up.
    "composed": {
        "rates": [0.05 / 101, *(0.05 * (1 - (step - 100) / 1899) for step in (499, 999, 1499, 1999))],
        "decay": [0.01, 0.0],
        "clip": 10.0,
        "batch": (8, 4, 1),
        "tokens": (256, 256 * 2000),
    },
    # 306 steps of 65,536 tokens: 32 up, 64 at the peak, then a cosine to a fifth.
    "tokens": {
        "rates": cosine(1e-3, 32, 306, 2e-4, stable=64 - 1),
        "decay": [0.01, 0.0],
        "clip": 0.0,
        "batch": (64, 32, 1),
        "tokens": (65536, 65536 * 306),
    },
    # nanoGPT: 5000 steps of 480 sequences, 100 of them warm-up, a cosine to a tenth.
    "steps": {
        "rates": cosine(6e-4, 100, 5000, 6e-5),
        "decay": [0.1, 0.0],
        "clip": 1.0,
        "batch": (480, 12, 20),
        "tokens": (480 * 1024, 480 * 1024 * 5000),
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_numbers_of_a_system(name: str) -> None:
    found = numbers(load([PAIRS[name]], WITHOUT_DATA.get(name)))
    assert found.pop("rates") == pytest.approx(EXPECTED[name]["rates"], rel=1e-6, abs=1e-12)
    assert found == {key: value for key, value in EXPECTED[name].items() if key != "rates"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_batch_of_a_guide_is_the_same_on_any_number_of_ranks(ranks: int) -> None:
    assert numbers(load(["guide.json"]), ranks)["batch"][0] == 64


def test_the_batch_product_counts_what_the_deepspeed_file_gives(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}')
    guide = {"training": {"world_size": 8, "use_amp": True, "deepspeed_config": "ds.json"}}
    (tmp_path / "a.json").write_text(json.dumps(guide))
    config = load([str(tmp_path / "a.json")], {"use_dummy_dataset": "true"})
    assert (config.batch.global_batch_size, config.batch.batch_size, config.batch.grad_accum_steps) == (64, 4, None)


def test_a_mean_of_gradients_moves_parameters_as_it_does_there() -> None:
    """There m = beta x m + (1 - beta) x (g + decay x p), p = p - rate x m; here the momentum is a sum."""
    rate, beta, decay = 0.5, 0.9, 0.01
    config = load(["composed/config.yaml"], WITHOUT_DATA["composed"]).optimizer
    assert (config.learning_rate, config.momentum, config.weight_decay) == (0.05, beta, decay)
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    optimizer = build_optimizer({"model.layers.0.mlp.up_proj.weight": parameter}, config)
    there, mean = torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradient = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        mean = beta * mean + (1 - beta) * (gradient + decay * there)
        there = there - rate * mean
        parameter.grad = gradient
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), there, rtol=1e-6, atol=1e-7)


def test_the_momentum_of_torch_and_other_optimizers_is_not_scaled() -> None:
    for words in (["optimizer.momentum=0.9", "optimizer=sgdm"], ["optimizer.beta=0.9", "optimizer=normalized_sgdm"]):
        config = load(["optimizer.lr_config.lr=0.5", *words], {"use_dummy_dataset": "true"}).optimizer
        assert (config.learning_rate, config.momentum) == (0.5, 0.9)


def test_what_a_file_gives_a_users_own_optimizer_are_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()
    source = "class Lion:\n    def __init__(self, params, lr, weight_decay, momentum, gamma): ...\n"
    (tmp_path / "my_package" / "lion.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load(["composed/config.yaml", "optimizer=mine"], WITHOUT_DATA["composed"]).optimizer
    assert own_arguments(config) == {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9, "gamma": 0.3}


@pytest.mark.parametrize(("warmup", "end"), [(100, 5000), (100, 9000), (0, 3000)])
def test_the_rate_is_nanogpts_wherever_its_cosine_ends(warmup: int, end: int) -> None:
    flags = {"warmup_iters": str(warmup), "lr_decay_iters": str(end), "learning_rate": "1e-3", "min_lr": "1e-4"}
    config = load(["steps.py"], flags)
    schedule = build_learning_rate(config.schedule, config.run.num_steps, TokenSchedule.steady(1), None)
    for step in range(0, 5000, 7):
        done = min(1.0, (step - warmup) / (end - warmup))
        cosine = 1e-4 + 0.5 * (1 + math.cos(math.pi * done)) * 9e-4
        rate = 1e-3 * (step + 1) / (warmup + 1) if step < warmup else cosine
        assert schedule.at(step, 1e-3) == pytest.approx(rate, abs=2.5e-6)


def test_four_times_the_width_is_rescaled_and_other_widths_are_kept() -> None:
    def width(**model: Any) -> int | None:
        flags = {"use_dummy_dataset": "true", "model.n_heads": "4", "model.n_layers": "2"}
        named = {f"model.{name}": str(value) for name, value in model.items()}
        return load(["guide.json"], {**flags, **named}).model.intermediate_size

    assert width(d_model=768, d_ff=3072) == 2048
    assert width(d_model=768, d_ff=2304) == 2304
    assert width(d_model=768, d_ff=3072, activation="swiglu") == 3072
