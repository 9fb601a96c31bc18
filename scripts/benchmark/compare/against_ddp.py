"""Tokens/s of `--sharding_strategy=ddp` against DistributedDataParallel.

    python -m scripts.benchmark.compare.against_ddp
    python -m scripts.benchmark.compare.against_ddp --processes=8 --model_variant=125m --seq_length=1024 --batch_size=16
    python -m scripts.benchmark.compare.against_ddp --sharding_strategy=fsdp

Both wrap the same model class with the same weights, and train it in the same bare loop. They have the same
micro-batches per rank, exchange gradients only in the last micro-batch of a step, clip, and use fused AdamW. Equal
losses at the end show that both did the same work.

In bfloat16, the project computes with copies of the parameters and reduces gradients in float32. Here the other side
does the same: its forward casts every parameter once, inside the module that DistributedDataParallel wraps. Autocast,
which casts for each operation, cannot be used: the loss (`pretraining/model/loss.py`) writes into preallocated memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.dims import build_dims
from pretraining.distributed.grad_norm import clip_gradients, gradient_norm, local_gradients
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.model.init import initialize_parameters
from pretraining.optim.registry import build_optimizer
from pretraining.train.build import build_model
from scripts.benchmark.common import batches_in_memory, initial_model, join
from scripts.benchmark.race import Turn, parse_race, race

Gradients = Callable[[], list[torch.Tensor]]
"""Returns this process's part of the step's gradients, after the reduction over all processes."""
BeforeMicroBatch = Callable[[bool], AbstractContextManager[None]]
"""Takes whether a micro-batch is the last of its step; returns a context for its forward and backward."""


class InComputeDtype(nn.Module):
    """A module that computes with copies of parameters in another dtype; gradients have the parameters' dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(self, *inputs: Any) -> Any:
        copies = {name: parameter.to(self._dtype) for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, copies, inputs)


def project(config: TrainConfig, turn: Turn) -> None:
    with join() as processes:
        ranks, dims = processes.world_size, build_dims(config.parallel, processes)
        shape = resolve_shape(config.model)
        model = build_model(shape, config, dims, processes.device)
        initialize_parameters(model.parameters, shape, config.run.seed, processes.device)
        shard_group = dims.group("shard")

        def before_micro_batch(is_last: bool) -> AbstractContextManager[None]:
            model.next_backward(is_last)
            return nullcontext()

        def gradients() -> list[torch.Tensor]:
            model.finish_gradients()
            return local_gradients(model.parameters.values())

        # The project sums gradients over ranks.
        contender = Contender(model.module, model.parameters, before_micro_batch, gradients, shard_group, 1 / ranks)
        train(config, turn, processes, contender)


def data_parallel(config: TrainConfig, turn: Turn) -> None:
    with join() as processes:
        llama, device = initial_model(config), processes.device
        dtype = compute_dtype(config.parallel, device)
        wrapped = DistributedDataParallel(
            llama if dtype == torch.float32 else InComputeDtype(llama, dtype),
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # without a copy of all gradients
        )

        def before_micro_batch(is_last: bool) -> AbstractContextManager[None]:
            return nullcontext() if is_last else wrapped.no_sync()

        parameters = dict(llama.named_parameters())
        alone = dist.new_group([processes.rank], use_local_synchronization=True)
        # DistributedDataParallel averages gradients over ranks.
        contender = Contender(
            module=wrapped,
            parameters=parameters,
            before_micro_batch=before_micro_batch,
            gradients=lambda: local_gradients(parameters.values()),
            shard_group=alone,
            loss_share=1.0,
        )
        train(config, turn, processes, contender)


@dataclass(frozen=True)
class Contender:
    """A model that is distributed over processes.

    Attributes:
        parameters: trained parameters.
        before_micro_batch: prepares the next micro-batch.
        shard_group: processes that hold the shards of one copy of the gradient.
        loss_share: factor of a rank's mean loss before backward.
    """

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    before_micro_batch: BeforeMicroBatch
    gradients: Gradients
    shard_group: dist.ProcessGroup | None
    loss_share: float


def train(config: TrainConfig, turn: Turn, processes: Processes, contender: Contender) -> None:
    """Train in a bare loop."""
    device = processes.device
    optimizer = build_optimizer(contender.parameters, config.optimizer)
    assert contender.shard_group is not None
    report_steps = int(config.report.report_interval.amount)
    reported: float | None = None
    losses = torch.zeros((), device=device)
    steps = batches_in_memory(config, resolve_shape(config.model), processes.rank, processes.world_size)
    for number, step in enumerate(steps, start=1):
        turn.before_step(reported)
        for index, micro_batch in enumerate(step):
            with contender.before_micro_batch(index == len(step) - 1):
                inputs = micro_batch.to(device, non_blocking=True).model_inputs()
                loss_sum, valid_tokens, *_ = contender.module(*inputs)
                loss = loss_sum / (valid_tokens * len(step))  # dummy rows have equal numbers of valid tokens
                (loss * contender.loss_share).backward()
            losses += loss.detach()
        gradients = contender.gradients()
        norm = gradient_norm(gradients, contender.shard_group)
        clip_gradients(gradients, norm, config.optimizer.grad_clip_thresh)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % report_steps == 0:
            dist.all_reduce(losses)
            reported = losses.item() / (report_steps * processes.world_size)
            losses.zero_()


if __name__ == "__main__":
    flags, settings = parse_race("The project's ddp against DistributedDataParallel.", processes=2)
    contenders = {"project": project, "DistributedDataParallel": data_parallel}
    race(contenders, ["sharding_strategy=ddp", *settings], flags)
