"""Text that a tokenizer cannot encode: it becomes the unknown token, or no token at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pretraining.data.tokenizer import Tokenizer

LossCounter = Callable[[Sequence[str], np.ndarray, np.ndarray], np.ndarray]
"""Takes N texts, their ids [T], and the numbers of their ids [N]; returns the losses of each text [N]."""


def loss_counter(tokenizer: Tokenizer) -> LossCounter | None:
    """Return a counter of unknown tokens, or of characters without a token; None if any text is encoded."""
    if tokenizer.encodes_all:
        return None
    unknown = tokenizer.unknown_token
    is_dropped: dict[str, bool] = {}

    def count_unknown(texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        totals, ends = np.cumsum(np.append(0, ids == unknown)), np.cumsum(lengths)
        return np.asarray(totals[ends] - totals[ends - lengths])

    def count_dropped(texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        losses = np.zeros(len(texts), np.int64)
        for index, text in enumerate(texts):
            characters = set(text)
            for character in characters.difference(is_dropped):
                is_dropped[character] = tokenizer.drops(character)
            if any(map(is_dropped.__getitem__, characters)):
                losses[index] = sum(map(is_dropped.__getitem__, text))
        return losses

    return count_dropped if unknown is None else count_unknown
