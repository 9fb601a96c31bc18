"""Who is slow: each number next to the median of the others of its kind. Arithmetic only."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import TypeVar

Who = TypeVar("Who")
Pair = tuple[int, int]


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


def rounds_of_pairs(hosts: Sequence[str], most_for_all: int = 16) -> list[list[Pair]]:
    """Pairs of ranks that exchange messages, round by round; in a round no rank is in two pairs.

    First the ranks inside each machine, then those of two machines, all against all. So a machine's network carries as
    many messages in one round between machines as in any other, and a link is not slow only for the company that it
    had. Few ranks all meet each other; of many, each its machine's ranks and its counterparts on the machines beside.

    Args:
        hosts: machine of each rank.
        most_for_all: how many ranks are few; a machine that has more takes neighbours for all.
    """
    machines = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    inside = [_all_against_all(ranks) if len(ranks) <= most_for_all else _neighbours(ranks) for ranks in machines]
    rounds = [list(chain(*at_once)) for at_once in zip_longest(*inside, fillvalue=[])]
    is_few = len(hosts) <= most_for_all
    numbers = range(len(machines))
    for meetings in _all_against_all(numbers) if is_few else _neighbours(numbers):
        size = max((len(machines[number]) for meeting in meetings for number in meeting), default=0)
        for shift in range(size if is_few else 1):
            rounds.append([pair for a, b in meetings for pair in _across(machines[a], machines[b], size, shift)])
    return [pairs for pairs in rounds if pairs]


def _all_against_all(players: Sequence[int]) -> list[list[Pair]]:
    """Rounds in which each meets each other once: the circle method of tournaments."""
    places = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        couples = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in couples if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _neighbours(players: Sequence[int]) -> list[list[Pair]]:
    pairs = list(pairwise(players))
    return [pairs[::2], pairs[1::2]]


def _across(ones: Sequence[int], others: Sequence[int], size: int, shift: int) -> Iterator[Pair]:
    """Ranks of two machines, of `size` ranks at most, so that over all shifts each meets each."""
    for place, one in enumerate(ones):
        if (place + shift) % size < len(others):
            other = others[(place + shift) % size]
            yield min(one, other), max(one, other)
