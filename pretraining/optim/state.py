"""State of an optimizer in checkpoints, for whatever class the user names.

    tensors of a parameter   -> tensors of the checkpoint; tensor subclasses (torchao's 8-bit moments) as inner tensors
    numbers of a group       -> the manifest, such as the counters of schedulefree and pytorch_optimizer
    no update yet            -> no tensors, which the manifest says: the next start has a new optimizer, too

Built-in optimizers keep plain tensors only, and make their state in a skipped update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pretraining.distributed.grad_norm import is_sharded, local_part
from pretraining.errors import CheckpointError, ConfigError
from pretraining.optim.optimizer import PEAK, set_rate, skips_on_device, update

OPTIMIZER_STATE = "optimizer"
"""Name of `OptimizerRecord` in checkpoints."""
INNER = ":"
"""Separates the name of a state from that of an inner tensor."""


def state_tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the state of a parameter as tensors without a copy: loading into them restores the state.

    The inner tensors of a tensor subclass depend on the shard, so each gets a first dim of one row per shard.

    Raises:
        ConfigError: a state is no tensor.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in optimizer.state[parameter].items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"the optimizer has the state {key} of type {type(value).__name__}: make it a torch.Tensor, as "
                "checkpoints need (docs/extending.md)"
            )
        if not is_wrapped(value):
            found[key] = value
            continue
        local = local_part(value)
        for name in local.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            row = getattr(local, name).unsqueeze(0)
            found[f"{key}{INNER}{name}"] = _one_row_per_shard(row, value) if is_sharded(value) else row
    return found


def _one_row_per_shard(row: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(row, like.device_mesh, like.placements, run_check=False)


def is_wrapped(value: torch.Tensor) -> bool:
    """Return whether this rank's part of a tensor is a subclass that keeps its values in inner tensors."""
    return is_traceable_wrapper_subclass(local_part(value))


@torch.no_grad()
def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Create moments and counters, so that a checkpoint can be loaded into them.

    An optimizer that skips on the device makes them in a skipped update. Others make an update with gradients and
    learning rates of zero, so their counters are undefined until they are loaded; groups keep their values.
    """
    gradients = {parameter: parameter.grad for group in optimizer.param_groups for parameter in group["params"]}
    before = [deepcopy({**group, "params": None}) for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
    begin_training(optimizer)
    if skips_on_device(optimizer):
        update(optimizer, torch.ones((), dtype=torch.bool, device=next(iter(gradients)).device))
    else:
        optimizer.step()
    if _has_modes(optimizer):
        optimizer.eval()  # type: ignore[attr-defined]  # as checkpoints are saved
    for group, values in zip(optimizer.param_groups, before, strict=True):
        set_rate(group, float(values.pop("lr")))
        for name in group.keys() - values.keys() - {"lr"}:
            del group[name]
        group.update({**values, "params": group["params"]})
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's `train()`, if it has `train()` and `eval()`, such as those of schedulefree."""
    if _has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


@contextmanager
def evaluation_mode(
    optimizer: torch.optim.Optimizer, before_train: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Put an optimizer that has `train()` and `eval()` into evaluation mode for a `with` block.

    Such optimizers train at other weights than those to evaluate and to save; their two methods exchange the weights.

    Args:
        before_train: called before `train()` writes into the parameters again.
    """
    if not _has_modes(optimizer):
        yield
        return
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        before_train()
        optimizer.train()  # type: ignore[attr-defined]


def _has_modes(optimizer: torch.optim.Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


class OptimizerRecord:
    """Record of a user-defined optimizer in a checkpoint's manifest, besides its tensors.

    Args:
        optimizer: without updates.
        loads: whether the run loads the optimizer's state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loads: bool = True) -> None:
        self._optimizer, self._loads = optimizer, loads
        self._initial = [_numbers(group) for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers that updates changed, by group, and what the tensors of the state depend on."""
        changed = [
            {name: value for name, value in _numbers(group).items() if (name, value) not in initial.items()}
            for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True)
        ]
        found: dict[str, Any] = {"groups": changed} if any(changed) else {}
        states = [state for state in self._optimizer.state.values() if state]
        if not states:
            return {**found, "has_tensors": False}
        wrapped = [value for state in states for value in state.values() if is_wrapped(value)]
        return {**found, "shards": shards_of(wrapped[0])} if wrapped else found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers of the groups."""
        if self._loads and "groups" in state:
            for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
                group.update(values)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and flags of a group that a manifest can hold, without the rates, which the schedule sets."""
    return {
        name: value
        for name, value in group.items()
        if name not in ("lr", PEAK)
        and isinstance(value, int | float)
        and (isinstance(value, int) or math.isfinite(value))
    }


def has_tensors(record: Mapping[str, Any] | None) -> bool:
    """Return whether a checkpoint holds tensors of optimizer state; not if there was no update before it."""
    return record is None or bool(record.get("has_tensors", True))


def shards_of(tensor: Any) -> int:
    """Return the number of processes that share one copy of a tensor."""
    if not is_sharded(tensor):
        return 1
    return math.prod(
        tensor.device_mesh.size(axis) for axis, placement in enumerate(tensor.placements) if placement.is_shard()
    )


def check_shards(optimizer: str, parameters: Mapping[str, nn.Parameter], record: Mapping[str, Any] | None) -> None:
    """Check that state in inner tensors fits the shards, and that a checkpoint has as many.

    Args:
        optimizer: its name, for messages.
        parameters: parameters of the model, by name.
        record: `OptimizerRecord.state_dict` of the checkpoint to load, if any.

    Raises:
        ConfigError: the rows of a parameter do not divide by the number of shards.
        CheckpointError: the checkpoint has another number of shards.
    """
    for name, parameter in parameters.items():
        if int(parameter.shape[0]) % (shards := shards_of(parameter)):
            raise ConfigError(
                f"--optimizer={optimizer} keeps its state in blocks of each shard, so all shards must have the same "
                f"size, and the {parameter.shape[0]} rows of {name} do not divide by {shards} processes. Set another "
                f"number of processes, --hsdp_group_size, or --vocab_size as a multiple of {shards}"
            )
    shards = shards_of(next(iter(parameters.values())))
    saved = (record or {}).get("shards", shards)
    if saved != shards:
        raise CheckpointError(
            f"the checkpoint's state of --optimizer={optimizer} is in blocks of {saved} shards, and this run has "
            f"{shards}. Start with {saved} shards (the number of processes with fsdp and zero2, --hsdp_group_size "
            "with hsdp), or give --load_optimizer=false: parameters and data position stay, the optimizer state is new"
        )
