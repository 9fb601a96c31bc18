"""How a checkpoint is written and becomes visible.

    <run>/checkpoints/step_1000_ckp.1f9c.tmp/     being written: never read, removed by the next save
    <run>/checkpoints/step_1000_ckp/              committed: appears by one rename, when every file is there and flushed

A save writes into the `.tmp` folder, each rank its share of the tensors, then rank 0 writes `manifest.json` with the
size and checksum of every file and renames the folder. So a process that dies at any moment leaves the older
checkpoints as they were.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretraining.checkpoint.layout import Share, own_share
from pretraining.checkpoint.listing import MANIFEST, UNFINISHED_SUFFIX, unfinished_saves
from pretraining.checkpoint.state import FileEntry, Manifest
from pretraining.checkpoint.tensor_files import SUFFIX, write_tensors
from pretraining.distributed.processes import gather_from_every_rank, on_rank_zero
from pretraining.errors import CheckpointError
from pretraining.files import flush_folder, with_retries, write_flushed

WRITING_THREADS = 4  # while one file is flushed, others are checked and copied
NO_SPACE = {errno.ENOSPC: "the file system is full", errno.EDQUOT: "the quota is used up", errno.EFBIG: "a size limit"}

ManifestFor = Callable[[Mapping[str, FileEntry]], Manifest]


def save_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], manifest_for: ManifestFor) -> None:
    """Write a checkpoint so that it is either complete or not there; a collective call.

    Args:
        folder: the committed name; its parent holds the run's checkpoints.
        tensors: sharded or not, the same names on every rank.
        manifest_for: makes the manifest from size and checksum of every file.

    Raises:
        CheckpointError: a file cannot be written; older checkpoints are untouched.
    """
    save_share(folder, own_share(tensors), manifest_for)


def save_share(
    folder: Path,
    share: Share,
    manifest_for: ManifestFor,
    *,
    group: dist.ProcessGroup | None = None,
    before_commit: Callable[[], None] = lambda: None,
    write: Callable[[Path], dict[str, FileEntry]] | None = None,
) -> None:
    """The same for what each rank writes, worked out before; it may run in a thread beside the training.

    Args:
        folder: the committed name.
        share: what this rank writes.
        manifest_for: makes the manifest.
        group: of all ranks, to talk over.
        before_commit: called on rank 0 when everything is written; an error from it leaves the checkpoint out.
        write: writes the files into a folder in another form than shards, and returns those of this rank.
    """
    temporary = on_rank_zero(lambda: _start_fresh(folder, share), group)
    try:
        written = gather_from_every_rank(lambda: _write_files(temporary, share, write), group)
        files = {name: entry for entries in written for name, entry in sorted(entries.items())}
        on_rank_zero(lambda: _commit(temporary, folder, share, manifest_for(files), before_commit), group)
    except CheckpointError:  # every rank has it
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise


def world_description(strategy: str) -> dict[str, Any]:
    """The layout that writes a checkpoint, for people who look at it later."""
    return {"processes": dist.get_world_size(), "sharding_strategy": strategy}


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint so that one half removed never looks like one.

    Raises:
        OSError: it cannot be removed.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    aside = _temporary_name(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


def _temporary_name(folder: Path) -> Path:
    """A name of its own: a process that was stopped in a save and wakes up later must not write into another's."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(2)}{UNFINISHED_SUFFIX}")


def _start_fresh(folder: Path, share: Share) -> Path:
    """Make an empty folder for a save, and room: what interrupted saves have left is of no use to anyone."""
    temporary = _temporary_name(folder)
    with _writing(folder, share):
        for abandoned in unfinished_saves(folder.parent.parent):
            shutil.rmtree(abandoned)
        temporary.mkdir(parents=True)
    return temporary


def _write_files(
    temporary: Path, share: Share, write: Callable[[Path], dict[str, FileEntry]] | None
) -> dict[str, FileEntry]:
    if write is None:
        return _write_share(temporary, share)
    with _writing(temporary, share):
        return write(temporary)


def _write_share(temporary: Path, share: Share) -> dict[str, FileEntry]:
    """Write this rank's files; returns them by name."""
    names = {
        number: f"shard-{dist.get_rank() + 1:05d}-model-{number:05d}-of-{share.number_of_files:05d}{SUFFIX}"
        for number in share.files
    }

    def write(number: int) -> FileEntry:
        path = temporary / names[number]
        with _writing(path, share):
            return with_retries(lambda: write_tensors(path, share.files[number]), f"writing {path}")

    with ThreadPoolExecutor(WRITING_THREADS, thread_name_prefix="checkpoint") as pool:
        return dict(zip(names.values(), pool.map(write, names), strict=True))


def _commit(temporary: Path, folder: Path, share: Share, manifest: Manifest, before_commit: Callable[[], None]) -> None:
    content = json.dumps(manifest.document(), indent=1, allow_nan=False).encode()
    with _writing(temporary / MANIFEST, share):
        with_retries(lambda: write_flushed(temporary / MANIFEST, content), f"writing {temporary / MANIFEST}")
        flush_folder(temporary)
    before_commit()
    with _writing(folder, share):
        aside = None
        if folder.exists():  # a checkpoint that a restore passed over: make room, but only now
            aside = _temporary_name(folder)
            folder.rename(aside)
        temporary.rename(folder)
        flush_folder(folder.parent)
        if aside is not None:
            shutil.rmtree(aside)


@contextmanager
def _writing(path: Path, share: Share) -> Iterator[None]:
    """An error of the file system as one for users."""
    try:
        yield
    except OSError as error:
        raise _write_error(path, share, error) from None


def _write_error(path: Path, share: Share, error: OSError) -> CheckpointError:
    if error.errno in NO_SPACE:
        free = next(shutil.disk_usage(each).free for each in path.parents if each.exists())
        reason = (
            f"{NO_SPACE[error.errno]}. The checkpoint takes {share.total_bytes:,} bytes, and {free:,} are free there. "
            "Make room"
        )
    else:
        reason = f"{error}. Check the permissions there"
    return CheckpointError(
        f"{path} cannot be written: {reason}, or give another --ckpt_save_path. Older checkpoints are untouched."
    )
