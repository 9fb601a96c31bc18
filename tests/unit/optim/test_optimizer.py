from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_shape import TINY_SHAPE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pretraining.config.training import OptimizerConfig
from pretraining.errors import ConfigError
from pretraining.model.llama import Llama
from pretraining.optim.optimizer import parameter_groups, skips_on_device, update
from pretraining.optim.registry import build_optimizer, try_optimizer, user_defined_arguments
from pretraining.optim.state import materialise_state


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_and_norms_and_embeddings_do_not(tied: bool) -> None:
    """A tied head counts as the embedding."""
    parameters = dict(Llama(replace(TINY_SHAPE, tie_word_embeddings=tied)).named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    groups = parameter_groups(parameters, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decaying, fixed = ({names[parameter] for parameter in group["params"]} for group in groups)
    assert fixed == {name for name in parameters if name.endswith(("norm.weight", "embed_tokens.weight"))}
    assert ("lm_head.weight" in decaying) != tied and len(decaying) == 2 * 7 + (not tied)


class Signs(torch.optim.Optimizer):
    """A minimal user-defined optimizer: an update by the gradient's sign, and a count of updates."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0, bad: str = "") -> None:
        super().__init__(params, {"lr": lr})
        self.scale, self.bad = scale, bad
        if bad == "pretends":
            self.skips_on_device = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = 0 if self.bad == "keeps an int" else torch.zeros(())
                state["count"] += 1
                parameter.sub_(group["lr"] * self.scale * parameter.grad.sign())


class Selecting(Signs):
    """An optimizer that skips on the device as declared."""

    skips_on_device = True
    found_inf: torch.Tensor

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(torch.where(self.found_inf.bool(), parameter, parameter - parameter.grad))


def test_a_user_defined_optimizer_that_skips_on_the_device_is_trusted_after_a_check() -> None:
    config = OptimizerConfig(optimizer=f"{__name__}:Selecting", learning_rate=0.5)
    try_optimizer(config)
    assert skips_on_device(build_optimizer(dict(nn.Linear(2, 2).named_parameters()), config))


OWN = "unit.optim.test_optimizer:Signs"


def own(*options: str) -> OptimizerConfig:
    return OptimizerConfig(optimizer=OWN, learning_rate=0.5, optimizer_options=options)


def test_a_user_defined_optimizer_gets_its_options_and_drawbacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    try_optimizer(own("scale=2"))
    assert len(caplog.messages) == 2
    optimizer = build_optimizer(dict(model.named_parameters()), own("scale=2"))
    model.weight.grad = torch.ones(2, 2)
    update(optimizer, torch.tensor(True))
    assert torch.equal(model.weight, before)
    update(optimizer, torch.tensor(False))
    assert torch.equal(model.weight, before - 1.0)
    materialise_state(optimizer)  # without touching parameters
    assert torch.equal(model.weight, before - 1.0) and optimizer.param_groups[0]["lr"] == 0.5


class WithNames(Signs):
    """An optimizer with our names of settings, or with torch's."""

    def __init__(
        self, params: Any, lr: float, betas: Any = 0, eps: Any = 0, momentum: Any = 0, rms_alpha: Any = 0, **decay: Any
    ) -> None:
        super().__init__(params, lr)


def make_of_anything(params: Any, **arguments: Any) -> torch.optim.Optimizer:
    return WithNames(params, **arguments)


@pytest.mark.parametrize("name", ["WithNames", "make_of_anything"])
def test_settings_that_were_given_reach_an_optimizer_of_the_users_own(name: str) -> None:
    config = OptimizerConfig(
        optimizer=f"{__name__}:{name}", adam_beta2=0.999, adam_epsilon=1e-6, momentum=0.5, weight_decay=0.0
    )
    given = {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-6, "momentum": 0.5}
    assert user_defined_arguments(config) == given
    build_optimizer(dict(nn.Linear(2, 2).named_parameters()), config)
    config = replace(config, adam_beta2=0.95, rms_alpha=0.9, adam_epsilon=1e-8, momentum=None, weight_decay=None)
    assert user_defined_arguments(config) == {"lr": 3e-4, "rms_alpha" if name == "WithNames" else "alpha": 0.9}


@pytest.mark.parametrize(
    "settings",
    [
        {"adam_beta2": 0.999},
        {"muon_ns_steps": 7},
        {"optimizer": f"{__name__}:WithNames", "momentum": 0.5, "optimizer_options": ("momentum=0.6",)},
    ],
)
def test_a_setting_that_a_user_defined_optimizer_does_not_take_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_optimizer(dict(nn.Linear(2, 2).named_parameters()), replace(own(), **settings))


@pytest.mark.parametrize(
    "config",
    [
        own("bad=pretends"),
        own("bad=keeps an int"),
        own("momentum=1"),
        OptimizerConfig(optimizer="no_such_package:Name"),
        OptimizerConfig(optimizer="builtins:dict"),
        OptimizerConfig(optimizer="math:pi"),
    ],
)
def test_a_class_that_breaks_the_optimizer_contract_is_refused(config: OptimizerConfig) -> None:
    with pytest.raises(ConfigError):
        try_optimizer(config)


class Foreach(Signs):
    """An optimizer that calls an operation that PyTorch does not have for sharded tensors."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.bad:
                raise RuntimeError(f"another {self.bad}")
            torch._foreach_copy_(group["params"], [parameter.grad for parameter in group["params"]])


@pytest.mark.usefixtures("single_process")
def test_an_optimizer_that_cannot_update_sharded_parameters_is_one_error_with_the_way_on() -> None:
    sharded = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    parameter = nn.Parameter(sharded)
    parameter.grad = torch.ones_like(sharded)
    with pytest.raises(ConfigError, match=r"Foreach cannot update sharded parameters: .*\n.*foreach=false"):
        update(Foreach([parameter], lr=1.0), torch.tensor(False))
    with pytest.raises(RuntimeError, match="size"):  # its own mistakes stay as they are
        update(Foreach([nn.Parameter(torch.ones(2))], lr=1.0, bad="size"), torch.tensor(False))
