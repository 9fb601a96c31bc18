"""Next-token cross-entropy from hidden states, as sums, without the logits of all tokens at once.

    hidden states, head -> chunk by chunk:  logits -> losses, gradient of the logits -> gradients of both inputs

Logits are the largest tensor of a step: 8192 tokens with a vocabulary of 128 thousand take 4 GiB in float32, and a
plain cross-entropy holds them three times. But the gradient of a softmax needs no backward pass. So each chunk's logits
become their own gradient in place, which is multiplied into the gradients of hidden states and head. Backward only
scales these. No logits outlive their chunk, and nothing is computed twice.

Losses are sums: ranks and micro-batches have different numbers of valid tokens, and a mean of means would weigh tokens
unequally. The training step divides by the valid tokens of the global batch. Reports and evaluations get each token's
loss, and whether the label was the likeliest token.

Shapes: B batch, S sequence, N = B S tokens, n tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretraining.config.training import IGNORED_LABEL
from pretraining.estimate.memory import loss_chunk_tokens


class HeadLoss(NamedTuple):
    """The loss of a micro-batch. Only the objective has a gradient; all sums are 0 if all labels are ignored.

    Attributes:
        objective_sum: cross-entropy (nats) plus z-loss, summed over valid labels (float32 scalar).
        valid_tokens: number of valid labels (int64 scalar).
        z_loss_sum: z-loss in the objective (float32 scalar).
        tokens_BS2: per label, the cross-entropy and 1 for a top-1 hit, else 0 (float32 [B, S, 2]); 0 for ignored
            labels.
    """

    objective_sum: Tensor
    valid_tokens: Tensor
    z_loss_sum: Tensor
    tokens_BS2: Tensor


def head_loss(
    hidden_BSD: Tensor, head_VD: Tensor, labels_BS: Tensor, chunk_tokens: int | None = None, z_loss_weight: float = 0.0
) -> HeadLoss:
    """Return the summed negative log-likelihood of the labels under softmax(hidden head^T), plus z-loss.

    Matrix products use the inputs' dtype; softmax, losses, and the sum over chunks of the head's gradient use float32
    (float64 where inputs do).

    Args:
        hidden_BSD: output of the final norm, [B, S, D].
        head_VD: weight of the head, [V, D].
        labels_BS: int64 [B, S], next tokens, or `IGNORED_LABEL`.
        chunk_tokens: tokens per chunk; 0 = all; None = `loss_chunk_tokens`.
        z_loss_weight: adds weight x ln(Z)^2 per valid token, with Z the denominator of the softmax. It keeps logits
            from drifting (PaLM, Chowdhery et al. 2022, section 5).
    """
    hidden_ND, labels_N = hidden_BSD.flatten(0, 1), labels_BS.flatten()
    if chunk_tokens is None:
        chunk_tokens = loss_chunk_tokens(head_VD.device.type, head_VD.size(0))
    arguments = (hidden_ND, head_VD, labels_N, chunk_tokens or max(1, labels_N.numel()), z_loss_weight)
    if torch.is_grad_enabled():
        sums = _HeadLoss.apply(*arguments)  # type: ignore[no-untyped-call]  # torch lacks its type
    else:
        sums, _ = _sum_over_chunks(False, *arguments)
    objective_sum, z_loss_sum, tokens_N2 = sums
    tokens_BS2 = tokens_N2.view(*labels_BS.shape, 2)
    return HeadLoss(objective_sum, (labels_N != IGNORED_LABEL).sum(), z_loss_sum, tokens_BS2)


class _HeadLoss(torch.autograd.Function):
    """The loss as an autograd function whose forward pass computes the gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the sums of `_sum_over_chunks`, and save the gradients."""
        sums, gradients = _sum_over_chunks(True, *arguments)
        # Attributes of ctx would live as long as the loss: into the next micro-batch.
        ctx.save_for_backward(*gradients)
        ctx.input_dtype = arguments[0].dtype
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Scale by `above`: one over the valid tokens of the global batch, or NaN for a step to skip."""
        scaled = (
            torch.mul(gradient, above, out=torch.empty_like(gradient, dtype=ctx.input_dtype))
            for gradient in ctx.saved_tensors
        )
        return (*scaled, None, None, None)


def _sum_over_chunks(
    with_gradients: bool, hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor, chunk_tokens: int, z_loss_weight: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return (objective, z-loss, tokens_N2), and the objective's gradients by hidden states and head if requested."""
    sum_dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    objective_sum, z_loss_sum = (hidden_ND.new_zeros((), dtype=sum_dtype) for _ in range(2))
    tokens_N2 = hidden_ND.new_empty((len(labels_N), 2), dtype=sum_dtype)
    by_hidden_ND = torch.empty_like(hidden_ND) if with_gradients else hidden_ND
    by_head_VD: Tensor | None = None
    chunks = (each.split(chunk_tokens) for each in (hidden_ND, labels_N, by_hidden_ND, tokens_N2))
    for hidden_nD, labels_n, by_hidden_nD, tokens_n2 in zip(*chunks, strict=True):
        logits_nV = hidden_nD @ head_VD.T
        objective, z_loss = _take_loss(logits_nV, labels_n, z_loss_weight, with_gradients, tokens_n2)
        objective_sum += objective
        z_loss_sum += z_loss
        if with_gradients:
            torch.mm(logits_nV, head_VD, out=by_hidden_nD)  # `logits_nV` now holds the gradient
            by_head_VD = _add_product(by_head_VD, logits_nV.T, hidden_nD, sum_dtype)
    sums = (objective_sum, z_loss_sum, tokens_N2)
    return sums, () if by_head_VD is None else (by_hidden_ND, by_head_VD)


def _take_loss(
    logits_nV: Tensor, labels_n: Tensor, z_loss_weight: float, with_gradients: bool, tokens_n2: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's objective and its z-loss; write losses and hits into `tokens_n2`.

    If requested, overwrite the logits with their gradient. With p the softmax and y the label, the gradient of -ln p_y
    is p - [y], and the gradient of weight x ln(Z)^2 is 2 x weight x ln(Z) x p.
    """
    ignored_n1 = (labels_n == IGNORED_LABEL)[:, None]
    label_n1 = labels_n[:, None].masked_fill(ignored_n1, 0)
    label_logit_n1 = logits_nV.gather(1, label_n1)
    log_p_nV = torch.log_softmax(logits_nV, 1, dtype=torch.promote_types(logits_nV.dtype, torch.float32))
    label_log_p_n1 = log_p_nV.gather(1, label_n1)
    log_z_n1 = label_logit_n1 - label_log_p_n1
    z_loss = (z_loss_weight * log_z_n1.square()).masked_fill(ignored_n1, 0).sum()
    losses_n1 = -label_log_p_n1.masked_fill(ignored_n1, 0)
    objective = z_loss + losses_n1.sum()
    # This takes a tenth of argmax's time on a CPU. With several likeliest tokens, each is a hit.
    hits_n1 = (label_log_p_n1 >= log_p_nV.amax(1, keepdim=True)) & ~ignored_n1
    torch.cat((losses_n1, hits_n1), 1, out=tokens_n2)
    if with_gradients:
        scale_n1 = (1 + 2 * z_loss_weight * log_z_n1).masked_fill(ignored_n1, 0)
        torch.mul(log_p_nV.exp_(), scale_n1, out=logits_nV)
        of_label_n1 = label_log_p_n1.exp() * scale_n1 - (~ignored_n1).to(scale_n1.dtype)
        logits_nV.scatter_(1, label_n1, of_label_n1.to(logits_nV.dtype))
    return objective, z_loss


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, sum_dtype: torch.dtype) -> Tensor:
    """Add a product to the sum of earlier ones; a single product keeps its dtype."""
    if total is None:
        return left @ right
    if left.dtype == sum_dtype:
        return total.addmm_(left, right)
    return total.to(sum_dtype).add_(left @ right)
