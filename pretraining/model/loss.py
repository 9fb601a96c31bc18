"""Next-token cross-entropy as a sum and a count.

Not a mean: a global batch is spread over ranks and micro-batches with different numbers of valid tokens, and a mean of
their means would weigh tokens unequally. The training step divides by the valid tokens of the whole global batch.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100
"""Label of a token that is not learned from, such as padding; the convention of PyTorch and Hugging Face."""


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood of the labels, computed in float32 whatever the logits' dtype.

    Args:
        logits_BSV: [B, S, V].
        labels_BS: int64 [B, S], the token that follows each one, or `IGNORED_LABEL`.

    Returns:
        The sum in nats (float32 scalar) and the number of labels that are not ignored (int64 scalar). Where all are
        ignored both are 0, and the sum's gradient is zero, not NaN.
    """
    loss_sum = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return loss_sum, (labels_BS != IGNORED_LABEL).sum()
