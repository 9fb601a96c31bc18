"""`pretrain import`: a Hugging Face Llama becomes a run's checkpoint of step 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.checkpoint.checkpoint_files import SHAPES
from unit.checkpoint.test_hf_import import sharded, single, weights

from pretraining.checkpoint.forms import read_manifest
from pretraining.checkpoint.manifest import shape_of
from pretraining.checkpoint.reader import open_tensors, read_tensor
from pretraining.config.recipes import settings_in
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import CheckpointError
from pretraining.tools import import_weights as module
from pretraining.tools.commands import ExportConfig, ImportConfig
from pretraining.tools.export import export as export_model
from pretraining.tools.import_weights import import_weights
from pretraining.tools.verify import faults_of


def run_import(root: Path) -> None:
    import_weights(ImportConfig(str(root / "m"), str(root / "run")))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("layout", [single, sharded])
def test_the_checkpoint_holds_the_weights_in_float32_and_has_no_faults(
    tmp_path: Path,
    shape: LlamaShape,
    layout: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 5000)
    given = weights(shape, torch.bfloat16)
    layout(tmp_path / "m", given, shape)
    run_import(tmp_path)
    folder = tmp_path / "run/checkpoints/step_0_ckp"
    manifest = read_manifest(folder)
    assert faults_of(folder) == [] and shape_of(manifest) == shape and len(manifest.files) > 2
    assert resolve_shape(settings_in(manifest.config, "c").model) == shape
    read = open_tensors(folder, manifest.files)
    assert read.chunks.keys() == given.keys()
    assert all(torch.equal(read_tensor(read, name), value.float()) for name, value in given.items())
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_0_ckp"]


def test_a_run_with_checkpoints_is_left_alone_and_a_bad_folder_makes_none(tmp_path: Path) -> None:
    weights_file = single(tmp_path / "m") / "model.safetensors"
    run_import(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        run_import(tmp_path)
    assert refusal.value.path == tmp_path / "run"
    weights_file.unlink()
    with pytest.raises(CheckpointError) as no_weights:
        import_weights(ImportConfig(str(tmp_path / "m"), str(tmp_path / "other")))
    assert no_weights.value.path == tmp_path / "m"
    assert not (tmp_path / "other").exists()


def export(root: Path, name: str) -> tuple[dict[str, Any], str]:
    export_model(ExportConfig(ckpt_load_path=str(root / "run"), output_path=str(root / name)))
    return json.loads((root / name / "config.json").read_text()), (root / name / "README.md").read_text()


@pytest.mark.parametrize("end", [7, [7, 8]])
def test_an_export_keeps_context_and_tokens_of_the_imported_model_and_its_card_names_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int | list[int]
) -> None:
    folder = tmp_path / "snapshot"
    train_tokenizer(["text"] * 5, 260).save(single(folder, shape=replace(SHAPES["plain"], vocab_size=260)))
    document = json.loads((folder / "config.json").read_text())
    changed = {"bos_token_id": 3, "eos_token_id": end, "max_position_embeddings": 77}
    (folder / "config.json").write_text(json.dumps(document | changed))
    (folder / "README.md").write_text("---\nlicense: llama3.2\nlanguage: [en]\n---\n# A llama\n")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(folder))
    import_weights(ImportConfig("someone/llama", str(tmp_path / "run")))
    manifest = read_manifest(tmp_path / "run/checkpoints/step_0_ckp")
    assert settings_in(manifest.config, "c").data.tokenizer_path == str(folder)
    config, card = export(tmp_path, "out")
    assert {name: config[name] for name in changed} == changed
    assert card.startswith("---\n") and '\nlicense: "llama3.2"\nbase_model: "someone/llama"\n---\n' in card
    (tmp_path / "run/imported.json").write_text("{")
    with pytest.raises(CheckpointError) as damage:
        export(tmp_path, "damaged")
    assert damage.value.path == tmp_path / "run/imported.json"


@pytest.mark.parametrize("card", ["no header", "---\nlicense: [a]\n---\n", "---\n{\n---\n", None])
def test_unknown_facts_of_an_imported_model_are_left_out(tmp_path: Path, card: str | None) -> None:
    folder = single(tmp_path / "m")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"bos_token_id": {"a": 1}, "eos_token_id": []}))
    if card is not None:
        (folder / "README.md").write_text(card)
    run_import(tmp_path)
    config, written = export(tmp_path, "out")
    assert config["bos_token_id"] is None and config["eos_token_id"] is None
    assert "license:" not in written and "base_model:" not in written and str(tmp_path) not in written
