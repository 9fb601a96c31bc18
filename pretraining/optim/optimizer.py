"""Optimizers: parameter groups, how one is made from the settings, and the contract for skipped updates.

    OptimizerConfig -> parameter groups -> a torch.optim.Optimizer, shipped or the user's own

A step whose gradient is not finite, or whose loss is a spike, must leave parameters, moments and counters as they are,
to the bit, under every optimizer. An optimizer with `skips_on_device = True` does so itself: it reads `found_inf`, a
scalar on the device, and selects (multiplying by zero does not do: NaN times zero is NaN). Any other is called only
where the host knows that there is an update to make, which costs a wait for the device at each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pretraining.config.plugins import OPTIMIZERS, load_plugin, parse_options
from pretraining.config.training import OptimizerConfig
from pretraining.errors import ConfigError

log = logging.getLogger(__name__)

PEAK = "initial_lr"
"""Key of a parameter group's peak learning rate, which the schedule scales (the name that torch's schedulers use)."""

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Makes the optimizer over the parameters of `model`, sharded or not.

    Raises:
        ConfigError: a user's own optimizer cannot be made, keeps what no checkpoint can hold, or does not skip updates
            although it says so.
    """
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer in OPTIMIZERS:
        optimizer = _make_shipped(groups, config)
    else:
        optimizer = _make_own(groups, config)
    for group in optimizer.param_groups:
        group[PEAK] = group["lr"]
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Two groups for an optimizer: matrices, which decay, and norms and embeddings, which do not.

    Weight decay pulls a matrix towards zero, which regularises it; a norm's gain would be pulled away from 1, and an
    embedding row that is rarely seen would fade without a gradient to answer. An output head that is tied to the
    embedding counts as the embedding.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying, fixed = [], []
    for parameter in model.parameters():
        if parameter.dim() < 2 or id(parameter) in embeddings:
            fixed.append(parameter)
        else:
            decaying.append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": fixed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(
    groups: Groups, lr: float, *, adam_beta1: float, adam_beta2: float, adam_epsilon: float
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) with PyTorch's fused kernel, which skips on the device."""
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(adam_beta1, adam_beta2), eps=adam_epsilon, fused=True)
    optimizer.skips_on_device = True  # type: ignore[attr-defined]
    return optimizer


def update(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Makes an update, unless `skipped` (a bool scalar on the device) is true."""
    if skips_on_device(optimizer):
        # The fused kernels read this attribute, which exists for gradient scalers: a non-zero value means "skip".
        optimizer.found_inf = skipped.to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer leaves everything untouched by itself where `found_inf` is not zero."""
    return bool(getattr(optimizer, "skips_on_device", False))


@torch.no_grad()
def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes what the first update would make (moments and counters), so that a checkpoint can be read into it.

    The update has a zero gradient and a zero learning rate, so parameters keep their bits; one that skips on the device
    leaves its state zero, too.
    """
    gradients = {parameter: parameter.grad for group in optimizer.param_groups for parameter in group["params"]}
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if skips_on_device(optimizer):
        update(optimizer, torch.ones((), dtype=torch.bool, device=next(iter(gradients)).device))
    else:
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _make_shipped(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    entry = OPTIMIZERS[config.optimizer]
    options = {name: getattr(config, name) for name in entry.options}
    optimizer: torch.optim.Optimizer = load_plugin("optimizer", entry.path)(groups, config.learning_rate, **options)
    return optimizer


def _make_own(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    make = load_plugin("optimizer", config.optimizer)
    options = parse_options("optimizer_options", config.optimizer_options)

    def make_over(groups: Groups) -> torch.optim.Optimizer:
        try:
            made = make(groups, lr=config.learning_rate, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--optimizer={config.optimizer} cannot be made: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"--optimizer={config.optimizer} is no torch.optim.Optimizer, but a {type(made).__name__}"
            )
        return made

    optimizer = make_over(groups)
    _check_contract(config.optimizer, make_over)
    if config.weight_decay and "weight_decay" not in optimizer.defaults:
        log.info("optimizer   %s has no weight_decay: --weight_decay is not used", config.optimizer)
    if not skips_on_device(optimizer):
        log.info(
            "optimizer   %s does not declare skips_on_device: the host waits for the device before each update",
            config.optimizer,
        )
    return optimizer


def _check_contract(name: str, make_over: Callable[[Groups], torch.optim.Optimizer]) -> None:
    """Tries a user's own optimizer on two tiny parameters: it keeps tensors, and a skipped update changes nothing.

    Raises:
        ConfigError: it breaks the contract.
    """
    parameters = [nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4)), nn.Parameter(torch.linspace(-1.0, 1.0, 4))]
    optimizer = make_over([{"params": [parameters[0]], "weight_decay": 0.1}, {"params": [parameters[1]]}])
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    update(optimizer, torch.tensor(False))
    for key, value in _kept(optimizer):
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"--optimizer={name} keeps {key} as {type(value).__name__}, and a checkpoint holds tensors: keep it "
                "as a torch.Tensor (docs/extending.md)"
            )
    if not skips_on_device(optimizer):
        return
    before = [tensor.clone() for tensor in _tensors_of(parameters, optimizer)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, torch.nan)
    update(optimizer, torch.tensor(True))
    if not all(map(torch.equal, before, _tensors_of(parameters, optimizer))):
        raise ConfigError(
            f"--optimizer={name} declares skips_on_device, and a skipped update with a NaN gradient changed parameters "
            "or state: select with torch.where and found_inf, or leave the declaration out (docs/extending.md)"
        )


def _kept(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, Any]]:
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    return [item for state in states for item in state.items()]


def _tensors_of(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*(parameter.detach() for parameter in parameters), *(value for _, value in _kept(optimizer))]
