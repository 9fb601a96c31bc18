"""A slow and simple oracle of packing: bins are lists, and each item checks every bin."""

from __future__ import annotations

from collections.abc import Sequence

from pretraining.config.training import Packing

Piece = tuple[int, int, int]  # document, first token, tokens


def pieces_of(document: int, length: int, seq_length: int) -> list[Piece]:
    """A document as one item, or cut into items that overlap by one token."""
    if length <= seq_length + 1:
        return [(document, 0, length)] if length else []
    starts = range(0, length - 1, seq_length)  # a piece without a label is dropped
    return [(document, start, min(seq_length + 1, length - start)) for start in starts]


def pack(lengths: Sequence[int], seq_length: int, packing: Packing) -> list[list[Piece]]:
    """The bins of a block in order, each with its items in order."""
    capacity = seq_length + 1
    items = [piece for document, length in enumerate(lengths) for piece in pieces_of(document, length, seq_length)]
    bins = [[item] for item in items if item[2] == capacity]
    partial = [item for item in items if item[2] < capacity]
    if packing == "best_fit":
        partial.sort(key=lambda item: -item[2])
    shared: list[list[Piece]] = []
    for item in partial:
        rooms = [capacity - sum(size for _, _, size in items) for items in shared]
        fitting = [number for number, room in enumerate(rooms) if room >= item[2]]
        if packing == "greedy":
            fitting = [number for number in fitting if number == len(shared) - 1]
        if packing == "best_fit":
            fitting.sort(key=lambda number: rooms[number])
        if fitting:
            shared[fitting[0]].append(item)
        else:
            shared.append([item])
    return sorted(sorted(items) for items in bins + shared)
