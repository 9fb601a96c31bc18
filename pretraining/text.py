"""Numbers in words, and tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one: 1 step, 2,000 steps, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def format_bytes(size: float) -> str:
    """Return a size in decimal units, as disks are sold: 1.5 kB, 3.2 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def shorten_list(items: Sequence[str], largest: int = 12) -> str:
    """Return items as a comma list: the first ones, and how many more there are."""
    shown = ", ".join(items[:largest])
    return shown if len(items) <= largest else f"{shown} and {len(items) - largest:,} more"


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table, its columns two spaces apart.

    Args:
        rows: cells, equally many in each row; the first row is the head, if there is one.
        right: columns that are aligned to the right, such as numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
