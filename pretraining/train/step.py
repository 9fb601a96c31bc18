"""One optimizer step.

The loss of a token weighs the same wherever the token is: sums of losses are divided by the number of valid tokens of
the *global* batch, and gradients are summed over micro-batches and ranks. So how a batch is cut into micro-batches and
ranks changes floating-point order and nothing else.

The host never waits for the device here. What must not become an update is found on the device, the same on all ranks,
and the fused optimizer then leaves everything as it was: a gradient that is not finite, and with it a loss that is not,
and spikes of the loss where a detector is on. In float16 the loss is scaled; a scaled gradient that overflows is not
finite either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch.distributed as dist

from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import StepBatch
from pretraining.distributed.grad_norm import clip_gradients, gradient_norm, local_gradients
from pretraining.distributed.host_sync import wait_for
from pretraining.distributed.loss_scaler import LossScaler
from pretraining.distributed.parallelize import ParallelModel
from pretraining.distributed.processes import Activity
from pretraining.evaluation.scores import Scores
from pretraining.observability.custom_metrics import NO_METRICS, CustomMetrics, Sums
from pretraining.observability.step_outcome import StepOutcome
from pretraining.optim.optimizer import update
from pretraining.optim.schedules import LearningRate
from pretraining.train.spikes import SpikeDetector


@dataclass(frozen=True)
class StepContext:
    """What a step works with.

    Attributes:
        model: its module returns the `HeadLoss` of a micro-batch's `ModelInputs`.
        grad_clip_thresh: largest gradient norm; 0 = no clipping.
        shard_group: processes that hold the pieces of one copy of the gradient.
        spikes: judges each loss by those before; None = losses need only be finite.
        scaler: of the loss, in float16; None = it needs none.
        metrics: of the user's own.
        scores: what is measured of each token.
        activity: is told of each micro-batch.
    """

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    grad_clip_thresh: float
    shard_group: dist.ProcessGroup
    device: torch.device
    spikes: SpikeDetector | None = None
    scaler: LossScaler | None = None
    metrics: CustomMetrics = NO_METRICS
    scores: Scores = field(default_factory=Scores)
    activity: Activity = field(default_factory=Activity)


def train_step(context: StepContext, batch: StepBatch, step: int) -> StepOutcome:
    """Train on one global batch; a collective call.

    Args:
        batch: this rank's micro-batches of the global batch.
        step: updates done before this one.
    """
    micro_batches = [micro_batch.to(context.device, non_blocking=True) for micro_batch in batch.micro_batches]
    inputs = [micro_batch.model_inputs() for micro_batch in micro_batches]
    valid_tokens = torch.stack([(each.labels_BS != IGNORED_LABEL).sum() for each in inputs]).sum()
    # One process would only wake a thread of gloo's beside those that compute.
    counting = dist.all_reduce(valid_tokens, async_op=True) if dist.get_world_size() > 1 else None
    loss_sum, z_loss_sum, scores = (torch.zeros((), dtype=torch.float32, device=context.device) for _ in range(3))
    custom: Sums = {}
    scale = 1.0 if context.scaler is None else context.scaler.scale
    for index, micro_batch in enumerate(context.activity.watch(micro_batches)):
        context.model.next_backward(is_last=index == len(micro_batches) - 1)
        outputs = context.model.module(*inputs[index])
        context.metrics.add(custom, outputs, inputs[index])
        if counting is not None and index == 0:
            wait_for(counting)  # it was under way during the first forward
        # The gradient of the mean over the global batch is 1 / valid tokens. A loss that is not finite adds NaN to it,
        # which the backward pass spreads: no rank makes an update of it, whatever way it came about.
        outputs.objective_sum.backward(scale / valid_tokens.clamp(min=1) + 0.0 * outputs.objective_sum.detach())
        loss_sum += outputs.objective_sum.detach() - outputs.z_loss_sum
        z_loss_sum += outputs.z_loss_sum
        labels_BS = inputs[index].labels_BS
        scores = scores + context.scores.measure(outputs.tokens_BS2, labels_BS, micro_batch, len(batch.datasets))
    context.model.finish_gradients()
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
    context.optimizer.zero_grad(set_to_none=True)
    span = fmean(each.attention_span for each in inputs)
    return StepOutcome(
        loss_sum, z_loss_sum, valid_tokens, norm, skipped, learning_rate, span, scores, verdict, rescaled, custom
    )
