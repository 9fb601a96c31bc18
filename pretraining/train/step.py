"""One optimizer step.

Every token has the same weight: the sum of losses is divided by the number of valid tokens of the *global* batch, and
gradients are summed over micro-batches and ranks. So the cut of a batch into micro-batches and ranks changes only the
floating-point order.

The host never waits for the device here. The device itself decides whether to skip an update, with the same result on
all ranks, and a skipped update leaves parameters and optimizer state unchanged. It skips non-finite gradients, which a
non-finite loss or an overflow of the scaled float16 loss produces, and loss spikes if a `SpikeDetector` is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import StepBatch
from pretraining.distributed.grad_norm import clip_gradients, gradient_norm, local_gradients
from pretraining.distributed.host_sync import wait_for
from pretraining.distributed.loss_scaler import LossScaler
from pretraining.distributed.parallelize import ParallelModel
from pretraining.distributed.processes import Activity
from pretraining.observability.block_norms import BlockNorms
from pretraining.observability.collector import Collector
from pretraining.observability.step_outcome import StepOutcome
from pretraining.optim.optimizer import update
from pretraining.optim.schedules import LearningRate
from pretraining.train.stability import SpikeDetector


@dataclass(frozen=True)
class StepContext:
    """Objects that every step uses.

    Attributes:
        model: parallel model; its module returns the `HeadLoss` of a micro-batch's `ModelInputs`.
        grad_clip_thresh: largest gradient norm; 0 = no clipping.
        shard_group: ranks that hold the shards of one gradient.
        spikes: None = only non-finite updates are skipped.
        scaler: for float16; None = no scaling.
        collector: gets the outputs of each micro-batch.
        activity: progress marker for the watchdog, updated at each micro-batch.
        norms: norms by block; None = they are not measured.
    """

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    grad_clip_thresh: float
    shard_group: dist.ProcessGroup
    device: torch.device
    collector: Collector
    spikes: SpikeDetector | None = None
    scaler: LossScaler | None = None
    activity: Activity = field(default_factory=Activity)
    norms: BlockNorms | None = None


def train_step(context: StepContext, batch: StepBatch, step: int) -> StepOutcome:
    """Train on one global batch; a collective call.

    Args:
        batch: this rank's micro-batches of the global batch.
        step: updates done before this one.
    """
    micro_batches = [micro_batch.to(context.device, non_blocking=True) for micro_batch in batch.micro_batches]
    inputs = [micro_batch.model_inputs() for micro_batch in micro_batches]
    valid_tokens = torch.stack([(each.labels_BS != IGNORED_LABEL).sum() for each in inputs]).sum()
    # A single process skips the all-reduce, which would wake a gloo thread beside the computing ones.
    token_count = dist.all_reduce(valid_tokens, async_op=True) if dist.get_world_size() > 1 else None
    loss_sum = torch.zeros((), dtype=torch.float32, device=context.device)
    scale = 1.0 if context.scaler is None else context.scaler.scale
    norms = context.norms if context.norms is not None and context.norms.begin(step) else None
    for index, micro_batch in enumerate(context.activity.watch(micro_batches)):
        context.model.next_backward(is_last=index == len(micro_batches) - 1)
        if norms is not None:
            norms.watch(inputs[index].labels_BS)
        outputs = context.model.module(*inputs[index])
        context.collector.add(outputs, inputs[index], micro_batch)
        if token_count is not None and index == 0:
            wait_for(token_count)  # it overlaps the first forward
        # The gradient of the mean over the global batch is 1 / valid tokens. A non-finite loss adds NaN to it, which
        # the backward pass spreads to the gradients, so that every rank skips the update.
        outputs.objective_sum.backward(scale / valid_tokens.clamp(min=1) + 0.0 * outputs.objective_sum.detach())
        loss_sum += outputs.objective_sum.detach() - outputs.z_loss_sum
    context.model.finish_gradients()
    if norms is not None:
        norms.take_gradients(scale)
    gradients = local_gradients(context.model.parameters.values())
    norm = gradient_norm(gradients, context.shard_group) / scale
    clip_gradients(gradients, norm, context.grad_clip_thresh, scale)
    skipped = ~torch.isfinite(norm)
    rescaled = None if context.scaler is None else context.scaler.update(skipped)
    verdict = None
    if context.spikes is not None:
        verdict = context.spikes.judge(loss_sum, valid_tokens)
        skipped = skipped | verdict.is_spike
        context.spikes.remember(verdict.loss, skipped)
    learning_rate = context.learning_rate.apply(context.optimizer, step)
    update(context.optimizer, skipped)
    if norms is not None:
        norms.finish()
    context.optimizer.zero_grad(set_to_none=True)
    return StepOutcome(loss_sum, valid_tokens, norm, skipped, learning_rate, verdict, rescaled)
