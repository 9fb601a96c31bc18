"""`pretrain list`: a table of the checkpoints of a run, from manifests and file sizes."""

from __future__ import annotations

import json
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pretraining.checkpoint.branches import is_given_up
from pretraining.checkpoint.own_checkpoints import best_of, list_run, saved_by_run
from pretraining.checkpoint.run_folder import (
    CHECKPOINTS,
    checkpoints_set_aside,
    committed_checkpoints,
    read_manifest,
    run_of,
    unfinished_saves,
)
from pretraining.checkpoint.start_point import newest_good
from pretraining.errors import CheckpointError
from pretraining.files import entries_of, exists, is_address, is_folder
from pretraining.launch.terminal import print_text
from pretraining.text import count_of, format_bytes, format_seconds, format_table
from pretraining.tools.command_settings import ListConfig

SET_ASIDE_STATE = "set aside"
NOT_USED_STATE = "not used"


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint.

    Attributes:
        name: folder name; of one that is set aside, with the folder set_aside_<time>.
        state: "complete"; "incomplete" (an interrupted save, or one in progress); "damaged" (wrong names or sizes);
            "set aside" (the run has gone back from it). A checkpoint is "not used" if the next start sets it aside,
            or if it belongs to another run.
        kind: reason for the save, from the manifest; "import" for imported weights, "merged" for an average.
        best: whether it is the best checkpoint of the run, to which the link `best` points.
        bytes: size of all files.
        age_seconds: time since the newest file was written.
        fault: what is damaged.
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
    """Print the checkpoints of a run; raise a CheckpointError if there is no run."""
    if is_address(config.run_path):
        from pretraining.checkpoint.copies import local_view

        with local_view(config.run_path, with_files=False) as run:
            rows, place = rows_of(run), config.run_path
    else:
        source = Path(config.run_path)
        run = run_of(source)
        if not is_folder(run / CHECKPOINTS):
            reason = f"it has no folder {CHECKPOINTS}" if exists(source) else "there is no such folder"
            raise CheckpointError(f"--run_path is not a run: {reason}", path=source)
        rows, place = rows_of(run), str(run / CHECKPOINTS)
    if config.json:
        lines = [json.dumps(asdict(row)) for row in rows]
    else:
        lines = [*_table(rows), _totals(rows, place)]
    for line in lines:
        print_text(line)


def rows_of(run: Path) -> list[ListedCheckpoint]:
    """Return a row per checkpoint of a run: committed ones by step, then unfinished saves, then those set aside."""
    listed = list_run(run)
    newest, _ = newest_good(listed.saved)
    used = {
        checkpoint.path
        for checkpoint in listed.saved
        if newest is None or checkpoint.kind is None or not is_given_up(checkpoint, newest.manifest)
    }
    best = None if newest is None else best_of(saved_by_run(newest.manifest, listed.saved))
    committed = [
        _row(checkpoint.path, "complete" if checkpoint.path in used else NOT_USED_STATE, is_best=checkpoint == best)
        for checkpoint in committed_checkpoints(run)
    ]
    unfinished = [_row(path, "incomplete") for path in unfinished_saves(run)]
    return committed + unfinished + [_row(path, SET_ASIDE_STATE) for path in checkpoints_set_aside(run)]


def _row(path: Path, state: str, *, is_best: bool = False) -> ListedCheckpoint:
    size, newest = 0, 0.0
    for file in (path, *entries_of(path)):
        with suppress(OSError):  # a running save may rename or remove files
            status = file.stat()
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
            newest = max(newest, status.st_mtime)
    age = round(max(0.0, time.time() - newest), 1)
    name = path.name if state != SET_ASIDE_STATE else f"{path.parent.name}/{path.name}"
    row = ListedCheckpoint(name=name, state=state, best=is_best, bytes=size, age_seconds=age)
    if state == "incomplete":
        return row
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return replace(row, state=state if state == SET_ASIDE_STATE else "damaged", fault=str(error))
    return replace(
        row,
        kind=manifest.kind if manifest.data else "merged" if manifest.average else "import",
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        loss=manifest.loss,
        evaluation_loss=manifest.evaluation_of_step,
    )


def _totals(rows: list[ListedCheckpoint], place: str) -> str:
    aside = [row for row in rows if row.state == SET_ASIDE_STATE]
    sizes = [format_bytes(sum(row.bytes for row in each)) for each in (rows, aside)]
    noted = f", of which {len(aside)} set aside, {sizes[1]}" if aside else ""
    return f"{count_of(len(rows), 'checkpoint')}, {sizes[0]} in {place}{noted}"


def _table(rows: list[ListedCheckpoint]) -> list[str]:
    lines = [("step", "tokens", "loss", "evaluation", "size", "state", "age", "name"), *map(_cells, rows)]
    return format_table(lines, right=(0, 1, 2, 3, 4, 6)) + [f"{row.name}: {row.fault}" for row in rows if row.fault]


def _cells(row: ListedCheckpoint) -> tuple[str, ...]:
    notes = [row.state, row.kind if row.kind != "interval" else None, "best" if row.best else None]
    return (
        "-" if row.step is None else str(row.step),
        "-" if row.tokens_seen is None else f"{row.tokens_seen:,}",
        *(f"{loss:.4f}" if loss is not None else "-" for loss in (row.loss, row.evaluation_loss)),
        format_bytes(row.bytes),
        ", ".join(dict.fromkeys(filter(None, notes))),
        format_seconds(row.age_seconds),
        row.name,
    )
