"""The optimizers by name: built-in ones (`config/plugins.py`) and user-defined ones, which are tested before use."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from pretraining.config.plugins import OPTIMIZERS, load_plugin, parse_options, plugin_errors
from pretraining.config.training import OptimizerConfig
from pretraining.errors import ConfigError
from pretraining.optim.optimizer import PEAK, Groups, parameter_groups, skips_on_device, update

log = logging.getLogger(__name__)

_NOT_ARGUMENTS = ("optimizer", "optimizer_options", "learning_rate", "grad_clip_thresh")
_NAMES_IN_TORCH = {
    "learning_rate": "lr",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
    "rms_alpha": "alpha",
}


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of a model's parameters, which are given by name and may be sharded.

    Raises:
        ConfigError: a user-defined optimizer cannot be made.
    """
    if config.optimizer in OPTIMIZERS:
        optimizer = _make_builtin(parameters, config)
    else:
        optimizer = _make_user_defined(parameter_groups(parameters, config.decay), config)
    for group in optimizer.param_groups:
        group[PEAK] = group["lr"]
    return optimizer


def _make_builtin(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    entry, chosen = OPTIMIZERS[config.optimizer], config.resolved()
    make = load_plugin("optimizer", entry.path)
    arguments = _torch_arguments(("learning_rate", *entry.options), chosen)
    is_class = isinstance(make, type)
    optimizer: torch.optim.Optimizer = (
        make(parameter_groups(parameters, config.decay), **arguments) if is_class else make(parameters, chosen)
    )
    return optimizer


def _torch_arguments(names: Iterable[str], config: OptimizerConfig) -> dict[str, Any]:
    """Return the values of settings under torch's names."""
    arguments = {_NAMES_IN_TORCH.get(name, name): getattr(config, name) for name in names}
    if "betas" in arguments:
        arguments["betas"] = (config.adam_beta1, config.adam_beta2)
    return arguments


def settings_of_groups(shapes: Mapping[str, Sequence[int]], config: OptimizerConfig) -> Groups:
    """Return the settings and parameter names of each group, without allocating parameters.

    For a user-defined optimizer, the groups are those that its class gets.

    Args:
        shapes: shapes of the parameters, by name.
    """
    nothing = torch.zeros(())
    parameters = {name: nn.Parameter(nothing.expand(*shape)) for name, shape in shapes.items()}
    names = {parameter: name for name, parameter in parameters.items()}
    if config.optimizer in OPTIMIZERS:
        groups = _make_builtin(parameters, config).param_groups
    else:
        groups = [{**group, "lr": config.peak_learning_rate} for group in parameter_groups(parameters, config.decay)]
    return [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in groups]


def user_defined_arguments(config: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of a user-defined optimizer: lr, settings that differ from their defaults, and its options.

    A setting has its own name if the signature has this name, else torch's name.

    Raises:
        ConfigError: a setting is given twice, or the optimizer cannot be imported.
    """
    make = load_plugin("optimizer", config.optimizer)
    with plugin_errors("optimizer", config.optimizer):
        signature = inspect.signature(make).parameters
    given = [each.name for each in fields(config) if getattr(config, each.name) != each.default]
    given = [name for name in given if name not in _NOT_ARGUMENTS]
    arguments = {"lr": config.peak_learning_rate}
    arguments |= {name: getattr(config, name) for name in given if name in signature}
    arguments |= _torch_arguments([name for name in given if name not in signature], config)
    options = parse_options("optimizer_options", config.optimizer_options)
    if twice := sorted(arguments.keys() & options.keys()):
        raise ConfigError(f"--optimizer_options repeats the setting {twice[0]}: keep one of the two")
    return {**arguments, **options}


def _make_user_defined(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    make, arguments = load_plugin("optimizer", config.optimizer), user_defined_arguments(config)
    with plugin_errors("optimizer", config.optimizer):
        made = make(groups, **arguments)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"--optimizer={config.optimizer} is a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def try_optimizer(config: OptimizerConfig) -> None:
    """Test a user-defined optimizer on two tiny parameters, and log its costs.

    Raises:
        ConfigError: the optimizer cannot be made, has state that is no tensor, or declares `skips_on_device` and
            changes something in a skipped update.
    """
    name = config.optimizer
    if name in OPTIMIZERS:
        return
    parameters = [nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4)), nn.Parameter(torch.linspace(-1.0, 1.0, 4))]
    groups = parameter_groups({"matrix": parameters[0], "norm": parameters[1]}, config.decay)
    optimizer = _make_user_defined(groups, config)
    with plugin_errors("optimizer", name):
        _check_contract(name, optimizer, parameters)
    if config.decay and "weight_decay" not in optimizer.defaults:
        log.info("optimizer   %s has no weight_decay: the weight decay of the groups is ignored", name)
    if not skips_on_device(optimizer):
        log.info(
            "optimizer   %s does not declare skips_on_device: the host waits for the device before each update", name
        )


def _check_contract(name: str, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    def step(gradient: float, skipped: bool) -> list[tuple[str, Any]]:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, gradient)
        update(optimizer, torch.tensor(skipped))
        return [item for parameter in parameters for item in optimizer.state[parameter].items()]

    for key, value in step(0.5, skipped=False):
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"--optimizer={name} has the state {key} of type {type(value).__name__}: make it a torch.Tensor, as "
                "checkpoints need (docs/extending.md)"
            )
    if not skips_on_device(optimizer):
        return
    weights = [parameter.detach().clone() for parameter in parameters]
    kept = [value.clone() for state in optimizer.state.values() for value in state.values()]
    now = [value for _, value in step(torch.nan, skipped=True)]
    if not all(map(torch.equal, [*weights, *kept], [*parameters, *now])):
        raise ConfigError(
            f"--optimizer={name} declares skips_on_device, but a skipped update with a NaN gradient changed parameters "
            "or state: select with torch.where and found_inf, or remove the declaration (docs/extending.md)"
        )
