"""What `pretrain inspect` finds, and how people and programs are shown it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SAMPLES_COUNTED = 20_000
"""Samples of a dataset in which a summary counts documents one by one: a second or two."""

_IDS_SHOWN = 12
_CHARACTERS_SHOWN = 200


@dataclass(frozen=True)
class SpanPlace:
    """A piece of a document in a sample.

    Attributes:
        file: absolute path.
        row: of the document in the file.
        start: first token of the piece within the document as it is trained on: the token that `bos_token` puts in
            front counts, those that `strip_tokens` removes do not.
        length: tokens of the piece, with the separator that `sep_token` puts behind the document if it reaches there.
        ends_document: whether the piece goes to the document's end.
    """

    file: str
    row: int
    start: int
    length: int
    ends_document: bool


@dataclass(frozen=True)
class InspectedSlot:
    """A slot of a global batch.

    Attributes:
        step: from 1.
        slot: place in the global batch, which ranks share in contiguous pieces.
        sample_id: global index of its sample.
        dataset: that gives it.
        spans: in order; their lengths add up to S + 1, of which the last token is only ever a label, or to less where
            documents are packed. None where samples are made up.
        ids: the tokens of the spans; None where they were not asked for, or cannot be read.
        problem: why they cannot be read, where that quarantines the sample.
    """

    step: int
    slot: int
    sample_id: int
    dataset: str
    spans: tuple[SpanPlace, ...]
    ids: tuple[int, ...] | None
    problem: str | None = None

    def document(self) -> dict[str, Any]:
        """The JSON object of `--json`, an interface: fields are added, never renamed."""
        fields = asdict(self)
        for span in fields["spans"]:
            del span["ends_document"]
        for name in ("ids", "problem"):
            if fields[name] is None:
                del fields[name]
        return fields

    def describe(self, decode: Callable[[Sequence[int]], str] | None) -> Iterator[str]:
        """Lines for people: where each piece is and, where ids are known, the ends of it.

        Args:
            decode: ids to text; None = show ids.
        """
        yield f"slot {self.slot}  sample {self.sample_id}  dataset {self.dataset}"
        if self.problem is not None:
            yield f"  quarantined, no labels: {self.problem}"
        at = 0
        for span in self.spans:
            end = ", to its end" if span.ends_document else ""
            yield f"  {span.file}  row {span.row}  tokens {span.start}-{span.start + span.length - 1}{end}"
            if self.ids is not None:
                yield f"    {_content(self.ids[at : at + span.length], decode)}"
            at += span.length
        if not self.spans and self.ids is not None:
            yield f"    {_content(self.ids, decode)}"


@dataclass(frozen=True)
class DatasetSummary:
    """What a dataset gives to steps A to B.

    Attributes:
        dataset: name.
        asked: its weight as a fraction.
        realised: its fraction of the samples.
        samples: of it.
        tokens: of these, S a sample.
        padding_tokens: how many of them are padding: labels that are ignored, as the documents packed into a sample
            are shorter than it.
        fill: the fraction of tokens that are not padding; None where there is no sample.
        documents: that begin in these samples, once each pass.
        documents_are_exact: False where documents and padding were counted in the first `SAMPLES_COUNTED` samples and
            scaled.
        passes: over the dataset that are done before step A, and after step B; None where it has no end.
    """

    dataset: str
    asked: float
    realised: float
    samples: int
    tokens: int
    padding_tokens: int
    fill: float | None
    documents: int
    documents_are_exact: bool
    passes: tuple[float, float] | None


def describe_summaries(first: int, last: int, seq_length: int, summaries: Sequence[DatasetSummary]) -> list[str]:
    """A table with a line a dataset, and totals over it."""
    samples = sum(each.samples for each in summaries)
    table = [("dataset", "asked", "realised", "samples", "tokens", "padding", "fill", "documents", "passes")]
    table += [
        (
            each.dataset,
            f"{each.asked:.4%}",
            f"{each.realised:.4%}",
            f"{each.samples:,}",
            f"{each.tokens:,}",
            f"{'' if each.documents_are_exact else 'about '}{each.padding_tokens:,}",
            f"{each.fill:.2%}" if each.fill is not None else "",
            f"{'' if each.documents_are_exact else 'about '}{each.documents:,}",
            f"{each.passes[0]:.3f} to {each.passes[1]:.3f}" if each.passes else "",
        )
        for each in summaries
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in table
    ]
    return [f"steps {first:,} to {last:,}: {samples:,} samples, {samples * seq_length:,} tokens", *lines]


def _content(ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None) -> str:
    """Ids, or their text in quotes, the middle of long ones left out."""
    if decode is not None:
        text = decode(ids)
        if len(text) > _CHARACTERS_SHOWN:
            half = _CHARACTERS_SHOWN // 2
            return f"{_quoted(text[:half])} … {_quoted(text[-half:])}"
        return _quoted(text)
    if len(ids) > _IDS_SHOWN:
        half = _IDS_SHOWN // 2
        return f"{' '.join(map(str, ids[:half]))} … {' '.join(map(str, ids[-half:]))}"
    return " ".join(map(str, ids))


def _quoted(text: str) -> str:
    """On one line, whatever is in it."""
    return json.dumps(text, ensure_ascii=False)
