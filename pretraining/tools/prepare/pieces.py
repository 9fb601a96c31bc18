"""What every reader hands on: documents, the long ones in pieces.

A text longer than half a million characters comes in several pieces, so that one of any size passes through a bounded
amount of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PIECE_CHARACTERS = 1 << 19
"""Longest text handed on at once; a longer document is cut."""

# Where a cut changes no token: byte-level BPE splits text into words first, and none of the usual rules (GPT-2, cl100k,
# Llama 3) has a word that goes on from a letter or digit into white space, or that looks back.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=\s)")
_CUT_SEARCH_CHARACTERS = 1 << 16


class Piece(NamedTuple):
    """A document, or a part of one.

    Attributes:
        content: text, at most `PIECE_CHARACTERS` characters; or a whole document's token ids, [T] of any integer type.
        ends_document: whether the next piece begins another document.
        bytes_read: bytes of the input on disk that were read for it.
        place: where the document is, for messages.
    """

    content: str | np.ndarray
    ends_document: bool
    bytes_read: int
    place: str


def cut_text(text: str) -> Iterator[tuple[str, bool]]:
    """A whole document's text in pieces, and whether each is the last; an empty text is one empty piece."""
    while len(text) > PIECE_CHARACTERS:
        head, text = cut_once(text)
        yield head, False
    yield text, True


def cut_once(text: str) -> tuple[str, str]:
    """A text that is longer than a piece as its first piece, ending where no word goes across, and the rest."""
    start = max(0, PIECE_CHARACTERS - _CUT_SEARCH_CHARACTERS)
    cuts = [match.start() for match in _SAFE_CUT.finditer(text[:PIECE_CHARACTERS], start)]
    cut = cuts[-1] if cuts else PIECE_CHARACTERS
    return text[:cut], text[cut:]
