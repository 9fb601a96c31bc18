"""What `pretrain doctor` thinks of an item: good, look at, bad, or not known; what was found, and what to do.

checks of every rank -> `merged`: one of each, with the ranks that it is about -> `summary`: the worst first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["good", "look at", "bad", "not known"]
WORST_FIRST: tuple[Verdict, ...] = ("bad", "look at", "good")


@dataclass(frozen=True)
class Check:
    """An item that was looked at.

    Attributes:
        advice: what to do; empty where there is nothing to do.
        ranks: that it is about; empty = all.
    """

    item: str
    verdict: Verdict
    found: str
    advice: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """What was found, and what to do."""
        return ": ".join(filter(None, (self.found, self.advice)))

    @property
    def place(self) -> str:
        """The ranks in words; empty for all."""
        if not self.ranks:
            return ""
        return f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"


def worst_of(checks: Sequence[Check]) -> Verdict:
    """Returns the worst verdict; good where nothing was looked at. What is not known is not worse than good."""
    found = {check.verdict for check in checks}
    return next((verdict for verdict in WORST_FIRST if verdict in found), "good")


def merged(checks_of_ranks: Sequence[Sequence[Check]]) -> list[Check]:
    """Returns each check once, with the ranks that have it where these are not all, in the order of the first rank."""
    found: dict[Check, list[int]] = {}
    for rank, checks in enumerate(checks_of_ranks):
        for check in dict.fromkeys(checks):
            found.setdefault(check, []).append(rank)
    everyone = len(checks_of_ranks)
    return [replace(check, ranks=() if len(ranks) == everyone else tuple(ranks)) for check, ranks in found.items()]


def table(checks: Sequence[Check]) -> Iterator[str]:
    """Yields a line for each item: its verdict, and what was found."""
    width = max((len(check.item) for check in checks), default=0)
    for check in checks:
        place = f" ({check.place})" if check.place else ""
        yield f"  {check.verdict:9} {check.item:{width}}  {check.found}{place}"


def summary(checks: Sequence[Check]) -> Iterator[str]:
    """Yields what to look at, the worst first, and what to do; "all good" where there is nothing."""
    if worst_of(checks) == "good":
        unknown = sum(check.verdict == "not known" for check in checks)
        also = f"; {unknown} more not known" if unknown else ""
        yield f"all good: {len(checks) - unknown} items{also}"
        return
    for verdict in WORST_FIRST[:-1]:
        for check in checks:
            if check.verdict == verdict:
                place = f"{check.place}: " if check.place else ""
                yield f"{verdict}: {place}{check.sentence}"
