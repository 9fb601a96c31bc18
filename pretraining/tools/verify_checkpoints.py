"""Reads checkpoints wholly and names every fault: `pretrain verify <checkpoint or run>`.

    manifest -> on threads, a file at a time: presence, size, checksum -> headers -> chunks of each tensor: each element
    once, shapes as of the model in the manifest -> faults

A start checks all of it with the same functions, and so takes nothing that this refuses.
"""

from __future__ import annotations

import sys
from os import cpu_count
from pathlib import Path

from pretraining.checkpoint.completeness import tensor_faults
from pretraining.checkpoint.headers import chunks_by_name, read_header
from pretraining.checkpoint.manifest import (
    CHECKPOINTS,
    FULL_FILES,
    MANIFEST,
    committed_checkpoints,
    misnamed_files,
    run_of,
    shape_of,
    unfinished_saves,
)
from pretraining.checkpoint.reader import file_faults
from pretraining.checkpoint.start_point import CheckpointRef, document_at, files_of, is_checkpoint
from pretraining.config.commands import VerifyConfig
from pretraining.errors import CheckpointError
from pretraining.launch.terminal import print_text
from pretraining.text import count_of


def verify_checkpoints(config: VerifyConfig) -> None:
    """Checks a checkpoint, or all of a run; faults are printed as they are found, progress goes to stderr.

    Raises:
        CheckpointError: there are faults, or there is nothing to check.
    """
    assert config.ckpt_path is not None
    source = Path(config.ckpt_path)
    paths, left = _find(source)
    faulty = []
    threads = config.num_workers or min(32, cpu_count() or 1)
    for path in paths:
        print_text(f"reading {path}", file=sys.stderr)
        faults = faults_of(path, threads)
        for fault in faults:
            print_text(fault)
        if faults:
            faulty.append(path)
        else:
            manifest = document_at(path)
            files = files_of(CheckpointRef(path, manifest))
            size = sum((path / name).stat().st_size for name in files)
            print_text(f"{path}: step {manifest.step}, {count_of(len(files), 'file')}, {size / 1e9:,.2f} GB: no faults")
    for path in left:
        print_text(f"{path} is incomplete: never read, and no fault")
    if faulty:
        raise CheckpointError(
            f"{len(faulty)} of {count_of(len(paths), 'checkpoint')} "
            f"{'is' if len(faulty) == 1 else 'are'} damaged; the faults are listed above"
        )


def faults_of(path: Path, threads: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a line a fault; everything in it is read, on as many threads."""
    try:
        manifest = document_at(path)
        shape_of(manifest)
        files = files_of(CheckpointRef(path, manifest))
    except CheckpointError as error:
        return [str(error)]
    misnamed = list(misnamed_files(path, manifest))
    own = {name: entry for name, entry in files.items() if Path(name).name == name}
    faults = file_faults(path, {name: entry for name, entry in own.items() if entry is not None}, threads)
    headers = []
    for name in () if faults else own:
        try:
            headers.append(read_header(path / name))
        except CheckpointError as error:
            faults.append(str(error) if name in FULL_FILES else f"{path / name} is no sound safetensors file: {error}")
    # What a bad file holds would be missed everywhere.
    return misnamed + (faults or tensor_faults(path, chunks_by_name(headers), manifest))


def _find(source: Path) -> tuple[list[Path], list[Path]]:
    """The checkpoints to check, and what interrupted saves have left beside them."""
    if is_checkpoint(source):
        return [source], []
    run = run_of(source)
    paths = committed_checkpoints(run)
    if not paths:
        raise CheckpointError(
            f"{source} is neither a checkpoint (a folder with {MANIFEST}, or four .pt files) nor a run with some in "
            f"{CHECKPOINTS}/. Give token files with --data_path"
        )
    return paths, unfinished_saves(run)
