"""Reads checkpoints wholly and names every fault: `pretrain verify <checkpoint or run>`.

    manifest -> on threads, a file at a time: presence, size, checksum -> headers -> pieces of each tensor: each element
    once, shapes as of the model in the manifest -> faults

A start looks at sizes and checksums. Here it is also looked at what the files say, so that a fault of the program that
wrote them, with a checksum that fits, is found as well. Faults are shown as they are found, with the place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from safetensors import safe_open

from pretraining.checkpoint.layout import Box
from pretraining.checkpoint.listing import (
    CHECKPOINTS,
    MANIFEST,
    committed_checkpoints,
    incomplete_checkpoints,
    read_document,
)
from pretraining.checkpoint.pt_files import (
    ITERATION_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    SCHEDULE_FILE,
    FullFiles,
    is_full,
    load_file,
)
from pretraining.checkpoint.sources import check_content, extent, header_of
from pretraining.checkpoint.state import OPTIMIZER_PREFIX, FileEntry, Manifest, shape_of
from pretraining.checkpoint.tensor_files import SUFFIX, StoredPiece
from pretraining.config.commands import VerifyConfig
from pretraining.errors import CheckpointError
from pretraining.model.hf import parameter_shapes

Shapes = Mapping[str, tuple[int, ...]]


def verify_checkpoints(
    config: VerifyConfig,
    show: Callable[[str], None] = print,
    note: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> None:
    """Check a checkpoint, or all of a run.

    Args:
        config: which.
        show: prints a fault, as it is found, or a line of the summary.
        note: prints progress.

    Raises:
        CheckpointError: there are faults, or there is nothing to check.
    """
    assert config.ckpt_path is not None
    source = Path(config.ckpt_path)
    paths, left = _find(source)
    faulty = []
    threads = config.num_workers or min(32, cpu_count() or 1)
    for path in paths:
        note(f"reading {path}")
        faults = faults_of(path, threads)
        for fault in faults:
            show(fault)
        if faults:
            faulty.append(path)
        else:
            manifest = read_document(path)
            size = sum(entry.bytes for entry in manifest.files.values())
            show(f"{path}: step {manifest.step}, {len(manifest.files):,} files, {size / 1e9:,.2f} GB: no faults")
    for path in left:
        show(f"{path} is incomplete: never read, and no fault")
    if faulty:
        raise CheckpointError(
            f"{len(faulty)} of {len(paths)} checkpoints {'is' if len(faulty) == 1 else 'are'} damaged; the faults are "
            "listed above"
        )


def faults_of(path: Path, threads: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a line a fault; everything in it is read.

    Args:
        path: of a folder with a manifest.
        threads: that read files.
    """
    try:
        manifest = read_document(path)
        parameters = {name: tuple(size) for name, size in parameter_shapes(shape_of(manifest)).items()}
    except CheckpointError as error:
        return [str(error)]
    faults = _strangers(path, manifest)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        found = list(pool.map(lambda name: _file_fault(path, name, manifest.files[name]), manifest.files))
    faults += [fault for fault in found if fault]
    sound = [name for name, fault in zip(manifest.files, found, strict=True) if fault is None]
    if len(sound) < len(found):
        return faults  # what a bad file holds would be missed everywhere
    if is_full(manifest.files):
        return faults + _full_faults(path, parameters, bool(manifest.data))
    pieces: dict[str, list[StoredPiece]] = {}
    for name in sound:
        fault = _structure_fault(path / name)
        try:
            for piece in header_of(path / name):
                pieces.setdefault(piece.name, []).append(piece)
        except CheckpointError as error:
            fault = fault or str(error)
        faults += [fault] if fault else []
    return faults + _tensor_faults(path, pieces, parameters, bool(manifest.data))


def coverage_fault(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Where boxes do not hold each element of a tensor exactly once, or None.

    They are cut as meshes cut: along one dim after the other, so that in each dim two boxes begin and end together, or
    do not overlap.

    Args:
        boxes: parts of a tensor.
        shape: of the tensor.
    """
    return _coverage_fault(boxes, shape, 0)


def _coverage_fault(boxes: Sequence[Box], shape: Sequence[int], dim: int) -> str | None:
    if dim == len(shape):
        return None if len(boxes) == 1 else f"they are there {len(boxes)} times"
    slabs: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        slabs.setdefault((box.offsets[dim], box.offsets[dim] + box.sizes[dim]), []).append(box)
    at = 0
    for (begin, end), inside in sorted(slabs.items()):
        if begin > at:
            return f"{at} to {begin - 1} of dim {dim} are missing"
        if begin < at:
            return f"{begin} to {min(at, end) - 1} of dim {dim} are there more than once"
        deeper = _coverage_fault(inside, shape, dim + 1)
        if deeper is not None:
            return deeper if len(slabs) == 1 else f"of {begin} to {end - 1} of dim {dim}, {deeper}"
        at = end
    if at > shape[dim]:
        return f"{shape[dim]} to {at - 1} of dim {dim} are beyond its shape"
    return f"{at} to {shape[dim] - 1} of dim {dim} are missing" if at < shape[dim] else None


def _find(source: Path) -> tuple[list[Path], list[Path]]:
    """The checkpoints to check, and what interrupted saves have left beside them."""
    if (source / MANIFEST).is_file():
        return [source], []
    run = source.parent if source.name == CHECKPOINTS else source
    paths = committed_checkpoints(run)
    if not paths:
        raise CheckpointError(
            f"{source} is neither a checkpoint (a folder with {MANIFEST}) nor a run with some in {CHECKPOINTS}/. Give "
            "token files with --data_path"
        )
    return paths, incomplete_checkpoints(run)


def _strangers(path: Path, manifest: Manifest) -> list[str]:
    """Tensor files that the manifest does not name: a reader of the folder would take them for parts."""
    here = {file.name for suffix in (SUFFIX, ".pt") for file in path.glob(f"*{suffix}")}
    strangers = sorted(here - manifest.files.keys())
    return [f"{path / name} is no part of the checkpoint: its manifest does not name it" for name in strangers]


def _file_fault(path: Path, name: str, entry: FileEntry) -> str | None:
    """What is wrong with a file as a whole."""
    if Path(name).name != name:
        return f"{path / MANIFEST} names {name!r}, which is no file of this folder"
    try:
        check_content(path / name, entry)
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError:
        return f"{path / name} is missing"
    except OSError as error:
        return f"{path / name} cannot be read: {error.strerror or error}"
    return None


def _structure_fault(path: Path) -> str | None:
    """What the safetensors library has against a file: tensors must fill it without holes and overlaps."""
    try:
        with safe_open(path, framework="pt"):
            return None
    except Exception as error:  # its own kinds are no common class's
        return f"{path} is no sound safetensors file: {error}"


def _tensor_faults(
    path: Path, pieces: Mapping[str, Sequence[StoredPiece]], parameters: Shapes, has_state: bool
) -> list[str]:
    """What is wrong with the tensors that the files of a checkpoint hold together."""
    faults = [f"{path} lacks {name}" for name in parameters if name not in pieces]
    owners = {name: _owner(name) for name in pieces}
    kept = {owner for name, owner in owners.items() if owner != name}
    if has_state or kept:
        faults += [f"{path} lacks the optimizer's state of {name}" for name in parameters if name not in kept]
    for name, found in pieces.items():
        places = f" (in {', '.join(sorted({piece.file for piece in found}))})"
        shape = parameters.get(owners[name])
        if shape is None:
            faults.append(f"{path}: {name} is no tensor of the model{places}")
            continue
        if owners[name] != name and all(piece.box.sizes == () for piece in found):
            shape = ()  # a count of updates
        dtypes = {str(piece.dtype) for piece in found}
        if len(dtypes) > 1:
            faults.append(f"{path}: the pieces of {name} are of different types, {', '.join(sorted(dtypes))}{places}")
        if any(len(piece.box.sizes) != len(shape) for piece in found):
            held = extent(piece.box for piece in found if len(piece.box.sizes) != len(shape))
            faults.append(f"{path}: {name} has the shape {list(held)}, not {list(shape)}{places}")
            continue
        fault = coverage_fault([piece.box for piece in found], shape)
        if fault is not None:
            faults.append(f"{path}: of {name}, of shape {list(shape)}, {fault}{places}")
    return faults


def _full_faults(path: Path, parameters: Shapes, has_state: bool) -> list[str]:
    """The same for the four files."""
    try:
        tensors = FullFiles(path, {})
        for name in (SCHEDULE_FILE, ITERATION_FILE):
            load_file(path / name)
    except CheckpointError as error:
        return [str(error)]
    file_of = {name: MODEL_FILE if _owner(name) == name else OPTIMIZER_FILE for name in tensors.shapes()}
    pieces = {
        name: [StoredPiece(name, tensors.dtype(name), Box((0,) * len(shape), shape), file_of[name], 0)]
        for name, shape in tensors.shapes().items()
    }
    return _tensor_faults(path, pieces, parameters, has_state)


def _owner(name: str) -> str:
    """The parameter that a tensor belongs to: itself, or the one that the optimizer keeps it for."""
    return name.removeprefix(OPTIMIZER_PREFIX).partition(".")[2] if name.startswith(OPTIMIZER_PREFIX) else name
