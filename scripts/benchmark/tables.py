"""Tables for documents, from cells and from files of results.

    python -m scripts.benchmark.tables results        # the .jsonl files that on_gpu.sh has written there

A file of results has a JSON object a line: the rows of a benchmark's tables as they were measured, and after those of
each command how it ended.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
"""Cells by the names of their columns."""


@dataclass(frozen=True)
class Outcome:
    """What came of a command.

    Attributes:
        command: as it was typed.
        seconds: that it took.
        failure: why it ended early; None = it did not.
        said: its last line.
        column: of its tables that has a goal, if any.
        goal: what the largest number of that column is to reach.
    """

    command: str
    seconds: float
    failure: str | None
    said: str
    column: str | None = None
    goal: float | None = None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for documents; the first column is aligned left, numbers right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *rest]) + " |"

    return "\n".join(line(cells) for cells in (header, rule, *rows))


def report(lines: Iterable[str]) -> str:
    """What a file of results says, as text for documents: each command, its tables, how it ended, and its goal."""
    parts: list[str] = []
    machine = None
    for rows, outcome in _commands(map(json.loads, lines)):
        for row in rows:
            if row["machine"] != machine:
                machine = row["machine"]
                parts.append(machine)
        parts.append(f"    {outcome.command}")
        cells: list[Row] = [row["row"] for row in rows]
        for header, group in groupby(cells, key=tuple):
            parts.append(markdown_table(header, [tuple(row.values()) for row in group]))
        parts.append(_ending(outcome))
        if outcome.column is not None and outcome.goal is not None:
            parts.append(_judgement(outcome.column, outcome.goal, cells))
    return "\n\n".join(parts) + "\n"


def _commands(results: Iterable[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], Outcome]]:
    """The rows of each command with how it ended; those of one that was cut off with everything else come last."""
    rows: list[dict[str, Any]] = []
    for result in results:
        if "row" in result:
            rows.append(result)
        else:
            yield rows, Outcome(**result)
            rows = []
    if rows:
        yield rows, Outcome(rows[0]["command"], 0.0, "it was cut off, and what had started it, too", "")


def _ending(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f"**Ended early** after {outcome.seconds:.0f} s: {outcome.failure}"
    return f"{outcome.seconds:.0f} s. It ended with: {outcome.said}"


def _judgement(column: str, goal: float, rows: Iterable[Row]) -> str:
    found = [number for row in rows if column in row for number in [_number(row[column])] if number is not None]
    if not found:
        return f"Goal: {column} of at least {goal:g}: not measured."
    verdict = "reached" if max(found) >= goal else "missed"
    return f"Goal: {column} of at least {goal:g}: {verdict}, {max(found):g}."


def _number(cell: str) -> float | None:
    """The number that a cell begins with; a percentage as a share of one."""
    match = re.match(r"([\d,]+(?:\.\d+)?)(%?)", cell)
    if match is None:
        return None
    return round(float(match[1].replace(",", "")) / (100 if match[2] else 1), 6)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables for documents, from files of results.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of the .jsonl files")
    folder = parser.parse_args(arguments).folder
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        sys.exit(f"error: there are no results in {folder}")
    for file in files:
        print(f"## {file.stem}\n\n{report(file.read_text(encoding='utf-8').splitlines())}")


if __name__ == "__main__":
    main()
