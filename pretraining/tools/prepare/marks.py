"""Names of special tokens in texts, such as `<|im_start|>`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from pretraining.data.tokenizer import Tokenizer
from pretraining.tools.prepare.documents import Document


class Marks:
    """The names of the special tokens of a tokenizer, to search for in texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = [name for name in tokenizer.special_names if name]
        self._longest = max(map(len, names), default=0)
        # An expression per first character: expressions with a common beginning are searched ten times as fast.
        by_first = groupby(sorted(names, key=lambda name: (name[0], -len(name))), lambda name: name[0])
        self._patterns = [re.compile("|".join(map(re.escape, group))) for _, group in by_first]

    def find(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of the texts that hold a name."""
        searches = [pattern.search for pattern in self._patterns]
        return sorted({index for search in searches for index, text in enumerate(texts) if search(text)})

    def keep_whole(self, pieces: Iterable[Document]) -> Iterator[Document]:
        """Yield the pieces of documents, with no name cut in two: its beginning moves to the next piece."""
        held: Document | None = None
        for piece in pieces:
            if held is not None and isinstance(held.content, str) and isinstance(piece.content, str):
                begin = self._cut_name(held.content[-self._longest :], piece.content[: self._longest])
                piece = piece._replace(content=held.content[len(held.content) - begin :] + piece.content)
                yield held._replace(content=held.content[: len(held.content) - begin])
            held = None if piece.is_last_part else piece
            if held is None:
                yield piece

    def _cut_name(self, before: str, after: str) -> int:
        """Return how many characters of a name are before a cut; 0 if the cut goes through none."""
        found = (match for pattern in self._patterns for match in pattern.finditer(before + after))
        return max(
            (len(before) - match.start() for match in found if match.start() < len(before) < match.end()), default=0
        )
