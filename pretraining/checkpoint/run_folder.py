"""What lies in the folder of a run's checkpoints.

    <run>/checkpoints/step_1000_ckp/             committed: it has a manifest, or is damaged
    <run>/checkpoints/step_1040_ckp.preempt/     the same; goes once a newer one is committed
    <run>/checkpoints/best -> step_900_ckp       the lowest evaluation loss
    <run>/checkpoints/step_1100_ckp.1f9c.tmp/    being written, or left by an interrupted save
    <run>/checkpoints/<any other name>/          the user's own: a checkpoint if it has a manifest; never removed

Names of folders are for people: what a checkpoint is stands in its manifest. Only what has the name that a save gave it
is ever removed.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pretraining.checkpoint.manifest import MANIFEST, Manifest, read_document
from pretraining.errors import CheckpointError
from pretraining.files import entries_of, is_file, is_folder

CHECKPOINTS = "checkpoints"
BEST = "best"
PREEMPT_SUFFIX = ".preempt"
UNFINISHED_SUFFIX = ".tmp"

_SAVE_NAME = (
    r"(step_(?P<step>\d+)_ckp|tokens\(\d\.\d\de\d+\)(_tloss\(-?\d+\.\d{3}\))?(_vloss\(-?\d+\.\d{3}\))?_ckpt)"
    r"(\.preempt)?(\.step_(?P<also>\d+))*"
)
"""What `checkpoint_name` and `distinct_name` give."""
_COMMITTED = re.compile(_SAVE_NAME)
_UNFINISHED = re.compile(rf"{_SAVE_NAME}(\.[0-9a-f]{{4}})?\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, be it damaged: what listings, retention and a start need to know of it.

    Attributes:
        step: of its manifest or, if that cannot be read, of its name; -1 if neither says.
        is_as_saved: whether it has the name that its save gave it; otherwise a user has copied or renamed it.
        kind: as in its manifest; None if that cannot be read.
        decided_by: the evaluation sets whose loss it is; losses of other sets do not compare.
        skipped_in_a_row: updates just before it that were left out.
    """

    path: Path
    step: int
    is_as_saved: bool = True
    kind: str | None = None
    evaluation_loss: float | None = None
    decided_by: tuple[str, ...] = ()
    skipped_in_a_row: int = 0


def committed_checkpoints(run: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run, the highest step last; what a save has not committed does not count.

    One that lost its manifest is among them: its name says that it was committed.
    """
    found = [checkpoint_at(path) for path in _folders(run) if is_committed(path)]

    def place(each: Checkpoint) -> tuple[int, bool, bool, bool, str]:
        # Of one step's two, a preemption checkpoint was saved first, and what a save replaces has the second name; a
        # user's copy comes before what it is of.
        name = _COMMITTED.fullmatch(each.path.name)
        is_second = name is not None and name["also"] is not None
        return each.step, each.path.suffix != PREEMPT_SUFFIX, name is not None, not is_second, each.path.name

    return sorted(found, key=place)


def checkpoint_at(path: Path) -> Checkpoint:
    """Return a committed checkpoint; its manifest is read again only if it has changed."""
    try:
        status = (path / MANIFEST).stat()
        return _read(path, status.st_mtime_ns, status.st_size, status.st_ino)
    except (OSError, CheckpointError):
        match = _COMMITTED.fullmatch(path.name)
        return Checkpoint(path, int((match["step"] or match["also"] or -1) if match else -1), match is not None)


@lru_cache(maxsize=4096)
def _read(path: Path, modified_ns: int, size: int, inode: int) -> Checkpoint:
    # Cached: a run that keeps everything would otherwise read a thousand manifests at each save.
    return describe(path, read_document(path))


def describe(path: Path, manifest: Manifest) -> Checkpoint:
    """Return what a manifest says of the checkpoint at a path, which need not be of this machine."""
    names = [checkpoint_name(style, manifest) for style in ("step", "tokens")]
    is_as_saved = path.name in (*names, *(distinct_name(name, manifest.step) for name in names))
    losses = manifest.evaluation_loss, manifest.decided_by
    return Checkpoint(path, manifest.step, is_as_saved, manifest.kind, *losses, manifest.skipped_in_a_row)


def is_committed(path: Path) -> bool:
    """Return whether a folder is a committed checkpoint, be it damaged: it has a manifest, or the name of one."""
    is_named = _COMMITTED.fullmatch(path.name) is not None
    return is_named or (path.suffix != UNFINISHED_SUFFIX and is_file(path / MANIFEST))


def unfinished_saves(run: Path) -> list[Path]:
    """Return the folders of saves that are under way, or never ended, in order; the next save removes them."""
    return sorted(path for path in _folders(run) if _UNFINISHED.fullmatch(path.name) and not path.is_symlink())


def run_of(path: Path) -> Path:
    """Return a run's folder, where it or its checkpoints/ was named."""
    return path.parent if path.name == CHECKPOINTS else path


def _folders(run: Path) -> list[Path]:
    folder = run / CHECKPOINTS
    return [path for path in entries_of(folder) if path.name != BEST and is_folder(path)] if is_folder(folder) else []


# Names that saves give


def checkpoint_path(run: Path, step: int) -> Path:
    """Return where the checkpoint of a step is committed, as long as checkpoints are named by their steps."""
    return run / CHECKPOINTS / f"step_{step}_ckp"


def checkpoint_name(style: str, manifest: Manifest) -> str:
    """Return the name of a checkpoint's folder: style "step", or "tokens" for a name that tells the story."""
    suffix = PREEMPT_SUFFIX if manifest.kind == "preempt" else ""
    if style == "step":
        return f"step_{manifest.step}_ckp{suffix}"
    mantissa, _, exponent = f"{manifest.tokens_seen:.2e}".partition("e")
    losses = {"tloss": manifest.loss, "vloss": manifest.evaluation_loss}
    told = "".join(f"_{name}({loss:.3f})" for name, loss in losses.items() if loss is not None)
    return f"tokens({mantissa}e{int(exponent)}){told}_ckpt{suffix}"


def temporary_name(folder: Path) -> Path:
    """Return another name each time: a process that wakes up in the middle of an old save must not write into a new."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(2)}{UNFINISHED_SUFFIX}")


def distinct_name(name: str, step: int) -> str:
    """Return the name for a step whose usual name another step's checkpoint has, as rounding may make them the same."""
    return f"{name}.step_{step}"
