"""Context parallelism: a rank computes a part of each row, and attends to tokens of other ranks.

C neighboring ranks share the rows of a batch. Each row of S tokens has 2·C chunks of equal length; the rank at place c
computes the chunks c and 2·C-1-c, so that all ranks attend to equally many earlier tokens:

    C = 2    | rank 0 | rank 1 | rank 1 | rank 0 |

Everything but attention treats a token by itself. In attention, a token needs the keys and values of its document up to
itself, which the ranks gather (`ContextGroup.gather`).

Shapes: B rows, S sequence, L = S / C tokens of a row on this rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows, as one of them sees the group.

    Attributes:
        rank: place of this rank in the group, c.
        size: C.
        gather: returns whole rows [..., S, K, E] of the parts [..., L, K, E] of all ranks; a differentiable collective
            call, whose gradient is the sum over the ranks.
        any: returns where a bool tensor is true on any rank of the group; a collective call.
    """

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]
    any: Callable[[Tensor], Tensor]

    def chunks(self, length: int) -> tuple[slice, slice]:
        """Return this rank's chunks of a row with a length that 2·C divides."""
        width = length // (2 * self.size)
        first, second = (place * width for place in (self.rank, 2 * self.size - 1 - self.rank))
        return slice(first, first + width), slice(second, second + width)


class Piece(NamedTuple):
    """Tokens of one document in a chunk, and the tokens that they attend to.

    Attributes:
        queries: place of the tokens in the rank's flattened [B * L] tokens.
        keys: place of the document's tokens, up to the last of the queries, in the flattened [B * S] tokens.
    """

    queries: slice
    keys: slice


@dataclass(frozen=True)
class SharedRows:
    """The rows of a micro-batch of which a rank computes a part.

    Attributes:
        group: ranks that share the rows.
        length: S.
        document_lengths: tokens of the documents that lie end to end in the flattened [B * S] tokens; no document
            crosses rows.
    """

    group: ContextGroup
    length: int
    document_lengths: tuple[int, ...]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of documents in this rank's tokens, in their order."""
        return tuple(self._find_pieces())

    def _find_pieces(self) -> Iterator[Piece]:
        ends = list(accumulate(self.document_lengths))
        done = 0  # of this rank's tokens
        for row in range(0, ends[-1], self.length):
            for chunk in self.group.chunks(self.length):
                position, end = row + chunk.start, row + chunk.stop
                while position < end:
                    document = bisect_right(ends, position)
                    stop = min(end, ends[document])
                    keys = slice(ends[document] - self.document_lengths[document], stop)
                    yield Piece(slice(done, done + stop - position), keys)
                    done, position = done + stop - position, stop
