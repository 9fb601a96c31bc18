"""What `from pretraining import …` gives besides settings: a trained model, in this process."""

from __future__ import annotations

from pathlib import Path

import torch

from pretraining.checkpoint.manifest import shape_of, tensor_state
from pretraining.checkpoint.start_point import find_checkpoint, load
from pretraining.config.training import CheckpointConfig
from pretraining.model.llama import Llama


def load_model(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """Loads a trained model into this process, on one device, for evaluation.

    Args:
        path: a run's folder (its newest sound checkpoint is taken), a checkpoint, sharded or full, or a Hugging Face
            folder of a Llama.
        device: where to put it.
        dtype: of its parameters.

    Returns:
        The model in evaluation mode; it takes token ids [B, S] and returns logits [B, S, V].

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is of no Llama.
    """
    found = find_checkpoint(CheckpointConfig(ckpt_save_path=str(path), ckpt_load_path=str(path)))
    assert found is not None  # a load path without a checkpoint is an error
    with torch.device("meta"):
        model = Llama(shape_of(found.manifest))
    model.to_empty(device="cpu")
    model.tie_weights()
    load(found, tensor_state(dict(model.named_parameters()), None))
    return model.to(device=device, dtype=dtype).eval()
