"""What the loader hands to a training step.

A `StepBatch` is one rank's share of a global batch, already cut into micro-batches of equal shape. Tokens travel to the
device in the narrow type that they were read in; inputs and labels are widened and shifted there, which is cheaper than
any copy that the host would make.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

IGNORED_LABEL = -100
"""Label of a position that adds nothing to the loss."""


@dataclass
class MicroBatch:
    """Sequences of one forward pass.

    Attributes:
        tokens_BT: [B, S + 1] uint16 or int32; the last token of a row is only ever a label.
        lengths_B: [B] int32, tokens of each row that are real; what follows is padding, without labels. None = all.
        document_starts: [N] int32, ascending: places in the flattened [B * (S + 1)] tokens at which a piece of a
            document begins. Every row's first place is one of them, and so is the place where a row's padding begins.
            None = documents are not told apart.
    """

    tokens_BT: torch.Tensor
    lengths_B: torch.Tensor | None = None
    document_starts: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Copy to a device; `non_blocking` lets a copy from pinned memory overlap with computation."""
        return replace(self, tokens_BT=self.tokens_BT.to(device, non_blocking=non_blocking))

    def inputs_and_labels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Derive what the model takes, on the device that the tokens are on.

        Returns:
            tokens_BS and labels_BS, both [B, S] int64: `labels[:, i]` is the token after `tokens[:, i]`, or
            `IGNORED_LABEL` in padding.
        """
        tokens_BS = self.tokens_BT[:, :-1].to(torch.int64)
        labels_BS = self.tokens_BT[:, 1:].to(torch.int64)
        if self.lengths_B is not None:
            places_T = torch.arange(1, self.tokens_BT.size(1), device=labels_BS.device)
            labels_BS[places_T >= self.lengths_B.to(labels_BS.device)[:, None]] = IGNORED_LABEL
        return tokens_BS, labels_BS


@dataclass
class StepBatch:
    """One rank's share of the global batch of a step.

    Attributes:
        step: number of the step that trains on it, from 0.
        first_sample: global index of the batch's first sample; the batch is the next ones of global batch size that
            are not skipped.
        micro_batches: as many as the plan accumulates, in the order in which they are computed.
    """

    step: int
    first_sample: int
    micro_batches: list[MicroBatch]
