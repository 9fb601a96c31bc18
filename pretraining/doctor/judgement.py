"""Who is slow: each number next to the median of the others of its kind. Arithmetic only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Who = TypeVar("Who")


@dataclass(frozen=True)
class Link:
    """Two ranks that exchange messages.

    Attributes:
        one, other: the ranks, the smaller one first.
        is_inside: whether both are on one machine.
    """

    one: int
    other: int
    is_inside: bool


def find_slow(rates: Mapping[Who, float], factor: float) -> dict[Who, float]:
    """Those whose rate is so many times lower than the median of the others, with how many times.

    Args:
        rates: the higher, the faster.
        factor: above 1.
    """
    found = {}
    for who, rate in rates.items():
        others = [value for other, value in rates.items() if other != who]
        if others and rate * factor <= (median := statistics.median(others)):
            found[who] = median / rate if rate > 0 else float("inf")
    return found


def find_slow_links(rates: Mapping[Link, float], factor: float) -> tuple[dict[int, float], dict[Link, float]]:
    """Ranks all of whose links of a kind are slow, and slow links of other ranks, with how many times.

    Links inside a machine are compared with each other, and so are those between machines.

    Args:
        rates: bandwidth of each link.
        factor: above 1.
    """
    ranks: dict[int, float] = {}
    links: dict[Link, float] = {}
    for is_inside in (True, False):
        kind = {link: rate for link, rate in rates.items() if link.is_inside == is_inside}
        slow = find_slow(kind, factor)
        for rank in sorted({rank for link in slow for rank in (link.one, link.other)}):
            own = [link for link in kind if rank in (link.one, link.other)]
            if len(own) > 1 and all(link in slow for link in own):
                ranks[rank] = max(ranks.get(rank, 0.0), min(slow[link] for link in own))
        links |= {link: times for link, times in slow.items() if link.one not in ranks and link.other not in ranks}
    return ranks, links


def rounds_of_pairs(world_size: int, local_world_size: int, most_for_all: int = 16) -> list[list[tuple[int, int]]]:
    """Pairs of ranks that exchange messages, round by round; in a round no rank is in two pairs.

    Few ranks meet all others (the circle method of tournaments). Of many, each meets its neighbours in the ring of all
    ranks and its counterparts on the machines beside, which is where collectives send.

    Args:
        world_size: number of ranks.
        local_world_size: ranks of a machine.
        most_for_all: how many ranks are few.
    """
    if world_size <= most_for_all:
        places = [*range(world_size), *([None] if world_size % 2 else [])]
        rounds = []
        for _ in range(len(places) - 1):
            couples = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
            rounds.append([(min(a, b), max(a, b)) for a, b in couples if a is not None and b is not None])
            places = [places[0], places[-1], *places[1:-1]]
        return rounds
    rounds = []
    for distance in sorted({1, local_world_size}):
        if distance < world_size:
            pairs = [(rank, rank + distance) for rank in range(world_size - distance)]
            for parity in (0, 1):
                rounds.append([pair for pair in pairs if pair[0] // distance % 2 == parity])
    return rounds
