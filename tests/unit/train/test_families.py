"""Models of each family: folders of transformers are loaded, trained, exported, and read by transformers again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import first_quick
from torch import Tensor
from training_runs import TINY, losses_of
from unit.train.whole_runs import checkpoint, equal, refusal, start

from pretraining.api import load_model
from pretraining.cli import main

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{"mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16},
}
SLIDING = {"use_sliding_window": True, "sliding_window": 48, "layer_types": ["sliding_attention"] * 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with yarn": {"model_type": "llama", "rope_parameters": YARN},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 48},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3"},
    "qwen2 with a window": {"model_type": "qwen2", **SLIDING},
    "smollm3 with a window": {"model_type": "smollm3", **SLIDING},
    "granite": {
        **{"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
        **{"attention_multiplier": 0.1, "logits_scaling": 8.0},
    },
}
QUICK = ("qwen3", "olmo2", "granite")
MODEL_FLAGS = [flag for flag in TINY if flag.partition("=")[0] not in {*SIZES, "model_variant"}]
TOLERANCE = 2e-5


def save(folder: Path, entries: dict[str, Any]) -> Any:
    """Write a random model of transformers, whose norms and biases are not 1 and 0, and return it."""
    config = transformers.AutoConfig.for_model(**{**SIZES, **NO_TOKENS, **entries})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
            else:
                parameter.add_(torch.rand_like(parameter) - (0.5 if "norm" in name else 0))
    model.save_pretrained(folder)
    return model


def difference(folder: Path, ours: Path, tokens: Tensor) -> float:
    """Return the largest difference of logits between transformers in a folder and this project."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float((theirs(tokens).logits - load_model(ours)(tokens)).abs().max())


@pytest.fixture
def tokens() -> Iterator[Tensor]:
    yield torch.randint(SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", first_quick(*QUICK, *[each for each in MODELS if each not in QUICK]))
def test_a_model_of_transformers_is_trained_and_is_one_of_its_family_again(
    name: str, tokens: Tensor, tmp_path: Path
) -> None:
    folder, run, export = tmp_path / "model", tmp_path / "run", tmp_path / "export"
    save(folder, MODELS[name])
    assert difference(folder, folder, tokens) <= TOLERANCE
    flags = [f"ckpt_load_path={folder}", "seq_length=32", "fsdp_activation_checkpointing=true"]
    start(run, *flags, "selective_checkpointing=op", "document_mask=true", model=MODEL_FLAGS)
    main(["export", str(run), f"--output_path={export}", "--dtype=float32"])
    assert difference(export, run, tokens) <= TOLERANCE
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, export))
    assert (after["model_type"], after["architectures"]) == (before["model_type"], before["architectures"])
    # Stopped and resumed, without flags for the model, the run is the same; so is one with another checkpointing.
    for steps in (2, 2):
        start(tmp_path / "again", *flags, f"run_steps={steps}", "document_mask=true", model=MODEL_FLAGS)
    assert equal(checkpoint(tmp_path / "again", 4), checkpoint(run, 4)) and losses_of(run)[-1] < losses_of(run)[0]
    main(["sample", str(run), "--prompt_tokens=1,2", "--max_new_tokens=3", "--tokenizer_path=none"])
    main(["plan", f"--ckpt_load_path={folder}", "--gpu=h100", "--gpus=8", "--seq_length=32"])


@pytest.mark.parametrize("name", first_quick("qwen2 with a window", "mistral with a window", "smollm3 with a window"))
def test_a_sliding_window_is_accepted_while_the_sequence_fits_in_it(name: str, tmp_path: Path) -> None:
    save(tmp_path / "model", MODELS[name])
    load = f"ckpt_load_path={tmp_path / 'model'}"
    error = refusal(tmp_path / "run", load, "seq_length=49", model=MODEL_FLAGS)
    assert "--seq_length=49 exceeds the model's sliding window of 48 tokens" in str(error)
    start(tmp_path / "run", load, "seq_length=48", "num_steps=1", model=MODEL_FLAGS)
    with pytest.raises(SystemExit):
        main(["sample", str(tmp_path / "run"), "--prompt_tokens=1,2", "--max_new_tokens=47"])
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'export'}"])
    assert json.loads((tmp_path / "export/config.json").read_text())["sliding_window"] == 48
    start(tmp_path / "longer", load, "seq_length=49", "sliding_window=0", "num_steps=1", model=MODEL_FLAGS)


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        (["qk_norm=head"], "qwen3"),
        (["attention_bias=qkv"], "qwen2"),
        (["hidden_size=36", "num_attention_heads=8", "head_dim=4"], "mistral"),
        (["logits_scaling=2"], "granite"),
    ],
)
def test_a_model_from_scratch_is_exported_as_a_family_that_can_hold_it(
    flags: list[str], family: str, tmp_path: Path
) -> None:
    names = {flag.partition("=")[0] for flag in flags}
    model = [flag for flag in TINY if flag.partition("=")[0] not in names]
    start(tmp_path / "run", *flags, "num_steps=1", model=model)
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'export'}", "--dtype=float32"])
    assert json.loads((tmp_path / "export/config.json").read_text())["model_type"] == family
    tokens = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(2))
    assert difference(tmp_path / "export", tmp_path / "run", tokens) <= TOLERANCE


def test_a_model_that_no_family_can_hold_is_refused_with_the_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", "qk_norm=head", "logits_scaling=2", "num_steps=1")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'export'}"])
    printed = "".join(capsys.readouterr())
    assert "a llama has no logits_scaling=2.0, qk_norm=head" in printed and not (tmp_path / "export").exists()
