"""Tensors of a start point, loaded in place; and a whole model, loaded into one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pretraining.checkpoint.forms import files_of
from pretraining.checkpoint.manifest import shape_of, tensor_state
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.start_point import CheckpointRef, find_newest
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import DamagedError
from pretraining.model.llama import Llama


def load(checkpoint: CheckpointRef, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors in place from a checkpoint of any form; a collective call that raises as `load_tensors`."""
    files = on_rank_zero(lambda: files_of(checkpoint.path, checkpoint.manifest))
    load_tensors(checkpoint.path, files, tensors, checkpoint.manifest)


def load_newest(source: Path, tensors: Mapping[str, torch.Tensor]) -> CheckpointRef:
    """Load tensors in place from the newest good checkpoint at a path, and return the checkpoint; a collective call."""
    damaged: dict[str, str] = {}
    while True:
        found = on_rank_zero(lambda: find_newest(source, damaged))
        try:
            load(found, tensors)
        except DamagedError as error:
            damaged[found.source] = str(error)
        else:
            return found


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
    found = load_newest(Path(path), tensor_state(dict(model.named_parameters()), None))
    return found, model.to(device=device, dtype=dtype).eval()
