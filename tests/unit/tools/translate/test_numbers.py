"""Numbers that other systems define otherwise; what becomes of each file is in its golden recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.make_translations import FOLDER
from torch import nn
from unit.tools.translate.loading import load

from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.optim.registry import build_optimizer, user_defined_arguments
from pretraining.optim.schedules import build_learning_rate
from pretraining.progress import TokenSchedule

WITHOUT_DATA = {name: {"use_dummy_dataset": "true"} for name in ("deepspeed", "composed")}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


def test_the_global_batch_of_a_guide_is_the_same_on_any_number_of_ranks() -> None:
    config = load(["guide.json"])
    assert {resolve_batch_sizes(config.batch, ranks).global_batch_size for ranks in (1, 2, 8)} == {64}


def test_the_batch_product_uses_the_values_of_the_deepspeed_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}')
    guide = {"training": {"world_size": 8, "use_amp": True, "deepspeed_config": "ds.json"}}
    (tmp_path / "a.json").write_text(json.dumps(guide))
    config = load([str(tmp_path / "a.json")], {"use_dummy_dataset": "true"})
    assert (config.batch.global_batch_size, config.batch.batch_size, config.batch.grad_accum_steps) == (64, 4, None)


def test_averaged_gradients_move_parameters_as_in_the_other_system() -> None:
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


def test_words_without_a_file_mean_what_they_mean_beside_one(tmp_path: Path) -> None:
    """Their momentum is a mean of gradients: read as a sum, steps would be 10 times too long."""
    words = ["optimizer=sgdm", "optimizer.lr_config.lr=1.0", "train.max_steps=200"]
    (tmp_path / "config.yaml").write_text("defaults: [{optimizer: sgdm}]\n")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "sgdm.yaml").write_text("lr_config: {lr: 0.1}\nbeta: 0.9\n")
    alone, beside = (load(each, WITHOUT_DATA["composed"]) for each in (words, [str(tmp_path / "config.yaml"), *words]))
    assert alone == beside
    assert (alone.optimizer.learning_rate, alone.optimizer.momentum) == (0.1, 0.9)
    assert load(words[:2], {"recipe": "demo"}).optimizer.learning_rate == 0.1
    assert load(["optimizer=adamw", *words[1:]], WITHOUT_DATA["composed"]).optimizer.adam_beta2 == 0.999


def test_one_word_of_another_system_brings_no_defaults() -> None:
    found = load(["train.max_steps=7"], WITHOUT_DATA["composed"])
    assert found == load([], {**WITHOUT_DATA["composed"], "num_steps": "7"})


def test_a_files_settings_of_a_user_defined_optimizer_become_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()
    source = "class Lion:\n    def __init__(self, params, lr, weight_decay, momentum, gamma): ...\n"
    (tmp_path / "my_package" / "lion.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load(["composed/config.yaml", "optimizer=mine"], WITHOUT_DATA["composed"]).optimizer
    assert user_defined_arguments(config) == {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9, "gamma": 0.3}


@pytest.mark.parametrize(("warmup", "end"), [(100, 9000), (0, 3000)])
def test_the_learning_rate_equals_nanogpts_for_any_end_of_its_cosine(warmup: int, end: int) -> None:
    flags = {"warmup_iters": str(warmup), "lr_decay_iters": str(end), "learning_rate": "1e-3", "min_lr": "1e-4"}
    config = load(["steps.py"], flags)
    assert (config.run.num_steps.amount, config.run.run_steps) == (5000, None)
    schedule = build_learning_rate(config.schedule, config.run.num_steps, TokenSchedule.steady(1), None)
    for step in range(warmup, 5000, 7):
        done = min(1.0, (step - warmup) / (end - warmup))
        rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * done)) * 9e-4
        assert schedule.at(step, 1e-3) == pytest.approx(rate, abs=2.5e-6)


def test_four_times_the_width_is_rescaled_and_other_widths_are_kept() -> None:
    def width(**model: Any) -> int | None:
        flags = {"use_dummy_dataset": "true", "model.n_heads": "4", "model.n_layers": "2"}
        named = {f"model.{name}": str(value) for name, value in model.items()}
        return load(["guide.json"], {**flags, **named}).model.intermediate_size

    assert width(d_model=768, d_ff=3072) == 2048
    assert width(d_model=768, d_ff=2304) == 2304
    assert width(d_model=768, d_ff=3072, activation="swiglu") == 3072
