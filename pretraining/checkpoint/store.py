"""How checkpoints lie on disk, and how one becomes visible.

    <run>/checkpoints/step_1000_ckp.tmp/     being written: never read, removed by the next save
    <run>/checkpoints/step_1000_ckp/         committed: appears by one rename, when every file is complete and flushed

A save writes into the `.tmp` folder (each rank its shards, as safetensors through torch.distributed.checkpoint), then
rank 0 writes `manifest.json` with the size of every file and renames the folder. So a process that dies at any moment
leaves the older checkpoints as they were. Reading takes safetensors and JSON only: nothing in a checkpoint is ever
executed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from pretraining.checkpoint.state import Manifest, file_of_tensor
from pretraining.errors import CheckpointError
from pretraining.parallel.processes import on_every_rank, on_rank_zero

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PREEMPT_SUFFIX = ".preempt"
_NAME = re.compile(r"step_(\d+)_ckp(\.preempt)?")


def save_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], manifest_for: Callable[[dict[str, int]], Manifest]
) -> None:
    """Write a checkpoint so that it is either complete or not there; a collective call.

    Args:
        folder: the committed name; its parent holds the run's checkpoints.
        tensors: sharded or not, the same names on every rank.
        manifest_for: makes the manifest from the size of every file.

    Raises:
        CheckpointError: a file cannot be written; older checkpoints are untouched.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    on_rank_zero(lambda: _start_fresh(temporary))
    writer = dcp.HuggingFaceStorageWriter(
        str(temporary), fqn_to_index_mapping=file_of_tensor(sorted(tensors)), save_distributed=True
    )
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:  # no subclass of Exception
        raise _write_error(temporary, error) from None
    sizes = _written_files(temporary)
    on_rank_zero(lambda: _commit(temporary, folder, manifest_for(sizes)))


def load_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read a checkpoint into `tensors`, in place, whatever the layout that wrote it; a collective call.

    Raises:
        CheckpointError: a file or tensor is missing or damaged.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=False))
    except CheckpointException as error:
        rank, (cause, _) = sorted(error.failures.items())[0]
        raise CheckpointError(
            f"{folder} cannot be loaded (rank {rank}: {type(cause).__name__}: {cause}). Remove or repair it to start "
            "from an older checkpoint."
        ) from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint, its files checked against the sizes it names.

    Raises:
        CheckpointError: the manifest is unreadable, or a file is missing or has another size.
    """
    path = folder / MANIFEST
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Remove {folder} to use an older checkpoint.") from None
    manifest = Manifest.parse(document, str(path))
    # A tensor's missing piece would leave what was in memory: the reader takes whatever files there are.
    strangers = sorted({path.name for path in folder.glob("*.safetensors")} - manifest.files.keys())
    if strangers:
        raise CheckpointError(f"{folder / strangers[0]} is no part of this checkpoint: its manifest does not name it.")
    for name, size in manifest.files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise CheckpointError(f"{file} is missing. Remove {folder} to use an older checkpoint.")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes in place of {size}. "
                f"Remove {folder} to use an older checkpoint."
            )
    return manifest


def committed_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the highest step last; what is incomplete does not count."""
    folder = run / CHECKPOINTS
    found = [(step_of(path), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [path for step, path in sorted(found) if step >= 0 and (path / MANIFEST).is_file()]


def incomplete_checkpoints(run: Path) -> list[Path]:
    """What interrupted saves have left in a run."""
    folder = run / CHECKPOINTS
    complete = set(committed_checkpoints(run))
    return sorted(path for path in folder.glob("step_*_ckp*") if path not in complete) if folder.is_dir() else []


def checkpoint_path(run: Path, step: int, preempt: bool = False) -> Path:
    """Where the checkpoint of a step is committed."""
    return run / CHECKPOINTS / f"step_{step}_ckp{PREEMPT_SUFFIX if preempt else ''}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 where it is not the name of a committed checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def _start_fresh(temporary: Path) -> None:
    """Make an empty folder for a save, and room: what interrupted saves have left is of no use to anyone."""
    try:
        for abandoned in temporary.parent.glob("step_*_ckp*.tmp"):
            shutil.rmtree(abandoned)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise _write_error(temporary, error) from None


def _written_files(temporary: Path) -> dict[str, int]:
    """Name and size of every file of a save, as the rank that wrote it sees them; a collective call.

    Rank 0 cannot just list the folder: on a shared file system its view of what other nodes wrote may be old.
    """
    own = f"shard-{dist.get_rank() + 1:05d}-*"
    sizes = on_every_rank(lambda: {path.name: path.stat().st_size for path in temporary.glob(own)})
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sizes)
    return {name: size for sizes in everyone for name, size in sorted(sizes.items())}


def _commit(temporary: Path, folder: Path, manifest: Manifest) -> None:
    try:
        with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest.document(), file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(temporary)
        if folder.exists():  # a checkpoint that a restore passed over: make room, but only now
            shutil.rmtree(folder)
        temporary.rename(folder)
        _flush_folder(folder.parent)
        for superseded in folder.parent.glob(f"*{PREEMPT_SUFFIX}"):
            if superseded != folder:
                shutil.rmtree(superseded)
    except OSError as error:
        raise _write_error(temporary, error) from None


def _flush_folder(folder: Path) -> None:
    """A rename is durable when the folder that holds the name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(path: Path, error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = sorted(error.failures.items())[0]
        reason = f"rank {rank}: {type(cause).__name__}: {cause}"
    else:
        reason = str(error)
    return CheckpointError(
        f"the checkpoint {path} cannot be written ({reason}). Older checkpoints are untouched. "
        "Check space and permissions there, or give another --ckpt_save_path."
    )


def world_description(strategy: str) -> dict[str, Any]:
    """The layout that writes a checkpoint, for people who look at it later."""
    return {"processes": dist.get_world_size(), "sharding_strategy": strategy}
