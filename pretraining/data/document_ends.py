"""What becomes of documents at their ends, before anything else sees them.

    stored tokens --strip_tokens: taken off both ends--> --min_length: of too few, none are left--> kept tokens
    kept tokens, if any --bos_token, sep_token: virtual where they are not there already--> the document as trained

Nothing is written: what is kept is a range of what is stored, and virtual tokens are flags in the index. Only the ends
of documents are read, those of all the documents of a file together.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pretraining.data.arrow import DocumentLayout
from pretraining.data.index import DOCUMENT, VIRTUAL_BOS, VIRTUAL_SEP, IndexSettings

_LOOKED_AT_ONCE = 1 << 20


def documents_as_trained(layout: DocumentLayout, settings: IndexSettings) -> np.ndarray:
    """The documents of a file as the index has them, [n] `DOCUMENT`, but for the split that they belong to.

    Args:
        layout: where they are stored.
        settings: which tokens are stripped and which virtual ones are put around the rest.
    """
    tokens, begins = layout.tokens, layout.offsets // layout.width
    begins, ends = _strip(tokens, begins, begins + layout.lengths, settings.strip_tokens)
    kept = np.flatnonzero(ends - begins >= max(settings.min_length, 1))
    documents = np.zeros(len(begins), dtype=DOCUMENT)
    documents["offset"], documents["tokens"][kept] = begins * layout.width, (ends - begins)[kept]
    for token, places, flag in (
        (settings.bos_token, begins, VIRTUAL_BOS),
        (settings.sep_token, ends - 1, VIRTUAL_SEP),
    ):
        if token is not None:
            documents["flags"][kept[~_is_any_of(tokens[places[kept]], [token])]] |= flag
    return documents


def _strip(
    tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray, strip_tokens: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Take the tokens of a set off both ends of every document, however many there are.

    Args:
        tokens: of a file.
        begins: [n] int64, place in `tokens` of each document's first token.
        ends: [n] int64, one past its last.
        strip_tokens: the set.

    Returns:
        begins and ends of what is left.
    """
    if not strip_tokens:
        return begins, ends
    begins = begins + _run_lengths(tokens, begins, 1, ends - begins, strip_tokens)
    return begins, ends - _run_lengths(tokens, ends - 1, -1, ends - begins, strip_tokens)


def _run_lengths(
    tokens: np.ndarray, firsts: np.ndarray, direction: int, limits: np.ndarray, wanted: Collection[int]
) -> np.ndarray:
    """How many wanted tokens follow each other from `firsts` in a direction, at most `limits`, [n] int64.

    All documents are looked at together: one token deep, then two more, four more, ... where they still go on.
    """
    runs = np.zeros(len(firsts), dtype=np.int64)
    going_on, depth = np.flatnonzero(limits), 1
    while len(going_on):
        still = []
        size = _LOOKED_AT_ONCE // depth
        for some in (going_on[begin : begin + size] for begin in range(0, len(going_on), size)):
            steps = runs[some, None] + np.arange(depth)  # some depth
            inside = steps < limits[some, None]
            places = firsts[some, None] + direction * np.where(inside, steps, 0)
            is_wanted = _is_any_of(tokens[places], wanted) & inside
            found = np.where(is_wanted.all(axis=1), depth, is_wanted.argmin(axis=1))
            runs[some] += found
            still.append(some[found == depth])
        going_on, depth = np.concatenate(still), min(2 * depth, _LOOKED_AT_ONCE)
    return runs


def _is_any_of(tokens: np.ndarray, wanted: Collection[int]) -> np.ndarray:
    """Which tokens are among the wanted ones, bool; those that the type of the tokens cannot hold are none of them."""
    found = np.zeros(tokens.shape, dtype=bool)
    for token in wanted:
        if token <= np.iinfo(tokens.dtype).max:
            found |= tokens == token
    return found
