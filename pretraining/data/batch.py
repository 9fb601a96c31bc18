"""What the loader hands to a training step.

A `StepBatch` is one rank's share of a global batch, cut into micro-batches of equal shape. Tokens travel to the device
in the narrow type that they were read in; inputs, labels and positions are derived from them there. How far rows are
filled and where documents begin stays on the host, so that it never waits for the device.

Shapes: B rows, S sequence, T = S + 1, N pieces of documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from pretraining.config.training import IGNORED_LABEL


class ModelInputs(NamedTuple):
    """What the model takes, in the order of its arguments.

    Attributes:
        labels_BS: [B, S] int64, the token after each one, or `IGNORED_LABEL`.
        positions_BS: [B, S] int64, each token's place in its piece of a document; None = in its row.
        document_lengths: on the host, tokens of each piece of a document in the flattened [B * S] tokens; none crosses
            from one row to the next. None = each row is one document.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor | None = None
    document_lengths: tuple[int, ...] | None = None

    @property
    def attention_span(self) -> float:
        """Tokens of the piece that a token is in, on average over tokens: S without pieces."""
        if self.document_lengths is None:
            return float(self.tokens_BS.size(1))
        lengths = np.array(self.document_lengths, dtype=np.float64)
        return float(lengths @ lengths / lengths.sum())


@dataclass
class MicroBatch:
    """Sequences of one forward pass.

    Attributes:
        tokens_BT: [B, S + 1] uint16 or int32; the last token of a row is only ever a label.
        lengths_B: on the host, [B] int32, tokens of each row before its padding; None = all.
        document_starts: on the host, [N] int32, ascending places in the flattened [B * (S + 1)] tokens at which a row,
            a piece of a document or a row's padding begins; None = documents are not told apart.
        datasets_B: [B] int64, which of its `StepBatch`'s datasets each row is of, any where a row is padding; None =
            all of the first.
    """

    tokens_BT: torch.Tensor
    lengths_B: torch.Tensor | None = None
    document_starts: torch.Tensor | None = None
    datasets_B: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Copy the tokens to a device; `non_blocking` lets a copy from pinned memory overlap with computation."""
        return replace(self, tokens_BT=self.tokens_BT.to(device, non_blocking=non_blocking))

    def model_inputs(self) -> ModelInputs:
        """Derive what the model takes, on the device that the tokens are on and without waiting for it.

        Labels are ignored in padding. Where documents are told apart, the first token of a piece is no label, and
        positions count from 0 in every piece, padding included.
        """
        tokens_BS = self.tokens_BT[:, :-1].to(torch.int64)
        labels_BS = self.tokens_BT[:, 1:].to(torch.int64)
        if self.lengths_B is not None:
            places_S = torch.arange(1, self.tokens_BT.size(1), device=labels_BS.device)  # of labels in their rows
            labels_BS.masked_fill_(places_S >= send(self.lengths_B, labels_BS.device)[:, None], IGNORED_LABEL)
        if self.document_starts is None:
            return ModelInputs(tokens_BS, labels_BS)

        rows, length = tokens_BS.shape
        starts = self.document_starts.to(torch.int64)
        places = starts % (length + 1)  # in their rows
        begins = starts - starts // (length + 1)  # among inputs: of each row above, S + 1 tokens make S inputs
        crossing = begins[places > 0] - 1  # the labels that are the first token of another document
        labels_BS.view(-1).index_fill_(0, send(crossing, labels_BS.device), IGNORED_LABEL)
        begins = begins[places < length]  # a piece that begins with a row's last token has no inputs there
        lengths = torch.diff(begins, append=torch.tensor([rows * length]))
        positions_BS = _count_from_zero(begins, lengths, rows * length, tokens_BS.device).view(rows, length)
        return ModelInputs(tokens_BS, labels_BS, positions_BS, tuple(lengths.tolist()))


def _count_from_zero(begins: torch.Tensor, lengths: torch.Tensor, total: int, device: torch.device) -> torch.Tensor:
    """Places of each token in its piece, [total] int64 on the device, of pieces that lie end to end."""
    begins, lengths = send(torch.stack((begins, lengths)), device)
    # The size is known here; otherwise the device would be asked for it.
    return torch.arange(total, device=device) - torch.repeat_interleave(begins, lengths, output_size=total)


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host without waiting for the device, which takes pinned memory."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


@dataclass
class StepBatch:
    """One rank's share of the global batch of a step.

    Steps count from 0; `first_sample` is the global index of the step's first sample; `datasets` are names.
    """

    step: int
    first_sample: int
    micro_batches: list[MicroBatch]
    datasets: tuple[str, ...] = ()
