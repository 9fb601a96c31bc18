"""What lies in a run's folder of checkpoints, and what it is called.

    <run>/checkpoints/step_1000_ckp/             committed: it has a manifest
    <run>/checkpoints/step_1040_ckp.preempt/     the same, and goes once a newer one is committed
    <run>/checkpoints/best -> step_900_ckp       the lowest evaluation loss
    <run>/checkpoints/step_1100_ckp.1f9c.tmp/    being written, or what an interrupted save has left

A name is for people; what a checkpoint is stands in its manifest. A step in a name only saves reading the manifest when
checkpoints are put in order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pretraining.checkpoint.pt_files import FULL_FILES
from pretraining.checkpoint.state import Manifest
from pretraining.checkpoint.tensor_files import SUFFIX
from pretraining.errors import CheckpointError

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
BEST = "best"
PREEMPT_SUFFIX = ".preempt"
UNFINISHED_SUFFIX = ".tmp"
_STEP_NAME = re.compile(r"step_(\d+)_ckp(\.preempt)?")
_ANY_NAME = re.compile(r"(step_\d+_ckp|tokens\(.*_ckpt).*")


def committed_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the highest step last; what is incomplete does not count."""
    found = [path for path in _folders(run) if (path / MANIFEST).is_file() and path.suffix != UNFINISHED_SUFFIX]
    # Of one step's two, a preemption checkpoint was saved first.
    return sorted(found, key=lambda path: (step_of(path), path.suffix != PREEMPT_SUFFIX, path.name))


def incomplete_checkpoints(run: Path) -> list[Path]:
    """What interrupted saves have left in a run."""
    complete = set(committed_checkpoints(run))
    return sorted(path for path in _folders(run) if _ANY_NAME.fullmatch(path.name) and path not in complete)


def unfinished_saves(run: Path) -> list[Path]:
    """Folders of saves that are under way, or never ended."""
    return [path for path in _folders(run) if path.suffix == UNFINISHED_SUFFIX and not path.is_symlink()]


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is committed, as long as checkpoints are named by their steps."""
    return run / CHECKPOINTS / f"step_{step}_ckp"


def checkpoint_name(style: str, manifest: Manifest) -> str:
    """The name of a checkpoint's folder.

    Args:
        style: "step", or "tokens" for a name that tells the story.
        manifest: of the checkpoint.
    """
    suffix = PREEMPT_SUFFIX if manifest.kind == "preempt" else ""
    if style == "step":
        return f"step_{manifest.step}_ckp{suffix}"
    mantissa, _, exponent = f"{manifest.tokens_seen:.2e}".partition("e")
    losses = {"tloss": manifest.loss, "vloss": manifest.evaluation_loss}
    told = "".join(f"_{name}({loss:.3f})" for name, loss in losses.items() if loss is not None)
    return f"tokens({mantissa}e{int(exponent)}){told}_ckpt{suffix}"


def step_of(path: Path) -> int:
    """The step of a checkpoint; -1 where neither its name nor its manifest says."""
    match = _STEP_NAME.fullmatch(path.name)
    if match:
        return int(match.group(1))
    try:
        return read_document(path).step
    except CheckpointError:
        return -1


def read_document(folder: Path) -> Manifest:
    """The manifest of a checkpoint, as it stands there.

    Raises:
        CheckpointError: it cannot be read or was damaged.
    """
    path = folder / MANIFEST
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return Manifest.parse(document, str(path))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its files checked for presence and size; their content is not read.

    Raises:
        CheckpointError: the manifest is unreadable, or a file is missing or has another size.
    """
    manifest = read_document(folder)
    # A tensor's missing piece would leave what was in memory: the reader takes whatever files there are.
    strangers = sorted({path.name for path in folder.glob(f"*{SUFFIX}")} - manifest.files.keys())
    if strangers:
        raise CheckpointError(f"{folder / strangers[0]} is no part of this checkpoint: its manifest does not name it")
    for name, entry in manifest.files.items():
        file = folder / name
        if Path(name).name != name or not (name.endswith(SUFFIX) or name in FULL_FILES):
            raise CheckpointError(f"{folder / MANIFEST} names {name!r}, which is no tensor file of this folder")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        size = file.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes in place of {entry.bytes}")
    return manifest


def _folders(run: Path) -> list[Path]:
    folder = run / CHECKPOINTS
    return [path for path in folder.iterdir() if path.is_dir() and path.name != BEST] if folder.is_dir() else []
