"""A dry run of a training step: the real model, layout, optimizer and step on devices that are not there.

    settings, mesh -> model of few blocks, and of a few more -> a step of each (fake_devices.py) -> a line through both

Everything runs in one process, whatever the number of devices: it is rank 0 of them, tensors have no memory,
collectives send nothing. What a GPU does otherwise than a CPU is done here as there: the norms are one kernel, which
keeps its input alone, and the loss has a GPU's chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from fake_devices import PARTS, Bytes, fake_processes, track_step, without_memory
from torch import Tensor, nn

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import PER_OPERATION, TrainConfig, share_of_blocks
from pretraining.config.variants import LlamaShape
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.model.llama import Llama
from pretraining.model.loss import choose_chunk_tokens
from pretraining.optim.registry import build_optimizer
from pretraining.optim.schedules import build_learning_rate
from pretraining.progress import TokenSchedule
from pretraining.train.build import build_model
from pretraining.train.step import StepContext, train_step

FEWEST_BLOCKS = 4
"""The first two and the last two may differ from those between."""
MICRO_BATCHES = 2
"""Of a step, at most: the first finds no gradients, the last one exchanges them between replicas."""

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class SimulatedMemory:
    """Bytes that rank 0 needs in a step.

    Attributes:
        largest: of each of `PARTS`, whenever that is.
        at_peak: of each of them when all together are largest.
        peak_moment: when that is.
        depths: blocks of the models that were built; one number where it is the whole model.
    """

    largest: Bytes
    at_peak: Bytes
    peak_moment: str
    depths: tuple[int, ...]

    @property
    def total(self) -> int:
        """At the peak."""
        return sum(self.at_peak.values())


def simulate(
    config: TrainConfig, shape: LlamaShape, batch: BatchSizes, mesh_shape: tuple[int, int], *, device_type: str = "cuda"
) -> SimulatedMemory:
    """Simulates a training step in bfloat16 and returns what it takes of a device's memory.

    Models of identical blocks are not built whole: two of few blocks are, and what the others add follows. Blocks run
    uncompiled, rows are one document each.

    Args:
        config: the settings; which device and precision they name does not matter.
        shape: dimensions of the model.
        batch: how the global batch is cut.
        mesh_shape: devices along the axes (replicate, shard).
        device_type: "cuda", or "cpu" for what a CPU would take.

    """
    config = _as_simulated(config, shape, device_type)
    depths = _depths(config, shape.num_hidden_layers)
    steps = []
    for depth in depths:
        of_depth = replace(shape, num_hidden_layers=depth)
        steps.append(_moments(config, of_depth, batch, mesh_shape, device_type))
    moments = steps[0] if len(steps) == 1 else _extended(steps, depths, shape.num_hidden_layers)
    peak_moment = max(moments, key=lambda moment: sum(moments[moment].values()))
    largest = {part: max(each[part] for each in moments.values()) for part in PARTS}
    return SimulatedMemory(largest, moments[peak_moment], peak_moment, depths)


def _as_simulated(config: TrainConfig, shape: LlamaShape, device_type: str) -> TrainConfig:
    parallel = replace(
        config.parallel, mixed_precision=True, mp_dtype="bfloat16", low_cpu_fsdp=False, use_torch_compile=False
    )
    chunk = config.loss.loss_chunk_tokens
    if chunk is None:
        chunk = choose_chunk_tokens(torch.device(device_type), shape.vocab_size)
    return replace(config, parallel=parallel, loss=replace(config.loss, loss_chunk_tokens=chunk))


def _depths(config: TrainConfig, layers: int) -> tuple[int, ...]:
    """Returns two depths whose blocks are checkpointed in the same pattern as those of the model, or its own."""
    period = 1
    parallel = config.parallel
    if parallel.fsdp_activation_checkpointing and parallel.selective_checkpointing != PER_OPERATION:
        share = share_of_blocks(parallel.selective_checkpointing)
        period = share.numerator if share >= 1 else share.denominator
    # Muon shares out matrices among processes: what one has does not grow along a line.
    step = period * -(-2 // period)
    small = layers - max(0, layers - FEWEST_BLOCKS) // period * period
    if small + step >= layers or config.optimizer.optimizer == "muon":
        return (layers,)
    return small, small + step


def _extended(steps: Sequence[dict[str, Bytes]], depths: Sequence[int], layers: int) -> dict[str, Bytes]:
    """Continues each moment's parts along the line through two depths."""
    (small, large), (few, many) = steps, depths

    def extend(moment: str, part: str) -> int:
        first, second = small[moment][part], large[moment][part]
        return round(first + Fraction(second - first, many - few) * (layers - few))

    moments = large.keys() & small.keys()
    return {moment: {part: extend(moment, part) for part in PARTS} for moment in large if moment in moments}


def _moments(
    config: TrainConfig, shape: LlamaShape, batch: BatchSizes, mesh_shape: tuple[int, int], device_type: str
) -> dict[str, Bytes]:
    tokens = TokenSchedule.steady(batch.global_batch_size * config.data.seq_length)
    with fake_processes(mesh_shape) as mesh, without_memory():
        model = build_model(shape, config, mesh, _CPU, initialize=False)
        optimizer = build_optimizer(model.parameters, config.optimizer)
        if device_type == "cuda":
            _normalize_in_one_kernel(model.module)
        context = StepContext(
            model=model,
            optimizer=optimizer,
            learning_rate=build_learning_rate(config.schedule, config.run.num_steps, tokens, None),
            grad_clip_thresh=config.optimizer.grad_clip_thresh,
            shard_group=mesh["shard"].get_group(),
            device=_CPU,
        )
        assert isinstance(model.module, Llama)
        step = partial(_step, context, config, batch)
        step()  # what is only worked out once
        return track_step(model, optimizer, model.module.blocks, step)


def _step(context: StepContext, config: TrainConfig, batch: BatchSizes) -> None:
    size = (batch.micro_batch_size, config.data.seq_length + 1)
    micro_batches = [
        MicroBatch(torch.zeros(size, dtype=torch.int32)) for _ in range(min(MICRO_BATCHES, batch.grad_accum_steps))
    ]
    train_step(context, StepBatch(0, 0, micro_batches, ("made up",)), 0)


def _normalize_in_one_kernel(module: nn.Module) -> None:
    """Has norms keep what a GPU's kernel keeps; on a CPU they are several operations, in float32."""
    for norm in module.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.forward = partial(_normalize, norm)  # type: ignore[method-assign]  # for this model alone


def _normalize(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    normed: Tensor = _NormKernel.apply(x, norm.weight)  # type: ignore[no-untyped-call]  # torch has no type for it
    return normed


class _NormKernel(torch.autograd.Function):
    """A norm without values: its result, and for the backward pass the input and one float32 number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Returns a tensor like `x`."""
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gradients of both."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
