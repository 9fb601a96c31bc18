"""Tensors of a start point, loaded in place; and a whole model, loaded into one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pretraining.checkpoint.chunks import local_chunk, local_tensor, tensor_state
from pretraining.checkpoint.headers import read_headers
from pretraining.checkpoint.hf_import import EMBEDDING, HEAD
from pretraining.checkpoint.manifest import Files, shape_of
from pretraining.checkpoint.reader import load_tensors, read_tensor
from pretraining.checkpoint.start_point import CheckpointRef, find_newest
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import DamagedError
from pretraining.model.llama import Llama

_ROWS_AT_ONCE = 2**12


def load(checkpoint: CheckpointRef, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors in place from a checkpoint of any form; a collective call that raises as `load_tensors`.

    If the checkpoint has fewer rows of the vocabulary, each new row is the mean of its rows, as Hewitt (2021) proposes:
    a new token is then never much likelier than all others.
    """
    files = checkpoint.manifest.files
    rows = shape_of(checkpoint.manifest).vocab_size
    resized = [name for name in (EMBEDDING, HEAD) if name in tensors and tensors[name].shape[0] != rows]
    load_tensors(checkpoint.path, files, tensors, checkpoint.manifest, resized)
    for name in resized:
        if tensors[name].shape[0] > rows:
            mean = on_rank_zero(partial(_mean_row, checkpoint.path, files, name))
            _fill_rows(tensors[name], rows, mean)


def _mean_row(folder: Path, files: Files, name: str) -> torch.Tensor:
    """Return the mean of a matrix's rows, float32 [D], added in order: the same bits on every layout."""
    values = read_tensor(read_headers(folder, files), name)
    total = np.zeros(values.shape[1])
    for block in values.split(_ROWS_AT_ONCE):
        total += np.add.reduce(block.double().numpy(), axis=0)
    return torch.from_numpy(total / len(values)).float()


def _fill_rows(tensor: torch.Tensor, first: int, row: torch.Tensor) -> None:
    """Set the rows of a matrix from `first` on, in this process's shard."""
    chunk, local = local_chunk(tensor), local_tensor(tensor)
    part = row[chunk.offsets[1] : chunk.ends[1]]
    local[max(0, first - chunk.offsets[0]) :] = part.to(local.device, local.dtype)


def load_newest(source: Path, tensors: Mapping[str, torch.Tensor]) -> CheckpointRef:
    """Load tensors in place from the newest good checkpoint at a path, and return the checkpoint; a collective call."""
    damaged: dict[str, str] = {}
    while True:
        checkpoint = on_rank_zero(lambda: find_newest(source, damaged))
        try:
            load(checkpoint, tensors)
        except DamagedError as error:
            damaged[checkpoint.source] = str(error)
        else:
            return checkpoint


def load_model(path: str, device: torch.device, dtype: torch.dtype) -> tuple[CheckpointRef, Llama]:
    """Load a model into one process, from a checkpoint, a run's newest good one, or a Hugging Face folder.

    Returns:
        The checkpoint, and the model in evaluation mode.

    Raises:
        CheckpointError: there is no checkpoint, all are damaged, or the model is no Llama.
    """
    shape = shape_of(find_newest(Path(path)).manifest)
    with torch.device("meta"):
        model = Llama(shape)
    model.to_empty(device="cpu")
    model.tie_weights()
    checkpoint = load_newest(Path(path), tensor_state(dict(model.named_parameters()), None))
    return checkpoint, model.to(device=device, dtype=dtype).eval()
