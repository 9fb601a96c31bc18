"""Numbers in words."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is one: 1 step, 2,000 steps, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"
