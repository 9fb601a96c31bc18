"""The batches that the loader gives to a training step.

A `StepBatch` is one rank's share of a global batch, cut into micro-batches of equal shape. Tokens are copied to the
device as uint16 or int32; the device derives inputs, labels and positions. Row lengths and document starts stay on
the host, which therefore never waits for the device.

With context parallelism, every rank of a group has the same rows, and derives its part of the inputs from them.

Shapes: B rows, S sequence, T = S + 1, N pieces of documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from pretraining.config.training import IGNORED_LABEL
from pretraining.context_group import ContextGroup, SharedRows


class ModelInputs(NamedTuple):
    """Arguments of the model, in its order.

    Attributes:
        labels_BS: [B, S] int64, the next token, or `IGNORED_LABEL`.
        positions_BS: [B, S] int64, position of each token in its piece of a document; None = in its row.
        document_lengths: tokens of each piece of a document in the flattened [B * S] tokens, on the host; no piece
            crosses rows. None = each row is one document.
        shared_rows: with context parallelism, the whole rows; the other values are this rank's part of them, with
            S / C tokens per row. None = rows are whole.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor | None = None
    document_lengths: tuple[int, ...] | None = None
    shared_rows: SharedRows | None = None

    @property
    def columns_S(self) -> torch.Tensor:
        """Place of each column in its row: 0 .. S-1, or the places of this rank's part."""
        if self.shared_rows is None:
            return torch.arange(self.tokens_BS.size(1), device=self.tokens_BS.device)
        places = torch.arange(self.shared_rows.length, device=self.tokens_BS.device)
        return _own_chunks(places, self.shared_rows.group)

    @property
    def attention_span(self) -> float:
        """Length of a token's document in the whole row, averaged over tokens; S if each row is one document."""
        lengths = self.document_lengths if self.shared_rows is None else self.shared_rows.document_lengths
        if lengths is None:
            return float(self.tokens_BS.size(1))
        array = np.array(lengths, dtype=np.float64)
        return float(array @ array / array.sum())

    def part_of(self, group: ContextGroup) -> ModelInputs:
        """Return a rank's part of these whole rows."""
        rows, length = self.tokens_BS.shape
        positions_BS = self.positions_BS
        if positions_BS is None:
            positions_BS = torch.arange(length, device=self.tokens_BS.device).expand(rows, -1)
        shared = SharedRows(group, length, self.document_lengths or (length,) * rows)
        tokens_BS, labels_BS, positions_BS = (
            _own_chunks(values, group) for values in (self.tokens_BS, self.labels_BS, positions_BS)
        )
        lengths = tuple(piece.queries.stop - piece.queries.start for piece in shared.pieces)
        return ModelInputs(tokens_BS, labels_BS, positions_BS, lengths, shared)


def _own_chunks(values: torch.Tensor, group: ContextGroup) -> torch.Tensor:
    """Return this rank's chunks of values of whole rows, [..., S] -> [..., S / C]."""
    return torch.cat([values[..., chunk] for chunk in group.chunks(values.size(-1))], -1)


@dataclass
class MicroBatch:
    """Sequences of one forward pass.

    Attributes:
        tokens_BT: [B, S + 1] uint16 or int32; the last token of a row is only a label.
        lengths_B: [B] int32 on the host, tokens of each row before its padding; None = no padding.
        document_starts: [N] int32 on the host, ascending positions in the flattened [B * (S + 1)] tokens at which a
            row, a piece of a document or padding begins; None = no document mask.
        datasets_B: [B] int64, position of each row's dataset in `StepBatch.datasets`, arbitrary for padding rows;
            None = all rows are of the first.
        unreadable_B: [B] bool on the host, rows that this process could not read; None = a row that it cannot read
            stops the run.
        group: ranks that have the same rows, and compute a part each; None = only this rank has them.
    """

    tokens_BT: torch.Tensor
    lengths_B: torch.Tensor | None = None
    document_starts: torch.Tensor | None = None
    datasets_B: torch.Tensor | None = None
    unreadable_B: torch.Tensor | None = None
    group: ContextGroup | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Copy the tokens to a device. With `non_blocking`, a copy from pinned memory overlaps computation."""
        return replace(self, tokens_BT=self.tokens_BT.to(device, non_blocking=non_blocking))

    def model_inputs(self) -> ModelInputs:
        """Derive the model's arguments on the tokens' device, without waiting for it.

        Labels in padding are ignored. With a document mask, the first token of a piece is no label, and positions
        start at 0 in every piece, padding included. A group gets this rank's part of the rows; the call is then
        collective if `unreadable_B` is given.
        """
        inputs = self._whole_inputs()
        if self.group is None:
            return inputs
        if self.unreadable_B is not None:
            # A row that one rank cannot read is lost for all: the others would attend to wrong keys.
            lost_B = self.group.any(send(self.unreadable_B, inputs.labels_BS.device))
            inputs.labels_BS.masked_fill_(lost_B[:, None], IGNORED_LABEL)
        return inputs.part_of(self.group)

    def _whole_inputs(self) -> ModelInputs:
        tokens_BS = self.tokens_BT[:, :-1].to(torch.int64)
        labels_BS = self.tokens_BT[:, 1:].to(torch.int64)
        if self.lengths_B is not None:
            positions_S = torch.arange(1, self.tokens_BT.size(1), device=labels_BS.device)  # of labels in their rows
            labels_BS.masked_fill_(positions_S >= send(self.lengths_B, labels_BS.device)[:, None], IGNORED_LABEL)
        if self.document_starts is None:
            return ModelInputs(tokens_BS, labels_BS)

        rows, length = tokens_BS.shape
        starts = self.document_starts.to(torch.int64)
        positions = starts % (length + 1)  # in their rows
        begins = starts - starts // (length + 1)  # in the flattened inputs: each row has S + 1 tokens, but S inputs
        crossing = begins[positions > 0] - 1  # labels that are the first token of the next piece
        labels_BS.view(-1).index_fill_(0, send(crossing, labels_BS.device), IGNORED_LABEL)
        begins = begins[positions < length]  # a piece that starts at a row's last token has no inputs
        lengths = torch.diff(begins, append=torch.tensor([rows * length]))
        positions_BS = _count_from_zero(begins, lengths, rows * length, tokens_BS.device).view(rows, length)
        return ModelInputs(tokens_BS, labels_BS, positions_BS, tuple(lengths.tolist()))


def _count_from_zero(begins: torch.Tensor, lengths: torch.Tensor, total: int, device: torch.device) -> torch.Tensor:
    """Return the position of each token in its piece, [total] int64 on the device; pieces lie end to end."""
    begins, lengths = send(torch.stack((begins, lengths)), device)
    # Without `output_size`, the host would wait for the device.
    return torch.arange(total, device=device) - torch.repeat_interleave(begins, lengths, output_size=total)


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host to a device through pinned memory, without waiting."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


@dataclass
class StepBatch:
    """One rank's share of the global batch of a step.

    Attributes:
        step: steps before this one.
        first_sample: global index of the step's first sample.
        datasets: names.
    """

    step: int
    first_sample: int
    micro_batches: list[MicroBatch]
    datasets: tuple[str, ...] = ()
