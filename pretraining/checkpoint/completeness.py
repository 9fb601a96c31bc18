"""Check that the files of a checkpoint hold each element of its model exactly once.

    manifest      -> tensors that must be there, with shapes and types
    StoredTensors -> chunks of each tensor                              -> missing, duplicated or wrong tensors

Every load and `pretrain verify` call `tensor_faults`, so both accept the same checkpoints. Checksums do not help here:
they match whatever the writing program has written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.headers import StoredTensors
from pretraining.checkpoint.manifest import FULL_FILES, OPTIMIZER_PREFIX, Manifest, shape_of
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.recipe_files import settings_in
from pretraining.config.training import OptimizerConfig
from pretraining.errors import CheckpointError, ConfigError
from pretraining.model.hf import parameter_shapes
from pretraining.optim.optimizer import is_hidden_matrix
from pretraining.text import list_some

FAULTS_SHOWN = 3
_MOMENTS = frozenset(name for entry in OPTIMIZERS.values() for name in entry.moments)
_NUMBERS = ("step", "mu_product")
"""Scalar optimizer state; moments have the shape of their parameter. A user-defined optimizer may use any shape."""


def tensor_faults(stored: StoredTensors, manifest: Manifest, share: slice = slice(None)) -> list[str]:
    """Return what is wrong with the tensors of a checkpoint's files, one line per fault.

    Args:
        share: share of the tensors to check.

    Raises:
        CheckpointError: the manifest describes no model.
    """
    shape = shape_of(manifest)
    parameters = {name: tuple(size) for name, size in parameter_shapes(shape).items()}
    optimizer, faults = _optimizer_of(manifest), []
    has_own = optimizer is not None and optimizer.optimizer not in OPTIMIZERS
    has_state = optimizer is not None and not has_own and bool(manifest.data)
    for name in list(parameters)[share]:
        in_matrix = is_hidden_matrix(name, len(parameters[name]))
        moments = optimizer.moments(in_matrix=in_matrix) if optimizer is not None and has_state else ()
        if name not in stored.chunks:
            faults.append(f"{stored.folder} lacks {name}")
        if any(f"{OPTIMIZER_PREFIX}{moment}.{name}" not in stored.chunks for moment in moments):
            faults.append(f"{stored.folder} lacks the optimizer state of {name}")
    for name in sorted(stored.chunks)[share]:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and shape.tie_word_embeddings):
            continue  # computed from the shape, or the embedding's second name: not read
        files = sorted({chunk.file for chunk in stored.chunks[name]})
        is_exact = bool(manifest.recorded_files) and not any(file in FULL_FILES for file in files)
        fault = _tensor_fault(name, stored, parameters, is_exact, has_own)
        if fault is not None:
            faults.append(f"{stored.folder}: {fault} (in {', '.join(files)})")
    return faults


def first_faults(faults: Sequence[str]) -> str:
    """Return the first faults as one text, and the number of others."""
    return list_some(faults, FAULTS_SHOWN, "; ")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values of a tensor are finite, without the copy that `torch.isfinite` makes."""
    return tensor.numel() == 0 or bool(torch.linalg.vector_norm(tensor, math.inf).isfinite())


def check_finite(checkpoint: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight of a checkpoint; raise a CheckpointError unless all its values are finite."""
    if not is_finite(tensor):
        raise CheckpointError(
            f"{name} has values that are not finite: the run has diverged. Name an earlier one (`pretrain list`)",
            path=checkpoint,
        )
    return tensor


def _optimizer_of(manifest: Manifest) -> OptimizerConfig | None:
    """Return the optimizer of the run that saved a checkpoint; None if it is unknown."""
    try:
        return settings_in(manifest.config, "config").optimizer
    except ConfigError:
        return None  # written by a version with other settings


def _tensor_fault(
    name: str, stored: StoredTensors, parameters: Mapping[str, tuple[int, ...]], is_exact: bool, has_own: bool
) -> str | None:
    """Return what is wrong with a tensor, or None; weights must be float32 if `is_exact`, else any float type.

    Args:
        has_own: whether the optimizer is user-defined; then states have any shape and type, whatever their names.
    """
    chunks = stored.chunks[name]
    is_weight, owner = not name.startswith(OPTIMIZER_PREFIX), name
    if not is_weight:  # optimizer.exp_avg.<parameter>
        key, _, owner = name.removeprefix(OPTIMIZER_PREFIX).partition(".")
    if owner not in parameters:
        return f"{name} is no tensor of the model"
    dtypes, dims = {chunk.dtype for chunk in chunks}, {len(chunk.chunk.sizes) for chunk in chunks}
    if len(dtypes) > 1:
        return f"the chunks of {name} are of different types"
    (dtype,) = dtypes
    is_known = is_weight or (not has_own and key in (*_MOMENTS, *_NUMBERS))
    if (is_known and not dtype.is_floating_point) or (is_weight and is_exact and dtype != torch.float32):
        return f"{name} is of type {dtype}, not torch.float32"
    shape: tuple[int, ...] = parameters[owner]
    if not is_weight and (has_own or key not in _MOMENTS):
        shape = () if is_known else stored.shape(name)  # the latter: of a user-defined optimizer
    if dims != {len(shape)}:
        return f"{name} does not have the {len(shape)} dims of its shape {list(shape)}"
    fault = coverage_fault([chunk.chunk for chunk in chunks], shape)
    return None if fault is None else f"of {name}, of shape {list(shape)}, {fault}"


def coverage_fault(chunks: Sequence[Chunk], shape: Sequence[int], dim: int = 0) -> str | None:
    """Return where chunks do not hold each element of a tensor exactly once, from a dim on; None if they do.

    Meshes cut one dim after the other, so in each dim two chunks have the same range or do not overlap.
    """
    if dim == len(shape):
        return None if len(chunks) == 1 else f"{len(chunks)} chunks hold the same elements"
    slabs: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        slabs.setdefault((chunk.offsets[dim], chunk.ends[dim]), []).append(chunk)
    at = 0
    for (begin, end), inside in sorted(slabs.items()):
        if begin != at:
            return f"{min(begin, at)} to {max(begin, at) - 1} of dim {dim} are missing or duplicated"
        fault = coverage_fault(inside, shape, dim + 1)
        if fault is not None:
            return fault
        at = end
    return None if at == shape[dim] else f"dim {dim} ends at {at}, not at {shape[dim]}"
