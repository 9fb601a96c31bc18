"""Whether the files of a checkpoint hold, together, each element of its model exactly once.

    manifest            -> which tensors have to be there, of which shapes and types
    headers of the files -> the chunks of each tensor    -> what is missing, there twice, or of another kind

Every load and `pretrain verify` ask `tensor_faults`, so neither takes what the other refuses. Checksums that fit do not
help here: they are of whatever the program that wrote the files has written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from pretraining.checkpoint.headers import StoredChunk, extent
from pretraining.checkpoint.manifest import FULL_FILES, OPTIMIZER_PREFIX, Manifest, shape_of
from pretraining.checkpoint.writer import Chunk
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.recipes import settings_in
from pretraining.config.training import OptimizerConfig
from pretraining.errors import CheckpointError, ConfigError
from pretraining.model.hf import parameter_shapes
from pretraining.optim.optimizer import is_hidden_matrix

Stored = Mapping[str, Sequence[StoredChunk]]
"""The chunks of each tensor, by name."""

_MOMENTS = frozenset(name for entry in OPTIMIZERS.values() for name in entry.moments)
_NUMBERS = ("step", "mu_product")
"""What optimizers that ship keep for a parameter: tensors of its shape, and numbers; others may keep other shapes."""


def tensor_faults(folder: Path, stored: Stored, manifest: Manifest, rank: int = 0, world_size: int = 1) -> list[str]:
    """Says what is wrong with the tensors that the files of a checkpoint hold together, a line a fault.

    Args:
        manifest: whose model it should be, and whether it has an optimizer's state.
        rank, world_size: which of how many equal shares of the tensors to look at.

    Raises:
        CheckpointError: the manifest describes no model.
    """
    parameters = {name: tuple(size) for name, size in parameter_shapes(shape_of(manifest)).items()}
    faults = list(_missing(folder, stored, parameters, _optimizer_of(manifest))) if rank == 0 else []
    for name in sorted(stored)[rank::world_size]:
        fault = _fault_of(name, stored[name], parameters)
        if fault is not None:
            places = ", ".join(sorted({chunk.file for chunk in stored[name]}))
            faults.append(f"{folder}: {fault} (in {places})")
    return faults


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite; takes no memory, where `torch.isfinite` takes that of the tensor."""
    return tensor.numel() == 0 or bool(torch.linalg.vector_norm(tensor, math.inf).isfinite())


def check_finite(checkpoint: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight of a checkpoint; a CheckpointError unless all of its numbers are finite."""
    if not is_finite(tensor):
        raise CheckpointError(
            f"of a run that has diverged: {name} holds numbers that are not finite. Name an earlier checkpoint, which "
            "`pretrain list` shows",
            path=checkpoint,
        )
    return tensor


def _optimizer_of(manifest: Manifest) -> OptimizerConfig | None:
    """The optimizer whose state a checkpoint holds; None where that is not known, as of a user's own."""
    try:
        optimizer = settings_in(manifest.config, "config").optimizer if manifest.data else None
    except ConfigError:
        return None  # of a version with other settings
    return optimizer if optimizer is not None and optimizer.optimizer in OPTIMIZERS else None


def _missing(
    folder: Path, stored: Stored, parameters: Mapping[str, tuple[int, ...]], optimizer: OptimizerConfig | None
) -> Iterator[str]:
    for name in parameters:
        if name not in stored:
            yield f"{folder} lacks {name}"
    if optimizer is None:
        return
    for name, shape in parameters.items():
        moments = optimizer.moments(in_matrix=is_hidden_matrix(name, len(shape)))
        if any(f"{OPTIMIZER_PREFIX}{moment}.{name}" not in stored for moment in moments):
            yield f"{folder} lacks the optimizer's state of {name}"


def _split(name: str) -> tuple[str | None, str]:
    """What the optimizer calls a tensor (None: it is a parameter), and which parameter it belongs to."""
    if not name.startswith(OPTIMIZER_PREFIX):
        return None, name
    key, _, owner = name.removeprefix(OPTIMIZER_PREFIX).partition(".")
    return key, owner


def _fault_of(name: str, chunks: Sequence[StoredChunk], parameters: Mapping[str, tuple[int, ...]]) -> str | None:
    key, owner = _split(name)
    if owner not in parameters:
        return f"{name} is no tensor of the model"
    dtypes = {chunk.dtype for chunk in chunks}
    if len(dtypes) > 1:
        return f"the pieces of {name} are of different types, {', '.join(sorted(map(str, dtypes)))}"
    is_full = any(chunk.file in FULL_FILES for chunk in chunks)  # other programs write these, too
    (dtype,) = dtypes
    if key is None and not (dtype == torch.float32 or (is_full and dtype.is_floating_point)):
        return f"{name} is of type {dtype}, not torch.float32"
    if key in (*_MOMENTS, *_NUMBERS) and not dtype.is_floating_point:
        return f"{name} is of type {dtype}, not of floating-point numbers"
    shape = parameters[owner]
    if key in _NUMBERS:
        shape = ()
    dims = {len(chunk.chunk.sizes) for chunk in chunks}
    if key not in (None, *_MOMENTS, *_NUMBERS) and len(dims) == 1:
        shape = extent(chunk.chunk for chunk in chunks)  # of a user's own optimizer
    if dims != {len(shape)}:
        held = extent(chunk.chunk for chunk in chunks if len(chunk.chunk.sizes) != len(shape))
        return f"{name} has the shape {list(held)}, not {list(shape)}"
    fault = coverage_fault([chunk.chunk for chunk in chunks], shape)
    return None if fault is None else f"of {name}, of shape {list(shape)}, {fault}"


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
