"""Markdown tables, from cells and from files of results.

A file of results has a JSON object per line: the rows of a benchmark's tables as they were measured, and after the rows
of each command its outcome.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command.

    Attributes:
        command: command line.
        failure: reason of a failure; None = success.
        last: last line of the output.
    """

    command: str
    seconds: float
    failure: str | None
    last: str


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is aligned left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *rest]) + " |"

    return "\n".join(line(cells) for cells in (header, rule, *rows))


def report(lines: Iterable[str]) -> str:
    """Return a file of results as Markdown: each command, its tables and its outcome."""
    parts: list[str] = []
    rows: list[dict[str, Any]] = []
    machine = None
    for result in map(json.loads, lines):
        if "row" in result:
            rows.append(result)
            continue
        if rows and rows[0]["machine"] != machine:
            machine = rows[0]["machine"]
            parts.append(machine)
        parts += [f"    {result['command']}", *_tables(rows)]
        ended = f"ended early: {result['failure']}" if result["failure"] else f"ended with: {result['last']}"
        parts.append(f"{result['seconds']:.0f} s, {ended}")
        rows = []
    return "\n\n".join([*parts, *_tables(rows)]) + "\n"  # the last rows belong to an interrupted command


def _tables(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    for header, group in groupby((result["row"] for result in results), key=tuple):
        yield markdown_table(header, [tuple(row.values()) for row in group])
