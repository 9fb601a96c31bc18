"""Sliding windows of Hugging Face models: the layers that have one are those that transformers gives one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining.model.families import FAMILIES
from pretraining.model.hf import config_document, shape_of_document
from pretraining.model.llama import Llama

SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rope_theta": 1e4},
}
WINDOW = 8
ON = {"use_sliding_window": True, "sliding_window": WINDOW}
SLIDING, FULL = ["sliding_attention"] * 4, ["full_attention"] * 4


def document(family: str, **entries: Any) -> dict[str, Any]:
    return {**SIZES, "model_type": family, "architectures": [FAMILIES[family].architecture], **entries}


def model_of(config: dict[str, Any], folder: Path) -> Any:
    """Return the random model that transformers builds from a config.json, the same weights each time."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand_like(parameter) - 0.5)
    return model


@pytest.mark.parametrize(
    ("family", "entries", "window"),
    [
        ("qwen2", {**ON, "layer_types": SLIDING, "max_window_layers": 99}, WINDOW),
        ("qwen2", {**ON, "layer_types": FULL, "max_window_layers": 0}, None),
        ("qwen2", ON, None),  # its first 28 layers have none
        ("qwen3", {**ON, "max_window_layers": 0}, WINDOW),
        ("qwen3", {**ON, "max_window_layers": 0, "layer_types": ["attention"] * 4}, None),
        ("smollm3", {**ON, "layer_types": SLIDING}, WINDOW),
        ("smollm3", {**ON, "no_rope_layers": [0] * 4}, WINDOW),  # layers without rotation have the window
        ("smollm3", {**ON, "no_rope_layers": [1] * 4}, None),
        ("smollm3", {"sliding_window": WINDOW}, None),
        ("mistral", {"sliding_window": WINDOW}, WINDOW),
        ("mistral", {"sliding_window": WINDOW, "layer_types": FULL}, None),  # it is read as a ministral
        ("llama", {"layer_types": FULL}, None),
    ],
)
def test_windows_are_those_of_transformers(
    family: str, entries: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    config = document(family, **entries)
    shape, theirs = shape_of_document(config, "c"), model_of(config, tmp_path)
    ours = Llama(shape)
    ours.load_state_dict(theirs.state_dict(), strict=not shape.tie_word_embeddings)
    tokens = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = theirs(tokens).logits
        apart = (ours.eval()(tokens) - logits).abs()
        # Attention here covers all tokens, so only a model with a window differs, and only beyond it.
        assert shape.sliding_window == window and apart[:, :WINDOW].max() <= 2e-5
        assert bool(apart[:, WINDOW:].max() > 0.1) is (window is not None)
        again = model_of(config_document(shape, "float32", 64, None, None), tmp_path)
        assert torch.equal(again(tokens).logits, logits)
