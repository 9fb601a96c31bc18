"""The public names of `pretraining`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers import run_command
from training_runs import TINY

import pretraining
from pretraining.cli import main


def test_every_public_name_stays_whatever_is_imported_and_settings_need_no_torch() -> None:
    """An imported sub-module would replace a public name of the same spelling."""
    program = """
import importlib, pathlib, sys, pretraining
from pretraining import TrainConfig, ModelConfig
TrainConfig(model=ModelConfig(model_variant="tiny"))
assert "torch" not in sys.modules and not hasattr(pretraining, "train_everything")
names = pretraining.__all__
before = {name: getattr(pretraining, name) for name in names}
root = pathlib.Path(pretraining.__file__).parent
for path in sorted(root.rglob("*.py")):
    importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"))
assert {name: getattr(pretraining, name) for name in names} == before
assert set(names) <= set(dir(pretraining)) and all(callable(before[name]) for name in names if name != "__version__")
"""
    run_command([sys.executable, "-c", program])


def test_a_model_is_loaded_from_a_run_a_checkpoint_and_an_export(tmp_path: Path) -> None:
    flags = [*TINY, "use_dummy_dataset=true", "num_steps=2", f"ckpt_save_path={tmp_path / 'run'}"]
    main(["train", *flags, "tie_word_embeddings=true"])
    main(["export", f"ckpt_load_path={tmp_path / 'run'}", f"output_path={tmp_path / 'hf'}", "dtype=float32"])
    main(["export", f"ckpt_load_path={tmp_path / 'run'}", f"output_path={tmp_path / 'full'}", "format=full"])
    tokens = torch.arange(8).reshape(1, 8)
    logits = []
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_2_ckp", tmp_path / "hf", tmp_path / "full"):
        model = pretraining.load_model(path)
        assert not model.training and model.lm_head.weight is model.model.embed_tokens.weight
        with torch.no_grad():
            logits.append(model(tokens))
    assert logits[0].shape == (1, 8, 64) and all(torch.equal(logits[0], each) for each in logits[1:])
    assert pretraining.load_model(tmp_path / "run", dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
