"""Tokens/s of `--sharding_strategy=ddp`, which is fully_shard on a mesh of (W, 1), against DistributedDataParallel.

    python -m scripts.benchmark.compare.against_ddp
    python -m scripts.benchmark.compare.against_ddp --processes=8 --model_variant=125m --seq_length=1024 --batch_size=16

Both wrap the same model class with the same weights, and train it in the same bare loop: the same micro-batches of each
rank, gradients exchanged in the last one of a step only, clipping, fused AdamW. The losses at the end show that the
work was the same.

In bfloat16 fully_shard computes with copies of the parameters and reduces gradients in float32. So does the other side
here: its forward casts every parameter once, inside what DistributedDataParallel wraps. Autocast, which would cast for
each operation, has no way into the loss (`pretraining/model/loss.py`), whose products write into memory that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.fsdp import MicroBatchSync, clip_gradients, local_gradients
from pretraining.distributed.mesh import build_mesh
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.optim.registry import build_optimizer
from pretraining.train.build import build_model
from scripts.benchmark.common import batches_in_memory, initial_model, join
from scripts.benchmark.race import Turn, parse_race, race

BeforeMicroBatch = Callable[[bool], AbstractContextManager[None]]
"""Told whether a micro-batch is the last of its step; returns a context for its forward and backward."""


class InComputeDtype(nn.Module):
    """Computes with copies of a model's parameters in another dtype; gradients arrive in that of the parameters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(self, *inputs: Any) -> Any:
        copies = {name: parameter.to(self._dtype) for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, copies, inputs)


def fully_sharded(config: TrainConfig, turn: Turn) -> None:
    with join() as processes:
        ranks = processes.world_size
        mesh = build_mesh(config.parallel, ranks, ranks, processes.device.type)
        model = build_model(resolve_shape(config.model), config, mesh, processes.device, initialize=True)
        sync = MicroBatchSync(model, mesh, config.parallel.sharding_strategy)

        def before_micro_batch(is_last: bool) -> AbstractContextManager[None]:
            sync.next_backward(is_last)
            return nullcontext()

        # It sums gradients over ranks.
        train(config, turn, processes, model, before_micro_batch, loss_share=1 / ranks)


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

        # It averages gradients over ranks.
        train(config, turn, processes, wrapped, before_micro_batch, loss_share=1.0)


def train(
    config: TrainConfig,
    turn: Turn,
    processes: Processes,
    model: nn.Module,
    before_micro_batch: BeforeMicroBatch,
    loss_share: float,
) -> None:
    """A bare loop.

    Args:
        config: the settings.
        turn: of the race.
        processes: this one among the others.
        model: wrapped.
        before_micro_batch: prepares the next one.
        loss_share: of a rank's mean loss in what it differentiates.
    """
    device = processes.device
    optimizer = build_optimizer(model, config.optimizer)
    parameters = list(model.parameters())
    report_steps = int(config.report.report_interval.amount)
    reported: float | None = None
    losses = torch.zeros((), device=device)
    steps = batches_in_memory(config, resolve_shape(config.model), processes.rank, processes.world_size)
    for number, step in enumerate(steps, start=1):
        turn.before_step(reported)
        for index, micro_batch in enumerate(step):
            with before_micro_batch(index == len(step) - 1):
                inputs = micro_batch.to(device, non_blocking=True).model_inputs()
                loss_sum, valid_tokens, _ = model(
                    inputs.tokens_BS, inputs.labels_BS, inputs.positions_BS, inputs.document_lengths
                )
                loss = loss_sum / (valid_tokens * len(step))  # made-up rows have as many valid tokens everywhere
                (loss * loss_share).backward()
            losses += loss.detach()
        gradients = local_gradients(parameters)  # whole ones: those of DTensors are clipped as fast as the others
        clip_gradients(gradients, torch.nn.utils.get_total_norm(gradients), config.optimizer.grad_clip_thresh)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % report_steps == 0:
            dist.all_reduce(losses)
            reported = losses.item() / (report_steps * processes.world_size)
            losses.zero_()


if __name__ == "__main__":
    flags, settings = parse_race("fully_shard on a mesh of (W, 1) against DistributedDataParallel.", processes=2)
    contenders = {"fully_shard, (W, 1)": fully_sharded, "DistributedDataParallel": data_parallel}
    race(contenders, [*settings, "sharding_strategy=ddp"], flags.rounds, flags.steps, flags.processes)
