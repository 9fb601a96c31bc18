"""Formatting of numbers, lists and tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: 1 step, 2,000 steps, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def list_some(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first items and the number of the rest: a, b and 3 more."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def format_bytes(size: float) -> str:
    """Return a size on disk in decimal units: 1.5 kB, 3.2 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def format_gib(size: float) -> str:
    """Return a size in memory in GiB: 12.5 GiB, 0.303 GiB."""
    gib = size / 2**30
    return f"{gib:,.1f} GiB" if abs(gib) >= 1 else f"{gib:.3g} GiB"


def format_seconds(seconds: float) -> str:
    """Return a duration: 45s, 3m 20s, 5h 07m, 12d 4h."""
    whole = round(seconds)
    for above, below, size, step in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            width = 1 if above == "d" else 2
            return f"{whole // size:,}{above} {whole % size // step:0{width}d}{below}"
    return f"{whole}s"


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table, with columns two spaces apart.

    Args:
        rows: cells, the same number in each row.
        right: indices of right-aligned columns, such as numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
