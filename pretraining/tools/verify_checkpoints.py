"""Reads checkpoints wholly and names every fault: `pretrain verify <checkpoint or run>`.

    manifest -> on threads, a file at a time: presence, size, checksum -> headers -> chunks of each tensor: each element
    once, shapes as of the model in the manifest -> faults

A start checks manifest, sizes, checksums and headers with the same functions. This also checks what the files hold
together, and so finds a fault of the program that wrote them, with checksums that fit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from os import cpu_count
from pathlib import Path

from pretraining.checkpoint.headers import StoredChunk, chunks_by_name, extent, read_header
from pretraining.checkpoint.manifest import (
    CHECKPOINTS,
    FULL_FILES,
    MANIFEST,
    OPTIMIZER_PREFIX,
    SHARD_SUFFIX,
    committed_checkpoints,
    incomplete_checkpoints,
    misnamed_files,
    read_document,
    run_of,
    shape_of,
)
from pretraining.checkpoint.reader import file_faults
from pretraining.checkpoint.writer import Chunk
from pretraining.config.commands import VerifyConfig
from pretraining.errors import CheckpointError
from pretraining.files import is_file
from pretraining.model.hf import parameter_shapes

Shapes = Mapping[str, tuple[int, ...]]


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
        print(f"reading {path}", file=sys.stderr)
        faults = faults_of(path, threads)
        for fault in faults:
            print(fault)
        if faults:
            faulty.append(path)
        else:
            manifest = read_document(path)
            size = sum(entry.bytes for entry in manifest.files.values())
            print(f"{path}: step {manifest.step}, {len(manifest.files):,} files, {size / 1e9:,.2f} GB: no faults")
    for path in left:
        print(f"{path} is incomplete: never read, and no fault")
    if faulty:
        raise CheckpointError(
            f"{len(faulty)} of {len(paths)} checkpoints {'is' if len(faulty) == 1 else 'are'} damaged; the faults are "
            "listed above"
        )


def faults_of(path: Path, threads: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a line a fault; everything in it is read, on as many threads."""
    try:
        manifest = read_document(path)
        parameters = {name: tuple(size) for name, size in parameter_shapes(shape_of(manifest)).items()}
    except CheckpointError as error:
        return [str(error)]
    misnamed = list(misnamed_files(path, manifest, (SHARD_SUFFIX, ".pt")))
    own = [name for name in manifest.files if Path(name).name == name]
    faults = file_faults(path, {name: manifest.files[name] for name in own}, threads)
    headers = []
    for name in () if faults else own:
        try:
            headers.append(read_header(path / name))
        except CheckpointError as error:
            faults.append(str(error) if name in FULL_FILES else f"{path / name} is no sound safetensors file: {error}")
    # What a bad file holds would be missed everywhere.
    return misnamed + (faults or _tensor_faults(path, chunks_by_name(headers), parameters, bool(manifest.data)))


def coverage_fault(chunks: Sequence[Chunk], shape: Sequence[int], dim: int = 0) -> str | None:
    """Where chunks do not hold each element of a tensor exactly once, from a dim on, or None.

    They are cut as meshes cut: along one dim after the other, so that in each dim two chunks begin and end together, or
    do not overlap.
    """
    if dim == len(shape):
        return None if len(chunks) == 1 else f"they are there {len(chunks)} times"
    slabs: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        slabs.setdefault((chunk.offsets[dim], chunk.ends[dim]), []).append(chunk)
    at = 0
    for (begin, end), inside in sorted(slabs.items()):
        if begin > at:
            return f"{at} to {begin - 1} of dim {dim} are missing"
        if begin < at:
            return f"{begin} to {min(at, end) - 1} of dim {dim} are there more than once"
        deeper = coverage_fault(inside, shape, dim + 1)
        if deeper is not None:
            return deeper if len(slabs) == 1 else f"of {begin} to {end - 1} of dim {dim}, {deeper}"
        at = end
    if at > shape[dim]:
        return f"{shape[dim]} to {at - 1} of dim {dim} are beyond its shape"
    return f"{at} to {shape[dim] - 1} of dim {dim} are missing" if at < shape[dim] else None


def _find(source: Path) -> tuple[list[Path], list[Path]]:
    """The checkpoints to check, and what interrupted saves have left beside them."""
    if is_file(source / MANIFEST):
        return [source], []
    run = run_of(source)
    paths = committed_checkpoints(run)
    if not paths:
        raise CheckpointError(
            f"{source} is neither a checkpoint (a folder with {MANIFEST}) nor a run with some in {CHECKPOINTS}/. Give "
            "token files with --data_path"
        )
    return paths, incomplete_checkpoints(run)


def _tensor_faults(
    path: Path, chunks: Mapping[str, Sequence[StoredChunk]], parameters: Shapes, has_state: bool
) -> list[str]:
    """What is wrong with the tensors that the files of a checkpoint hold together."""
    faults = [f"{path} lacks {name}" for name in parameters if name not in chunks]
    owners = {name: _owner(name) for name in chunks}
    kept = {owner for name, owner in owners.items() if owner != name}
    if has_state or kept:
        faults += [f"{path} lacks the optimizer's state of {name}" for name in parameters if name not in kept]
    for name, found in chunks.items():
        places = f" (in {', '.join(sorted({stored.file for stored in found}))})"
        shape = parameters.get(owners[name])
        if shape is None:
            faults.append(f"{path}: {name} is no tensor of the model{places}")
            continue
        if owners[name] != name and all(stored.chunk.sizes == () for stored in found):
            shape = ()  # a count of updates
        dtypes = {str(stored.dtype) for stored in found}
        if len(dtypes) > 1:
            faults.append(f"{path}: the pieces of {name} are of different types, {', '.join(sorted(dtypes))}{places}")
        if any(len(stored.chunk.sizes) != len(shape) for stored in found):
            held = extent(stored.chunk for stored in found if len(stored.chunk.sizes) != len(shape))
            faults.append(f"{path}: {name} has the shape {list(held)}, not {list(shape)}{places}")
            continue
        fault = coverage_fault([stored.chunk for stored in found], shape)
        if fault is not None:
            faults.append(f"{path}: of {name}, of shape {list(shape)}, {fault}{places}")
    return faults


def _owner(name: str) -> str:
    """The parameter that a tensor belongs to: itself, or the one that the optimizer keeps it for."""
    return name.removeprefix(OPTIMIZER_PREFIX).partition(".")[2] if name.startswith(OPTIMIZER_PREFIX) else name
