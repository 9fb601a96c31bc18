"""Formatting of numbers, lists and tables for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: 1 step, 2,000 steps, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def list_some(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first items and the number of the rest: a, b and 3 more."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


MOST_PASSES = 4
"""Passes over a dataset up to which repeated tokens teach almost as much as new ones (Muennighoff et al. 2023)."""
_MOST_DATASETS = 8


def describe_passes(tokens: Mapping[str, int], passes: Mapping[str, float]) -> list[str]:
    """Return a line per dataset of a run: share, tokens and passes; the most read first, the rest in one line.

    Args:
        tokens: of the whole run, by dataset.
        passes: over each dataset whose size is known.
    """
    total, names = sum(tokens.values()) or 1, sorted(tokens, key=lambda name: (-passes.get(name, 0), name))
    lines = format_table(
        [
            (name, f"{tokens[name] / total:.1%}", f"{tokens[name]:,} tokens", _format_passes(passes.get(name)))
            for name in names[:_MOST_DATASETS]
        ],
        right=(1, 2, 3),
    )
    if more := names[_MOST_DATASETS:]:
        lines.append(f"and {len(more)} more, at most {_format_passes(passes.get(more[0]))} each")
    return lines


def describe_repeats(passes: Mapping[str, float]) -> str:
    """Return a warning about datasets that a run reads more than `MOST_PASSES` times; empty if there is none."""
    often = sorted((name for name, count in passes.items() if count > MOST_PASSES), key=lambda name: -passes[name])
    listed = list_some([f"{name} ({_format_passes(passes[name])})" for name in often], 4)
    advice = "give a smaller weight, fewer steps or more data"
    return (often and f"after {MOST_PASSES} passes a dataset teaches less and less: {listed}; {advice}") or ""


def _format_passes(count: float | None) -> str:
    return "passes unknown" if count is None else f"{count:.2g} passes" if count < 1 else f"{count:,.1f} passes"


def format_bytes(size: float) -> str:
    """Return a size on disk in decimal units: 1.5 kB, 3.2 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def parse_bytes(text: str) -> int:
    """Return a size in bytes: 500MB, 5GB (10^9), 2GiB (2^30), or bytes alone; raise a ValueError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper(), re.ASCII)
    size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else 0.0
    if not 1 <= size < math.inf:
        raise ValueError("it is not a size: write 500MB, 5GB or 2GiB")
    return int(size)


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
