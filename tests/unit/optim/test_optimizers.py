"""Built-in optimizers: they match their reference implementations, and a skipped update changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.read import load_train_config
from pretraining.config.training import OptimizerConfig
from pretraining.optim import muon
from pretraining.optim.optimizer import is_hidden_matrix, parameter_groups, skips_on_device, update
from pretraining.optim.registry import build_optimizer, settings_of_groups
from pretraining.optim.state import materialise_state

SIZES = {
    "model.embed_tokens.weight": (12, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (20, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 20),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "lm_head.weight": (12, 8),
}
WITH_MOMENTUM = OptimizerConfig(optimizer="rmsprop", momentum=0.9)
EACH = [*(OptimizerConfig(optimizer=name) for name in OPTIMIZERS), WITH_MOMENTUM]


def name_of(config: OptimizerConfig) -> str:
    return f"{config.optimizer}-{config.momentum}"


def make_parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(size, generator=generator)) for name, size in SIZES.items()}


def set_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 6) -> None:
    for step in range(steps):
        set_gradients(parameters, step)
        update(optimizer, torch.tensor(False))


def bits_of(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().contiguous().view(torch.int32).clone() for tensor in (*parameters.values(), *kept)]


BETAS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}


@pytest.mark.parametrize(
    ("config", "reference", "options"),
    [
        (OptimizerConfig("adamw"), torch.optim.AdamW, BETAS),
        (OptimizerConfig("adam"), torch.optim.Adam, BETAS),
        (
            OptimizerConfig("nadam", adam_epsilon=0.1),
            torch.optim.NAdam,
            {"betas": (0.9, 0.95), "eps": 0.1, "decoupled_weight_decay": True},
        ),
        (OptimizerConfig("sgd"), torch.optim.SGD, {}),
        (OptimizerConfig("sgdm", momentum=0.8), torch.optim.SGD, {"momentum": 0.8}),
        (OptimizerConfig("sgdm", nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (OptimizerConfig("rmsprop"), torch.optim.RMSprop, {"alpha": 0.99}),
        (
            OptimizerConfig("rmsprop", rms_alpha=0.9, adam_epsilon=0.1, momentum=0.9),
            torch.optim.RMSprop,
            {"alpha": 0.9, "eps": 0.1, "momentum": 0.9},
        ),
    ],
)
def test_each_optimizer_follows_pytorch(config: OptimizerConfig, reference: Any, options: dict[str, Any]) -> None:
    config = replace(config, learning_rate=0.01, weight_decay=0.2)
    theirs = make_parameters()
    assert_follows(config, theirs, [reference(parameter_groups(theirs, 0.2), lr=0.01, **options)])


def assert_follows(
    config: OptimizerConfig,
    theirs: dict[str, nn.Parameter],
    references: list[torch.optim.Optimizer],
    atol: float = 1e-6,
) -> None:
    """Compare a few steps; `atol` holds for matrices of blocks."""
    ours = make_parameters()
    train(ours, build_optimizer(ours, config))
    for step in range(6):
        set_gradients(theirs, step)
        for reference in references:
            reference.step()
    for name in SIZES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=atol if "layers" in name else 1e-6)


def test_muon_follows_pytorch_on_hidden_matrices_and_adamw_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "has_units", lambda device, dtype: True)  # PyTorch's is always in bfloat16
    theirs = make_parameters()
    hidden = {name: each for name, each in theirs.items() if "proj" in name}
    rest = parameter_groups({name: each for name, each in theirs.items() if name not in hidden}, 0.2)
    references = [
        torch.optim.Muon(hidden.values(), lr=0.01, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.003, **BETAS),
    ]
    config = OptimizerConfig("muon", learning_rate=0.01, weight_decay=0.2, muon_adam_learning_rate=0.003)
    assert_follows(config, theirs, references, atol=2e-3)


def test_muon_orthogonalizes_the_same_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    at_once = muon.orthogonalize(matrices, 5)
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 61)
    for one, other in zip(at_once, muon.orthogonalize(matrices, 5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_muon_balances_matrices_over_ranks_by_cost() -> None:
    assert muon.balance([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    assert muon.balance([1, 2, 3, 6], 2) == [1, 1, 1, 0]
    assert muon.balance([5], 3) == [0]


@pytest.mark.parametrize(("factor", "length"), [(10.0, 0.5), (1e-4, 0.5), (1e-24, 0.0)])
def test_updates_of_normalized_sgdm_are_equally_long_until_momentum_has_died_away(factor: float, length: float) -> None:
    parameters = make_parameters()
    optimizer = build_optimizer(parameters, OptimizerConfig("normalized_sgdm", learning_rate=0.5))
    before = [parameter.detach().clone() for parameter in parameters.values()]
    set_gradients(parameters, 0)
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.grad *= factor
    update(optimizer, torch.tensor(False))
    moved = [now - was for now, was in zip(parameters.values(), before, strict=True)]
    assert float(torch.nn.utils.get_total_norm(moved)) == pytest.approx(length, rel=1e-4, abs=1e-6)


def with_zeros(config: OptimizerConfig) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Return parameters with zeros of both signs, and their optimizer."""
    parameters = make_parameters()
    for parameter in parameters.values():
        parameter.data.view(-1)[:2] = torch.tensor([-0.0, 0.0])
    return parameters, build_optimizer(parameters, config)


@pytest.mark.parametrize("config", EACH, ids=name_of)
@pytest.mark.parametrize("updates_before", [0, 3])
def test_a_skipped_update_changes_no_bit(config: OptimizerConfig, updates_before: int) -> None:
    parameters, optimizer = with_zeros(config)
    assert skips_on_device(optimizer)
    materialise_state(optimizer)
    for name, parameter in parameters.items():
        moments = {key for key, value in optimizer.state[parameter].items() if value.dim() > 0}
        assert moments == set(config.moments(in_matrix=is_hidden_matrix(name, parameter.dim())))
    train(parameters, optimizer, updates_before)
    before = bits_of(parameters, optimizer)
    set_gradients(parameters, 50)
    for parameter, wrong in zip(parameters.values(), [torch.nan, torch.inf, -torch.inf] * 3, strict=False):
        assert parameter.grad is not None
        parameter.grad.view(-1)[3] = wrong
    update(optimizer, torch.tensor(True))
    for was, now in zip(before, bits_of(parameters, optimizer), strict=True):
        assert torch.equal(was, now)
    whole, uninterrupted = with_zeros(config)
    train(whole, uninterrupted, updates_before)
    for each, its_optimizer in ((parameters, optimizer), (whole, uninterrupted)):
        train(each, its_optimizer, steps=1)
    for name in SIZES:
        assert torch.equal(parameters[name], whole[name])


@pytest.mark.parametrize("config", EACH, ids=name_of)
def test_groups_are_described_without_making_a_parameter(config: OptimizerConfig) -> None:
    parameters = make_parameters()
    names = {parameter: name for name, parameter in parameters.items()}
    made = build_optimizer(parameters, config).param_groups
    for group in made:
        group["params"] = [names[parameter] for parameter in group["params"]]
        del group["initial_lr"]
    assert settings_of_groups(SIZES, config) == made


def test_none_means_the_default_of_the_optimizer() -> None:
    config = load_train_config(["use_dummy_dataset=true", "optimizer=sgdm", "weight_decay=0.01"], {}).optimizer
    assert config.learning_rate is None
    chosen = config.resolved()
    assert (chosen.learning_rate, chosen.weight_decay, chosen.momentum, chosen.nesterov) == (0.1, 0.01, 0.9, False)
    assert OptimizerConfig(optimizer="my.module:Own").peak_learning_rate == 3e-4
    chosen = OptimizerConfig("muon", learning_rate=0.01, muon_adam_weight_decay=0.0).resolved()
    assert (chosen.muon_adam_learning_rate, chosen.muon_adam_weight_decay, chosen.weight_decay) == (0.01, 0.0, 0.1)
