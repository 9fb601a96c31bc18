"""Norms by block (`--norms_interval`): gradients, weights, updates and outputs of one step.

    begin -> watch each micro-batch -> gradients, before clipping -> update -> finish: one all-reduce -> values

Sums of squares stay on the device until the report. Masters are copied for the update: as much memory as this rank's
shard of the parameters, in the steps that are measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretraining.config.training import IGNORED_LABEL
from pretraining.distributed.grad_norm import local_part

BLOCK = re.compile(r"model\.(layers\.\d+)\.")
PARTS = ("grad", "weight", "update")
_NAMES = {"model.embed_tokens.": "embed", "model.norm.": "norm", "lm_head.": "head"}


class BlockNorms:
    """The norms of a run's blocks.

    Args:
        interval: steps between measured steps; 0 = none is.
        model: returns the `HeadLoss` of micro-batches; its submodule `model` takes the attribute `watch`.
        parameters: float32 masters by their names in checkpoints.
        shard_group: ranks that hold the shards of a parameter.
    """

    def __init__(
        self, interval: int, model: nn.Module, parameters: Mapping[str, nn.Parameter], shard_group: dist.ProcessGroup
    ) -> None:
        self._interval, self._parameters = interval, parameters
        self._decoder: Any = model.get_submodule("model")
        self._replicas = dist.get_world_size() / shard_group.size()
        self.blocks = list(dict.fromkeys(map(_block_of, parameters)))
        self._sums: dict[str, Tensor] = {}
        self._before: list[Tensor] = []
        self._reduced: Tensor | None = None
        self._names: list[str] = []

    def begin(self, step: int) -> bool:
        """Return whether the step after this many is measured, and begin it."""
        self._sums = {}
        return self._interval > 0 and (step + 1) % self._interval == 0

    @torch.no_grad()
    def watch(self, labels_BS: Tensor) -> None:
        """Add up what the blocks return for the next micro-batch, where labels count."""
        valid_BS = labels_BS != IGNORED_LABEL
        self._add("tokens", valid_BS.sum().double())

        @torch.no_grad()
        def add(name: str, x_BSD: Tensor) -> None:
            squares_BS = torch.linalg.vector_norm(x_BSD.detach(), dim=-1, dtype=torch.float32).square()
            mean = torch.where(valid_BS, squares_BS, 0.0).sum(dtype=torch.float64) / x_BSD.size(-1)
            self._add(f"output/{name}", mean)

        self._decoder.watch = add

    @torch.no_grad()
    def take_gradients(self, scale: Tensor | float) -> None:
        """Take the gradients before they are clipped, and copy the masters; the outputs are complete."""
        self._decoder.watch = None
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._square("grad", {name: local_part(gradient) / scale for name, gradient in gradients.items()})
        self._before = [local_part(parameter.detach()).clone() for parameter in self._parameters.values()]

    @torch.no_grad()
    def finish(self) -> None:
        """Take weights and update after the update, and sum over ranks; a collective call."""
        now = {name: local_part(parameter.detach()) for name, parameter in self._parameters.items()}
        self._square("weight", now)
        pairs = zip(now.items(), self._before, strict=True)
        self._square("update", {name: value - before for (name, value), before in pairs})
        self._before, self._names = [], list(self._sums)
        self._reduced = torch.stack([self._sums[name] for name in self._names])
        if dist.get_world_size() > 1:
            dist.all_reduce(self._reduced)

    def values(self) -> dict[str, float | None]:
        """Return the norms of the measured step, once; the host waits for the device."""
        if self._reduced is None:
            return {}
        sums = dict(zip(self._names, self._reduced.tolist(), strict=True))
        self._reduced = None
        found = {name: math.sqrt(total) for name, total in sums.items() if name.partition("/")[0] in PARTS}
        tokens = sums["tokens"]
        outputs = {name: total for name, total in sums.items() if name.startswith("output/")}
        found |= {name: math.sqrt(total / tokens) if tokens else math.nan for name, total in outputs.items()}
        for block in self.blocks:
            weight = found[f"weight/{block}"]
            found[f"ratio/{block}"] = found[f"update/{block}"] / weight if weight else math.nan
        return {f"norms/{name}": value for name, value in found.items()}

    def _square(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Add the squared norms of this rank's shards to their blocks, once over all replicas."""
        for name, tensor in tensors.items():
            norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
            self._add(f"{part}/{_block_of(name)}", norm.double().square() / self._replicas)

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value


def _block_of(parameter: str) -> str:
    """Return the block of a parameter: embed, layers.N, norm or head."""
    match = BLOCK.match(parameter)
    return match[1] if match else next(block for name, block in _NAMES.items() if parameter.startswith(name))
