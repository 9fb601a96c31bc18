"""Text that a tokenizer cannot encode: it becomes the unknown token, or no token at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pretraining.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class LossCounter:
    """A counter of what a tokenizer cannot encode.

    Attributes:
        name: what it counts, as in `Counts`.
        count: takes N texts, their ids [T], and the numbers of their ids [N]; returns the losses of each text [N].
    """

    name: Literal["unknown_tokens", "dropped_characters"]
    count: Callable[[Sequence[str], np.ndarray, np.ndarray], np.ndarray]


def loss_counter(tokenizer: Tokenizer) -> LossCounter | None:
    """Return a counter of unknown tokens, or of characters without a token; None if any text is encoded."""
    if tokenizer.encodes_all:
        return None
    unknown = tokenizer.unknown_token
    if unknown is None:
        return _dropped_characters(tokenizer)

    def count_unknown(texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        totals, ends = np.cumsum(np.append(0, ids == unknown)), np.cumsum(lengths)
        losses: np.ndarray = totals[ends] - totals[ends - lengths]
        return losses

    return LossCounter("unknown_tokens", count_unknown)


def _dropped_characters(tokenizer: Tokenizer) -> LossCounter:
    is_dropped: dict[str, bool] = {}

    def count_dropped(texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        found = np.zeros(len(texts), np.int64)
        for index, text in enumerate(texts):
            characters = set(text)
            for character in characters.difference(is_dropped):
                is_dropped[character] = tokenizer.drops(character)
            if any(map(is_dropped.__getitem__, characters)):
                found[index] = sum(map(is_dropped.__getitem__, text))
        return found

    return LossCounter("dropped_characters", count_dropped)
