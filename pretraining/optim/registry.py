"""The optimizers by name: built-in ones (`config/plugins.py`) and user-defined ones, which are tested before use."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import nn

from pretraining.config.plugins import OPTIMIZERS, load_plugin, parse_options, plugin_errors
from pretraining.config.training import OptimizerConfig
from pretraining.errors import ConfigError
from pretraining.optim.optimizer import PEAK, Groups, parameter_groups, skips_on_device, update
from pretraining.optim.state import (
    OptimizerRecord,
    begin_training,
    evaluation_mode,
    is_wrapped,
    materialise_state,
    state_tensors,
)

log = logging.getLogger(__name__)

SAMPLE_SIZE = 256
"""Rows and columns of the matrix that user-defined optimizers are tested on."""

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
        group[PEAK] = float(group["lr"])
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
    given = [field.name for field in fields(config) if getattr(config, field.name) != field.default]
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


@dataclass(frozen=True)
class StateSize:
    """State of a user-defined optimizer, as measured on a small matrix.

    Attributes:
        bytes_per_parameter: bytes of state.
        is_wrapped: whether states are tensor subclasses, whose inner tensors depend on the shards.
    """

    bytes_per_parameter: float
    is_wrapped: bool


@cache
def measure_state(config: OptimizerConfig) -> StateSize | None:
    """Measure the state of a user-defined optimizer by an update of a small matrix; None for a built-in one.

    Raises:
        ConfigError: the optimizer cannot be made, or its update fails.
    """
    if config.optimizer in OPTIMIZERS:
        return None
    parameters = _sample_parameters()
    optimizer = _make_user_defined(parameter_groups(parameters, config.decay), config)
    with plugin_errors("optimizer", config.optimizer):
        begin_training(optimizer)
        _step(optimizer, list(parameters.values()), 0.5)
    matrix = parameters["matrix"]
    values = [value for value in optimizer.state[matrix].values() if isinstance(value, torch.Tensor)]
    size = sum(tensor.nbytes for tensor in state_tensors(optimizer, matrix).values()) if values else 0
    return StateSize(size / matrix.numel(), any(map(is_wrapped, values)))


def try_optimizer(config: OptimizerConfig) -> None:
    """Test a user-defined optimizer on two small parameters, and log its costs.

    Raises:
        ConfigError: the optimizer cannot be made, has state that checkpoints cannot hold, or declares `skips_on_device`
            and changes something in a skipped update.
    """
    name = config.optimizer
    if name in OPTIMIZERS:
        return
    optimizer, record, parameters = _make_sample(config, _sample_parameters())
    with plugin_errors("optimizer", name):
        begin_training(optimizer)
        _step(optimizer, parameters, 0.5)
        _check_resume(config, optimizer, record, parameters)
        _check_skip(name, optimizer, parameters)
    if config.decay and "weight_decay" not in optimizer.defaults:
        log.info("optimizer   %s has no weight_decay: the weight decay of the groups is ignored", name)
    if not skips_on_device(optimizer):
        log.info(
            "optimizer   %s does not declare skips_on_device: the host waits for the device before each update", name
        )


def _sample_parameters() -> dict[str, nn.Parameter]:
    """Return a matrix and a vector; low-bit optimizers quantize the state of the matrix, as of large parameters."""
    matrix = torch.linspace(-1.0, 1.0, SAMPLE_SIZE**2).view(SAMPLE_SIZE, SAMPLE_SIZE)
    return {"matrix": nn.Parameter(matrix), "norm": nn.Parameter(torch.linspace(-1.0, 1.0, SAMPLE_SIZE))}


def _make_sample(
    config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, OptimizerRecord, list[nn.Parameter]]:
    optimizer = _make_user_defined(parameter_groups(parameters, config.decay), config)
    return optimizer, OptimizerRecord(optimizer), list(parameters.values())


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], scale: float) -> None:
    """Update the parameters with gradients of about this size; a class that draws random numbers draws the same."""
    for parameter in parameters:
        parameter.grad = scale * torch.linspace(0.5, 1.5, parameter.numel()).view(parameter.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        update(optimizer, torch.tensor(not math.isfinite(scale)))


def _check_resume(
    config: OptimizerConfig,
    optimizer: torch.optim.Optimizer,
    record: OptimizerRecord,
    parameters: Sequence[nn.Parameter],
) -> None:
    """Save and load in memory as a checkpoint does, and compare the next updates with those of the first object."""
    for scale in (-2.0, 0.25):
        _step(optimizer, parameters, scale)
    with evaluation_mode(optimizer):
        copies = {f"copy{index}": nn.Parameter(each.detach().clone()) for index, each in enumerate(parameters)}
        again, other_record, others = _make_sample(config, copies)
        materialise_state(again)
        for parameter, other in zip(parameters, others, strict=True):
            saved, loaded = state_tensors(optimizer, parameter), state_tensors(again, other)
            for key in saved.keys() & loaded.keys():
                loaded[key].copy_(saved[key])
            other.data.copy_(parameter.data)
        other_record.load_state_dict(record.state_dict())
    begin_training(again)
    for scale in (-1.0, 0.5):
        _step(optimizer, parameters, scale)
        _step(again, others, scale)
    if _snapshot(optimizer, parameters) != _snapshot(again, others):
        raise ConfigError(
            f"--optimizer={config.optimizer} does not continue after a resume as without it. Checkpoints hold tensors "
            "in self.state[parameter] that its first update makes, and numbers in the parameter groups, but no other "
            "state (docs/extending.md)"
        )


def _snapshot(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Return the bits of parameters and their state, and the values of the groups."""
    states = [value for parameter in parameters for value in state_tensors(optimizer, parameter).values()]
    bits = [each.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for each in (*parameters, *states)]
    values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return [*bits, *(value.tolist() if isinstance(value, torch.Tensor) else value for value in values)]


def _check_skip(name: str, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    if not skips_on_device(optimizer):
        return
    before = _snapshot(optimizer, parameters)
    _step(optimizer, parameters, math.nan)
    if _snapshot(optimizer, parameters) != before:
        raise ConfigError(
            f"--optimizer={name} declares skips_on_device, but a skipped update with a NaN gradient changed parameters "
            "or state: select with torch.where and found_inf, or remove the declaration (docs/extending.md)"
        )
