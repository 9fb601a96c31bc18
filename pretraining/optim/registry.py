"""The optimizer that the settings name: one that ships (`config/plugins.py`), or the user's own, tried before use."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from pretraining.config.plugins import OPTIMIZERS, load_plugin, parse_options, plugin_errors
from pretraining.config.training import OptimizerConfig
from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.optim.optimizer import PEAK, Groups, parameter_groups, skips_on_device, update

log = logging.getLogger(__name__)

_NOT_ARGUMENTS = ("optimizer", "optimizer_options", "learning_rate", "grad_clip_thresh")
_NAMES_IN_TORCH = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps", "rms_alpha": "alpha"}


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Makes the optimizer over a model's parameters, sharded or not, by their names.

    Raises:
        ConfigError: a user's own optimizer cannot be made, keeps what no checkpoint can hold, or does not skip updates
            although it says so.
    """
    if config.optimizer in OPTIMIZERS:
        optimizer = _make_shipped(parameters, config)
    else:
        optimizer = _make_own(parameters, config)
    for group in optimizer.param_groups:
        group[PEAK] = group["lr"]
    return optimizer


def _make_shipped(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    entry = OPTIMIZERS[config.optimizer]
    chosen = config.resolved()
    options = {name: getattr(chosen, name) for name in ("learning_rate", "weight_decay", *entry.options)}
    optimizer: torch.optim.Optimizer = load_plugin("optimizer", entry.path)(parameters, **options)
    return optimizer


def try_optimizer(config: OptimizerConfig) -> None:
    """Makes the optimizer over two small parameters, where it is the user's own; a ConfigError as `build_optimizer`."""
    if config.optimizer not in OPTIMIZERS:
        build_optimizer({"matrix": nn.Parameter(torch.zeros(4, 4)), "vector": nn.Parameter(torch.zeros(4))}, config)


def settings_of_groups(shapes: Mapping[str, Sequence[int]], config: OptimizerConfig) -> Groups:
    """Returns the settings of each parameter group, with the names of its parameters, without making any of them.

    Args:
        shapes: of the parameters, by name.
        config: of an optimizer that ships; of one of the user's own, what it is called with.
    """
    nothing = torch.zeros(())
    parameters = {name: nn.Parameter(nothing.expand(*shape)) for name, shape in shapes.items()}
    names = {parameter: name for name, parameter in parameters.items()}
    if config.optimizer in OPTIMIZERS:
        groups = _make_shipped(parameters, config).param_groups
    else:
        groups = [{**group, "lr": config.peak_learning_rate} for group in parameter_groups(parameters, config.decay)]
    return [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in groups]


def own_arguments(config: OptimizerConfig) -> dict[str, Any]:
    """Return what a user's own optimizer is called with: lr, what differs from the defaults here, and its options.

    A setting goes by its name here or by the one that torch's optimizers use, as the signature has it.

    Raises:
        ConfigError: the signature has neither name for a setting that was given, or there is no such optimizer.
    """
    make = load_plugin("optimizer", config.optimizer)
    if not callable(make):
        raise ConfigError(f"--optimizer={config.optimizer} is no torch.optim.Optimizer, but a {type(make).__name__}")
    try:
        signature = inspect.signature(make).parameters
    except ValueError:  # written in C: it takes or refuses what it is called with
        signature = inspect.signature(lambda **anything: None).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.values())
    arguments: dict[str, Any] = {"lr": config.peak_learning_rate}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _NOT_ARGUMENTS or value == field.default:
            continue
        name = field.name if field.name in signature else _NAMES_IN_TORCH.get(field.name, field.name)
        if name not in signature and not takes_any:
            names = " or ".join(dict.fromkeys((field.name, name)))
            raise ConfigError(
                f"--{field.name}={format_value(value)}: --optimizer={config.optimizer} has no argument {names}. Leave "
                "the setting out, or give the class the argument"
            )
        arguments[name] = (config.adam_beta1, config.adam_beta2) if name == "betas" else value
    options = parse_options("optimizer_options", config.optimizer_options)
    if twice := sorted(arguments.keys() & options.keys()):
        raise ConfigError(f"--optimizer_options has {twice[0]}, which is a setting given, too: keep one")
    return {**arguments, **options}


def _make_own(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    groups = parameter_groups(parameters, config.decay)
    make = load_plugin("optimizer", config.optimizer)
    arguments = own_arguments(config)

    def make_over(groups: Groups) -> torch.optim.Optimizer:
        with plugin_errors("optimizer", config.optimizer):
            made = make(groups, **arguments)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"--optimizer={config.optimizer} is no torch.optim.Optimizer, but a {type(made).__name__}"
            )
        return made

    optimizer = make_over(groups)
    with plugin_errors("optimizer", config.optimizer):
        _check_contract(config.optimizer, make_over)
    if config.decay and "weight_decay" not in optimizer.defaults:
        log.info("optimizer   %s has no weight_decay: that of its groups is not used", config.optimizer)
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
