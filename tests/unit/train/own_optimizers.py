"""Optimizers as users write them, or as libraries have them in small: counters, two sets of weights, low bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing


class Own(torch.optim.Optimizer):
    """Updates parameter after parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "is_training": False})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, self.state[parameter])

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Tensor]) -> None:
        raise NotImplementedError


class Counting(Own):
    """The first update is a tenth of the second, by a counter beside the parameter."""

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Tensor]) -> None:
        state["updates"] = state.get("updates", torch.zeros((), dtype=torch.int64)) + 1
        parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * (0.1 if state["updates"] == 1 else 1.0))


class CountingInGroup(Own):
    """The same, by a counter in the group."""

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Tensor]) -> None:
        parameter.sub_(parameter.grad.sign(), alpha=group["lr"] / group["count"])


class CountingInObject(Own):
    """The same, by an attribute that no checkpoint holds."""

    updates = 0

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Tensor]) -> None:
        self.updates += 1
        parameter.sub_(parameter.grad.sign(), alpha=group["lr"] / self.updates)


class CountingInTensorOfGroup(Own):
    """The same, by a tensor in the group, which decides only later updates."""

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Tensor]) -> None:
        group["updates"] = group.get("updates", torch.zeros(1)) + 1
        parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class TwoWeights(Own):
    """Trains at other weights than those to evaluate and save, as schedulefree does."""

    def train(self) -> None:
        self._exchange(True, 0.1)

    def eval(self) -> None:
        self._exchange(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _exchange(self, is_training: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["is_training"] != is_training else []:
                if "base" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["base"], weight)
            group["is_training"] = is_training

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Tensor]) -> None:
        if not group["is_training"]:
            raise RuntimeError("call train() before step()")
        base = state.setdefault("base", parameter.clone())
        parameter.lerp_(base, 1 / group["count"])
        parameter.sub_(parameter.grad, alpha=0.1 * group["lr"])
        base.sub_(parameter.grad, alpha=group["lr"])


class Rounded(Tensor):
    """A tensor that keeps 8 bits per value, and a scale of this rank's part."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Rounded:
        made: Rounded = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> Rounded:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.alias.default):
            made = cls(args[0].codes, args[0].scale)
            return return_and_correct_aliasing(function, args, kwargs or {}, made)
        raise NotImplementedError(function)

    def read(self) -> Tensor:
        return self.codes.float() * self.scale

    def write(self, values: Tensor) -> None:
        self.scale.copy_(values.abs().max().clamp(min=1e-12) / 127)
        self.codes.copy_((values / self.scale).round())


class LowBit(Own):
    """Momentum in 8 bits, and a tensor for the learning rate, as torchao's optimizers have."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Tensor]) -> None:
        if not isinstance(group["lr"], Tensor):
            raise RuntimeError("use group['lr'].fill_(rate)")
        weight, gradient = (
            each.to_local() if isinstance(each, DTensor) else each for each in (parameter, parameter.grad)
        )
        if not state:
            zeros = Rounded(torch.zeros_like(weight, dtype=torch.int8), torch.zeros((), device=weight.device))
            state["momentum"] = zeros
            if isinstance(parameter, DTensor):
                state["momentum"] = DTensor.from_local(
                    zeros,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        kept: Any = state["momentum"]
        kept = kept.to_local() if isinstance(kept, DTensor) else kept
        momentum = kept.read() * 0.9 + gradient
        kept.write(momentum)
        weight.sub_(momentum * group["lr"])
