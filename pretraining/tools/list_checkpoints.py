"""What checkpoints a run has, as a table: `pretrain list`. Manifests and sizes are read, no tensors."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pretraining.checkpoint.manifest import (
    BEST,
    CHECKPOINTS,
    committed_checkpoints,
    incomplete_checkpoints,
    read_manifest,
)
from pretraining.config.commands import ListConfig
from pretraining.errors import CheckpointError


@dataclass(frozen=True)
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
    kind: str | None
    best: bool
    step: int | None
    tokens_seen: int | None
    loss: float | None
    evaluation_loss: float | None
    bytes: int
    age_seconds: float
    fault: str | None


def list_checkpoints(config: ListConfig) -> None:
    """Print the checkpoints of a run.

    Raises:
        CheckpointError: there is no run.
    """
    source = Path(config.run_path)
    run = source.parent if source.name == CHECKPOINTS else source
    if not (run / CHECKPOINTS).is_dir():
        raise CheckpointError(f"--run_path={source} is no run: it has no folder {CHECKPOINTS}")
    rows = rows_of(run)
    if config.json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    for line in _table(rows):
        print(line)
    total = sum(row.bytes for row in rows)
    print(f"{len(rows)} checkpoints, {_size(total)} in {run / CHECKPOINTS}")


def rows_of(run: Path) -> list[Row]:
    """Every checkpoint of a run, complete ones by step, then what interrupted saves have left."""
    link = run / CHECKPOINTS / BEST
    best = link.resolve() if link.is_symlink() else None
    complete = [_row(path, best is not None and path.resolve() == best) for path in committed_checkpoints(run)]
    return complete + [_unread(path, "incomplete", None) for path in incomplete_checkpoints(run)]


def _row(path: Path, is_best: bool) -> Row:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return _unread(path, "damaged", str(error), is_best)
    size, age = _measure(path)
    return Row(
        name=path.name,
        state="complete",
        kind=manifest.kind if manifest.data else "import",
        best=is_best,
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        loss=manifest.loss,
        evaluation_loss=manifest.evaluation_loss,
        bytes=size,
        age_seconds=age,
        fault=None,
    )


def _unread(path: Path, state: str, fault: str | None, is_best: bool = False) -> Row:
    size, age = _measure(path)
    return Row(path.name, state, None, is_best, None, None, None, None, size, age, fault)


def _measure(path: Path) -> tuple[int, float]:
    """Bytes of a folder's files, and seconds since the newest was written; a save may be changing it meanwhile."""
    size, newest = 0, 0.0
    for file in (path, *path.iterdir()):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        size += status.st_size if file.is_file() else 0
        newest = max(newest, status.st_mtime)
    return size, round(max(0.0, time.time() - newest), 1)


def _table(rows: list[Row]) -> list[str]:
    head = ("step", "tokens", "loss", "evaluation", "size", "state", "age", "name")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if name in ("state", "name") else cell.rjust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ] + [f"{row.name}: {row.fault}" for row in rows if row.fault]


def _cells(row: Row) -> tuple[str, ...]:
    notes = [row.state, *filter(None, [row.kind if row.kind != "interval" else None, "best" if row.best else None])]
    return (
        "-" if row.step is None else str(row.step),
        "-" if row.tokens_seen is None else f"{row.tokens_seen:,}",
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.evaluation_loss is None else f"{row.evaluation_loss:.4f}",
        _size(row.bytes),
        ", ".join(dict.fromkeys(notes)),
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
