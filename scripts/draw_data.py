"""Draws docs/pictures/data.svg: how documents become the batches of ranks.

    python scripts/draw_data.py > docs/pictures/data.svg

What is drawn is computed by the classes that training uses, over a made-up dataset that is small enough to be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from pretraining.config.batch_sizes import BatchSizes
from pretraining.data.sampling.mixture import Mixture, Phase
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import Spans, TokenStream, cut_shards, order_cache

SEQ_LENGTH = 10
SHARDS = 3
BLOCK_DOCUMENTS = 4
LENGTHS = (9, 4, 14, 6, 3, 11, 7, 5, 16, 4, 8, 10, 5, 13, 6, 9, 12, 3, 7, 8, 10, 5, 15, 6)
GLOBAL_BATCH = 8
RANKS = 2

WIDTH, LEFT, RIGHT = 1120, 178, 14
SCALE = (WIDTH - LEFT - RIGHT) / sum(LENGTHS)  # units a token
SHARD_COLORS = ("#4e79a7", "#f28e2b", "#59a14f")
CODE_COLOR = "#b8b4ad"
RANK_COLORS = ("#333333", "#9c2f2f")


class Documents:
    """The lengths of the made-up dataset, as an index gives them."""

    document_count = len(LENGTHS)
    block_documents = BLOCK_DOCUMENTS
    block_bounds = np.append(np.cumsum((0, *LENGTHS))[:-1:BLOCK_DOCUMENTS], sum(LENGTHS))

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Tokens of documents [begin, end)."""
        return np.array(LENGTHS[begin:end], dtype=np.int64)


@dataclass
class Canvas:
    """SVG elements, from top to bottom."""

    parts: list[str]
    y: float = 22

    def box(self, x: float, width: float, color: str, text: str = "", height: float = 26, opacity: float = 1) -> None:
        """A box at the present height, with a text in it."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{self.y:.1f}" width="{width:.1f}" height="{height}" fill="{color}" '
            f'fill-opacity="{opacity}" stroke="white"/>'
        )
        if text:
            self.text(x + width / 2, text, "middle", "white", y=self.y + height / 2 + 4)

    def text(
        self, x: float, text: str, anchor: str = "start", color: str = "#333", y: float | None = None, size: int = 12
    ) -> None:
        """A text at the present height."""
        at = self.y + 17 if y is None else y
        self.parts.append(
            f'<text x="{x:.1f}" y="{at:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">'
            f"{escape(text)}</text>"
        )

    def tick(self, x: float, color: str = "#222", height: float = 34) -> None:
        """A vertical line across the present row."""
        self.parts.append(
            f'<line x1="{x:.1f}" y1="{self.y - 4:.1f}" x2="{x:.1f}" y2="{self.y - 4 + height:.1f}" stroke="{color}" '
            'stroke-width="1.6"/>'
        )

    def title(self, title: str, note: str = "") -> None:
        """Names the row that comes, left of it."""
        self.text(8, title, size=13)
        if note:
            self.text(8, note, color="#777", y=self.y + 33, size=11)

    def svg(self) -> str:
        """The picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.y:.0f}" '
                'font-family="Helvetica, Arial, sans-serif">',
                f'<rect width="{WIDTH}" height="{self.y:.0f}" fill="white"/>',
                *self.parts,
                "</svg>",
            ]
        )


def draw() -> str:
    """The picture as SVG."""
    documents = Documents()
    shards = cut_shards(documents, SHARDS)
    stream = TokenStream(documents, shards, SEQ_LENGTH, (1, 2), order_cache())
    order = SampleOrder(shards.tokens, SEQ_LENGTH, (1, 2))
    canvas = Canvas([])
    _draw_documents(canvas, shards.documents)
    for shard in (0, 1):
        _draw_stream(canvas, stream, int(shards.tokens[shard]), shard)
    _draw_rounds(canvas, order)
    _draw_mixture(canvas, order)
    return canvas.svg()


def _draw_documents(canvas: Canvas, shard_documents: np.ndarray) -> None:
    canvas.title("documents of a dataset", "in canonical order")
    x = float(LEFT)
    for document, length in enumerate(LENGTHS):
        shard = int(np.searchsorted(shard_documents, document, side="right")) - 1
        canvas.box(x, length * SCALE, SHARD_COLORS[shard], str(document), opacity=_shade(document))
        if document and document == shard_documents[shard]:
            canvas.tick(x)
        x += length * SCALE
    canvas.y += 38
    bounds = np.cumsum((0, *LENGTHS))[shard_documents]
    for shard, (begin, end) in enumerate(pairwise(bounds.tolist())):
        middle = LEFT + (begin + end) / 2 * SCALE
        canvas.text(middle, f"logical shard {shard}: {end - begin} tokens", "middle", SHARD_COLORS[shard])
    canvas.y += 40


def _draw_stream(canvas: Canvas, stream: TokenStream, tokens: int, shard: int) -> None:
    """Two passes of a shard and the samples that are cut from them."""
    canvas.title(f"stream of shard {shard}", f"samples of S = {SEQ_LENGTH} tokens")
    x = float(LEFT)
    for document, length in _pieces(stream, tokens, shard):
        canvas.box(x, length * SCALE, SHARD_COLORS[shard], str(document), opacity=_shade(document))
        x += length * SCALE
    canvas.y += 30
    samples = 2 * tokens // SEQ_LENGTH
    for sample in range(samples + 1):
        at = LEFT + sample * SEQ_LENGTH * SCALE
        canvas.parts.append(f'<path d="M{at:.1f} {canvas.y:.1f} v9" stroke="#222"/>')
        if sample < samples:
            canvas.text(at + SEQ_LENGTH * SCALE / 2, f"{shard}.{sample}", "middle", y=canvas.y + 12, size=11)
    canvas.y -= 30
    canvas.tick(LEFT + tokens * SCALE, "#c00", 30)
    canvas.text(LEFT + tokens * SCALE, "next pass, another order", "middle", "#c00", y=canvas.y - 7, size=11)
    canvas.y += 66


def _pieces(stream: TokenStream, tokens: int, shard: int) -> Iterator[tuple[int, int]]:
    """Documents and their tokens over two passes; one that samples cut comes once."""
    count = 2 * tokens // SEQ_LENGTH + 1
    spans: Spans = stream.spans(np.full(count, shard), np.arange(count))
    left, waiting = 2 * tokens, None
    for row in range(count):
        taken = 0
        for span in range(int(spans.first_spans[row]), int(spans.first_spans[row + 1])):
            length = min(int(spans.lengths[span]), SEQ_LENGTH - taken, left)
            document, start = int(spans.documents[span]), int(spans.starts[span])
            taken, left = taken + length, left - length
            if waiting and waiting[0] == document and start > 0:
                waiting = (document, waiting[1] + length)
            elif length:
                if waiting:
                    yield waiting
                waiting = (document, length)
    if waiting:
        yield waiting


def _draw_rounds(canvas: Canvas, order: SampleOrder) -> None:
    canvas.title("samples of the dataset", "a round visits every shard")
    first = order.samples_before_pass(1)
    samples = first + 2 * SHARDS  # and a little of the next pass
    shards, numbers = order.samples(0, samples)
    width = (WIDTH - LEFT - RIGHT) / samples
    for at, (shard, number) in enumerate(zip(shards.tolist(), numbers.tolist(), strict=True)):
        x = LEFT + at * width
        canvas.box(x, width, SHARD_COLORS[shard], f"{shard}.{number}")
        if at == first:
            canvas.tick(x, "#c00")
        elif at % SHARDS == 0 and at < first:
            canvas.tick(x)
    canvas.y += 58


def _draw_mixture(canvas: Canvas, order: SampleOrder) -> None:
    """The first steps of a mixture with another dataset, and how ranks share one of them."""
    mixture = Mixture([Phase.first(GLOBAL_BATCH, {"code": 1, "web": 3})])
    steps = 3
    canvas.title("global samples", "this dataset 3 : another 1")
    width = (WIDTH - LEFT - RIGHT) / (steps * GLOBAL_BATCH)
    for step in range(steps):
        for place, (color, text, _) in enumerate(_slots(mixture, order, step)):
            canvas.box(LEFT + (step * GLOBAL_BATCH + place) * width, width, color, text)
        canvas.tick(LEFT + step * GLOBAL_BATCH * width)
        middle = LEFT + (step + 0.5) * GLOBAL_BATCH * width
        canvas.text(middle, f"step {step + 1}", "middle", y=canvas.y + 42)
    canvas.y += 74
    canvas.title("step 2, sorted", f"shared by {RANKS} ranks")
    slots = sorted(_slots(mixture, order, 1), key=lambda slot: slot[2])
    left = LEFT + GLOBAL_BATCH * width
    for place, (color, text, _) in enumerate(slots):
        canvas.box(left + place * width, width, color, text)
    plan = BatchSizes(GLOBAL_BATCH, GLOBAL_BATCH // RANKS, 1, RANKS)
    for rank in range(RANKS):
        begin, end = plan.share(rank)
        canvas.parts.append(
            f'<path d="M{left + begin * width + 2:.1f} {canvas.y + 34:.1f} H{left + end * width - 2:.1f}" '
            f'stroke="{RANK_COLORS[rank]}" stroke-width="3"/>'
        )
        canvas.text(left + (begin + end) / 2 * width, f"rank {rank}", "middle", RANK_COLORS[rank], y=canvas.y + 50)
    canvas.y += 66


def _slots(mixture: Mixture, order: SampleOrder, step: int) -> list[tuple[str, str, tuple[int, int]]]:
    """Color, text and sorting key of the samples of a step."""
    slots = []
    _, datasets, numbers = mixture.assign_step(step)
    for dataset, number in zip(datasets.tolist(), numbers.tolist(), strict=True):
        if mixture.names[dataset] == "code":
            slots.append((CODE_COLOR, "code", (number % SHARDS, dataset)))
            continue
        shards, within = order.samples(number, number + 1)
        slots.append((SHARD_COLORS[shards[0]], f"{shards[0]}.{within[0]}", (int(shards[0]), dataset)))
    return slots


def _shade(document: int) -> float:
    """Neighbours are told apart, blocks too."""
    return (1.0, 0.8)[document % 2] - 0.22 * (document // BLOCK_DOCUMENTS % 2)


if __name__ == "__main__":
    print(draw())
