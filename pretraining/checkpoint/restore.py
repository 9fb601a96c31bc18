"""Which checkpoint a run starts from: the newest that is good.

    rank 0 lists candidates, newest first -> manifest, presence and sizes of its files, on rank 0 -> the first good one

Loading it compares every byte (`loading`); where it turns out to be damaged, the next one is looked for. At a start the
save path wins over the load path: a job that is submitted again resumes itself, whatever it was first started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pretraining.checkpoint.listing import CHECKPOINTS, MANIFEST, committed_checkpoints, read_manifest
from pretraining.checkpoint.state import Manifest
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError
from pretraining.parallel.processes import on_rank_zero


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


def find_checkpoint(config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({})) -> Restorable | None:
    """The checkpoint to start from, or None for a new run; a collective call, or one of a process alone.

    Its files are there and have their sizes; what is in them is not read.

    Args:
        config: where to look.
        damaged: checkpoints that are known not to be good, and what is wrong with them.

    Raises:
        CheckpointError: a load path was named and holds no checkpoint, or there are some and all are damaged.
    """
    candidates = on_rank_zero(lambda: _list_candidates(config))
    faults: list[str] = []
    for path in candidates.paths:
        try:
            if path in damaged:
                raise CheckpointError(damaged[path])
            manifest = on_rank_zero(lambda path=path: read_manifest(path))  # type: ignore[misc]
        except CheckpointError as error:
            faults.append(str(error))
        else:
            return Restorable(path, manifest, candidates.is_own, tuple(faults))
    if not faults:
        return None
    if candidates.is_exact:
        raise CheckpointError(f"{faults[0]}. Name another checkpoint with {candidates.source.partition('=')[0]}.")
    lines = "\n".join(f"  {line}" for line in faults)
    raise CheckpointError(
        f"{candidates.source} holds {len(faults)} checkpoints, and none is good:\n{lines}\n"
        "Repair one, or give another --ckpt_save_path to start a new run."
    )


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
