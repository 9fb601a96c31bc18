"""What checkpoints a run has, as a table: `pretrain list`. Manifests and sizes are read, no tensors."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pretraining.checkpoint.manifest import (
    BEST,
    CHECKPOINTS,
    committed_checkpoints,
    run_of,
    unfinished_saves,
)
from pretraining.checkpoint.start_point import manifest_at
from pretraining.config.commands import ListConfig
from pretraining.errors import CheckpointError
from pretraining.files import entries_of, is_folder
from pretraining.launch.terminal import print_text
from pretraining.text import count_of


@dataclass(frozen=True, kw_only=True)
class Row:
    """A checkpoint.

    Attributes:
        name: of its folder.
        state: "complete"; "incomplete": an interrupted save has left it, or one is under way; "damaged": names or sizes
            of its files are wrong.
        kind: why it was saved, as in its manifest; "import" for weights that were not trained here.
        best: whether the run's link `best` leads here.
        step, tokens_seen, loss, evaluation_loss: as in its manifest; None where there is none.
        bytes: of all its files.
        age_seconds: since its newest file was written.
        fault: what is wrong with a damaged one.
    """

    name: str
    state: str
    kind: str | None = None
    best: bool
    step: int | None = None
    tokens_seen: int | None = None
    loss: float | None = None
    evaluation_loss: float | None = None
    bytes: int
    age_seconds: float
    fault: str | None = None


def list_checkpoints(config: ListConfig) -> None:
    """Prints the checkpoints of a run.

    Raises:
        CheckpointError: there is no run.
    """
    source = Path(config.run_path)
    run = run_of(source)
    if not is_folder(run / CHECKPOINTS):
        raise CheckpointError(f"--run_path={source} is no run: it has no folder {CHECKPOINTS}")
    rows = rows_of(run)
    for line in [json.dumps(asdict(row)) for row in rows] if config.json else _table(rows):
        print_text(line)
    if config.json:
        return
    total = sum(row.bytes for row in rows)
    print_text(f"{count_of(len(rows), 'checkpoint')}, {_size(total)} in {run / CHECKPOINTS}")


def rows_of(run: Path) -> list[Row]:
    """Every checkpoint of a run, complete ones by step, then what interrupted saves have left."""
    link = run / CHECKPOINTS / BEST
    best = Path(os.path.realpath(link)) if link.is_symlink() else None  # `resolve` fails at a link to itself
    incomplete = [_measured(path, "incomplete", best) for path in unfinished_saves(run)]
    return [_row(path, best) for path in committed_checkpoints(run)] + incomplete


def _row(path: Path, best: Path | None) -> Row:
    try:
        manifest = manifest_at(path)
    except CheckpointError as error:
        return replace(_measured(path, "damaged", best), fault=str(error))
    return replace(
        _measured(path, "complete", best),
        kind=manifest.kind if manifest.data else "import",
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        loss=manifest.loss,
        evaluation_loss=manifest.evaluation_loss,
    )


def _measured(path: Path, state: str, best: Path | None) -> Row:
    """What a look at the files tells; a save may be changing them meanwhile."""
    size, newest = 0, 0.0
    for file in (path, *entries_of(path)):
        try:
            status = file.stat()
        except OSError:
            continue
        size += status.st_size if stat.S_ISREG(status.st_mode) else 0
        newest = max(newest, status.st_mtime)
    age = round(max(0.0, time.time() - newest), 1)
    return Row(name=path.name, state=state, best=Path(os.path.realpath(path)) == best, bytes=size, age_seconds=age)


def _table(rows: list[Row]) -> list[str]:
    lines = [("step", "tokens", "loss", "evaluation", "size", "state", "age", "name"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = (str.rjust,) * 5 + (str.ljust, str.rjust, str.ljust)
    return [
        "  ".join(place(cell, width) for place, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in lines
    ] + [f"{row.name}: {row.fault}" for row in rows if row.fault]


def _cells(row: Row) -> tuple[str, ...]:
    notes = [row.state, row.kind if row.kind != "interval" else None, "best" if row.best else None]
    return (
        "-" if row.step is None else str(row.step),
        "-" if row.tokens_seen is None else f"{row.tokens_seen:,}",
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.evaluation_loss is None else f"{row.evaluation_loss:.4f}",
        _size(row.bytes),
        ", ".join(dict.fromkeys(filter(None, notes))),
        _age(row.age_seconds),
        row.name,
    )


def _size(size: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{int(seconds // factor)} {unit}"
    return f"{int(seconds)} s"
