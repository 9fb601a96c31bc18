"""What `from pretraining import …` gives besides settings: a trained model, in this process."""

from __future__ import annotations

from pathlib import Path

import torch

from pretraining.checkpoint import start_point
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
    return start_point.load_model(str(path), torch.device(device), dtype)[1]
