"""Which checkpoint a run starts from: the newest whose every byte is as it was written.

    rank 0 lists candidates, newest first -> manifest, presence and sizes of its files, on rank 0
                                          -> checksums, each rank a share of the files -> the first good one

At a start the save path wins over the load path: a job that is submitted again resumes itself, whatever it was first
started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pretraining.checkpoint.listing import CHECKPOINTS, MANIFEST, committed_checkpoints, read_manifest
from pretraining.checkpoint.retries import with_retries
from pretraining.checkpoint.state import FileEntry, Manifest
from pretraining.checkpoint.store import READING_THREADS, complain
from pretraining.checkpoint.tensor_files import checksum_file
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError
from pretraining.parallel.processes import gather_from_every_rank, on_rank_zero


@dataclass(frozen=True)
class Restorable:
    """A checkpoint that a run can start from.

    Attributes:
        path: its folder.
        manifest: its contents.
        is_own: whether it is the run's own, and not one of another run that a new one starts from.
        passed_over: newer ones that are damaged, and how, a line each.
    """

    path: Path
    manifest: Manifest
    is_own: bool = True
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidates:
    """Where to look, newest first.

    Attributes:
        paths: of checkpoints.
        source: the flag that led here.
        is_own: whether they are the run's own.
        is_exact: whether the user named this one checkpoint, so that no other will do.
    """

    paths: list[Path]
    source: str
    is_own: bool = False
    is_exact: bool = False


def find_checkpoint(config: CheckpointConfig, *, check_contents: bool = True) -> Restorable | None:
    """The checkpoint to start from, or None for a new run; a collective call, or one of a process alone.

    Args:
        config: where to look.
        check_contents: read every file and compare its checksum; otherwise only the manifest and the files' sizes.

    Raises:
        CheckpointError: a load path was named and holds no checkpoint, or there are some and all are damaged.
    """
    candidates = on_rank_zero(lambda: _list_candidates(config))
    damaged: list[str] = []
    for path in candidates.paths:
        try:
            manifest = on_rank_zero(lambda path=path: read_manifest(path))  # type: ignore[misc]
            if check_contents:
                check_files(path, manifest.files)
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return Restorable(path, manifest, candidates.is_own, tuple(damaged))
    if not damaged:
        return None
    if candidates.is_exact:
        raise CheckpointError(f"{damaged[0]}. Name another checkpoint with {candidates.source.partition('=')[0]}.")
    lines = "\n".join(f"  {line}" for line in damaged)
    raise CheckpointError(
        f"{candidates.source} holds {len(damaged)} checkpoints, and none is good:\n{lines}\n"
        "Repair one, or give another --ckpt_save_path to start a new run."
    )


def check_files(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Read every file of a checkpoint, each rank a share, and compare with the manifest; a collective call.

    Raises:
        CheckpointError: names every file whose content is not what was written.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = share_of_files(files, rank, world_size)

    def check() -> list[str]:
        with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="verify") as pool:
            return [fault for fault in pool.map(lambda name: _fault_of(folder / name, files[name]), own) if fault]

    faults = [fault for of_rank in gather_from_every_rank(check) for fault in of_rank]
    if faults:
        raise CheckpointError("; ".join(faults))


def share_of_files(files: Mapping[str, FileEntry], rank: int, world_size: int) -> list[str]:
    """The files that a rank checks: about as many bytes for each.

    They are dealt out in the order of the ranks that wrote them: with as many processes as then, each reads what it
    will load, and loads it from memory.
    """
    total = max(1, sum(entry.bytes for entry in files.values()))
    own, before = [], 0
    for name in sorted(files):
        size = files[name].bytes
        if min((2 * before + size) * world_size // (2 * total), world_size - 1) == rank:  # where its middle lies
            own.append(name)
        before += size
    return own


def _fault_of(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file, if anything."""
    try:
        found = with_retries(lambda: checksum_file(path), f"reading {path}", complain)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found.bytes != entry.bytes:
        return f"{path} has {found.bytes} bytes in place of {entry.bytes}"
    if found.crc32 != entry.crc32:
        return f"{path} is damaged: its checksum is {found.crc32} in place of {entry.crc32}"
    return None


def _list_candidates(config: CheckpointConfig) -> _Candidates:
    own = committed_checkpoints(Path(config.ckpt_save_path))
    if own:
        return _Candidates(own[::-1], f"--ckpt_save_path={config.ckpt_save_path}", is_own=True)
    if config.ckpt_load_path is None:
        return _Candidates([], "")
    source, flag = Path(config.ckpt_load_path), f"--ckpt_load_path={config.ckpt_load_path}"
    if (source / MANIFEST).is_file():
        return _Candidates([source], flag, is_exact=True)
    run = source.parent if source.name == CHECKPOINTS else source
    found = committed_checkpoints(run)
    if not found:
        raise CheckpointError(
            f"{flag} holds no complete checkpoint: it is neither one (a folder with {MANIFEST}) nor a run with some in "
            f"{CHECKPOINTS}/."
        )
    return _Candidates(found[::-1], flag)
