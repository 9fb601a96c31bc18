"""`pretrain export` computes the same in transformers and appears whole; `pretrain import` reads it back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from unit.checkpoint.checkpoint_files import (
    SHAPES,
    config_of,
    file_entry,
    flip_byte,
    manifest_of,
    tensors_of,
    write_full_form,
    write_manifest,
    write_sharded,
)
from unit.checkpoint.test_hf_import import sharded, single, weights

from pretraining.api import load_model
from pretraining.checkpoint import pt_files
from pretraining.checkpoint.manifest import FULL_FILES, LOSS_STATE, MANIFEST, shape_of
from pretraining.checkpoint.reader import open_tensors, read_tensor
from pretraining.checkpoint.run_folder import read_manifest
from pretraining.config.recipe_files import dump_config, settings_in
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import CheckpointError, ConfigError, DataError
from pretraining.launch.machine import MachineMemory
from pretraining.model.hf import ORIGIN_FILE, parameter_shapes
from pretraining.text import parse_bytes
from pretraining.tools import import_weights as import_module
from pretraining.tools.command_settings import ExportConfig, ImportConfig
from pretraining.tools.export import export
from pretraining.tools.import_weights import import_weights
from pretraining.tools.verify import faults_of

PLAIN, SHARD = SHAPES["plain"], "shard-00003-model-00002-of-00002.safetensors"


EVALUATED = {LOSS_STATE: {"value": 2.75, "step": 3}}


def make_run(root: Path, shape: LlamaShape = PLAIN, *, full: bool = False, **data: Any) -> dict[str, torch.Tensor]:
    """A run with checkpoints of steps 2 and 3; the tensors of the latter."""
    config = dump_config(config_of(shape, **data))
    write_sharded(root / "checkpoints" / "step_2_ckp", tensors_of(shape, seed=2), manifest_of(shape, 2))
    write = write_full_form if full else write_sharded
    manifest = manifest_of(shape, 3, config=config, state=EVALUATED)
    return write(root / "checkpoints" / "step_3_ckp", tensors_of(shape), manifest)


def run_export(root: Path, **settings: Any) -> None:
    export(ExportConfig(**{"ckpt_load_path": str(root / "run"), "output_path": str(root / "out"), **settings}))


@pytest.mark.parametrize(
    ("shape", "full"), [*((shape, False) for shape in SHAPES.values()), (PLAIN, True)], ids=[*SHAPES, "full"]
)
def test_transformers_compute_the_same_logits(
    tmp_path: Path, shape: LlamaShape, full: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    make_run(tmp_path / "run", shape, full=full)
    run_export(tmp_path, dtype="float32", max_shard_size="6KB")
    model, information = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(information.values()), information
    assert model.dtype == torch.float32 and len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    tokens = torch.randint(shape.vocab_size, (2, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs, ours = model(tokens).logits, load_model(tmp_path / "run")(tokens)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    assert "from_pretrained" in capsys.readouterr().out


def test_float32_keeps_every_bit_and_bfloat16_rounds_each_weight_in_files_as_large_as_asked(tmp_path: Path) -> None:
    tensors = make_run(tmp_path / "run")
    run_export(tmp_path, dtype="float32", output_path=str(tmp_path / "exact"), max_shard_size="6KB")
    run_export(tmp_path)  # bfloat16 is the default
    index = exported_json(tmp_path / "exact", "model.safetensors.index.json")
    files = {path.name: load_file(path) for path in sorted((tmp_path / "exact").glob("*.safetensors"))}
    assert list(files) == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert all(sum(tensor.nbytes for tensor in held.values()) <= 6000 for held in files.values())
    rounded = load_file(tmp_path / "out" / "model.safetensors")
    assert list(index["weight_map"]) == list(parameter_shapes(PLAIN)) and rounded.keys() == index["weight_map"].keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(files[file][name], tensors[name]) and torch.equal(rounded[name], tensors[name].bfloat16())
    assert index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"]
    assert index["metadata"]["total_parameters"] == sum(map(torch.Tensor.numel, rounded.values()))
    sizes = {"6KB": 6000, "1.5 mb": 1_500_000, "2GiB": 2**31}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for name, dtype in (("exact", "float32"), ("out", "bfloat16")):
        assert exported_json(tmp_path / name, "config.json")["dtype"] == dtype
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def make_tokenizer(root: Path, *, template: bool = True, **entries: Any) -> str:
    """Write a tokenizer without a padding token; its end of text is token 0."""
    folder = root / "tokenizer"
    folder.mkdir(exist_ok=True)
    train_tokenizer(["some text to train on"] * 20, 270).save(folder)
    if template:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | entries))
    return str(folder)


def exported_json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_the_tokenizer_goes_along_from_the_run_or_from_a_flag(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path, shape = make_tokenizer(tmp_path), replace(PLAIN, vocab_size=300)
    make_run(tmp_path / "run", shape, tokenizer_path=path)
    make_run(tmp_path / "other", shape, sep_token=7, bos_token=1)
    first, second = tmp_path / "out", tmp_path / "second"
    run_export(tmp_path)
    run_export(tmp_path, ckpt_load_path=str(tmp_path / "other"), output_path=str(second), tokenizer_path=path)
    for folder, tokens in ((first, (None, 0)), (second, (1, 7))):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer("some text")["input_ids"]) == "some text"
        assert tokenizer.chat_template == "{{ messages }}"
        for name in ("config.json", "generation_config.json"):
            document = exported_json(folder, name)
            assert (document["bos_token_id"], document["eos_token_id"]) == tokens
        assert f"AutoTokenizer.from_pretrained('{folder.name}')" in (folder / "README.md").read_text()
        # Rows are padded with the end of text, but transformers would not train the embedding of a padding token.
        assert tokenizer.pad_token_id == document["pad_token_id"] == tokens[1]
        assert tokenizer.model_max_length == max(64, shape.max_position_embeddings)
        assert exported_json(folder, "config.json")["pad_token_id"] is None
    make_tokenizer(tmp_path, template=False, pad_token="e", chat_template="{{ 1 }}")
    run_export(tmp_path, output_path=str(tmp_path / "own"))
    config = exported_json(tmp_path / "own", "tokenizer_config.json")
    assert (config["pad_token"], config["chat_template"]) == ("e", "{{ 1 }}")
    assert exported_json(tmp_path / "own", "config.json")["pad_token_id"] > 0


def test_a_first_token_that_training_never_saw_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
    begin = [("<|endoftext|>", 0)]
    library.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", special_tokens=begin)
    library.save(f"{path}/tokenizer.json")
    for number, bos_token in enumerate((None, 0)):
        shape = replace(PLAIN, vocab_size=300)
        make_run(tmp_path / f"run{number}", shape, tokenizer_path=path, bos_token=bos_token)
        run_export(tmp_path, ckpt_load_path=str(tmp_path / f"run{number}"), output_path=str(tmp_path / f"out{number}"))
        (message,) = caplog.messages
        assert "puts token 0 before every text, but the run had no bos_token" in message


def test_the_model_card_names_settings_data_and_losses(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    make_run(tmp_path / "run", data_path="/secret/place")
    run_export(tmp_path, output_path=str(tmp_path / "a|<b>[*"))
    _, header, body = (tmp_path / "a|<b>[*" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    for line in (
        "# a\\|&lt;b&gt;\\[\\*",
        "- held-out loss: 2.7500 nats per token",
        "- optimizer: adamw, learning rate 0.0003, cosine",
        "- data, by weight: a 33.33%, b 66.67%",
    ):
        assert line in body.splitlines()
    assert ", 300 tokens in all\n" in body
    assert "/secret" not in body and "AutoTokenizer" not in body
    shape = replace(PLAIN, qk_norm="head", model_family="qwen3")
    imported = tmp_path / "imported/checkpoints/step_0_ckp"
    weights = {name: tensor for name, tensor in tensors_of(shape).items() if not name.startswith("optimizer.")}
    write_sharded(imported, weights, manifest_of(shape, 0, data={}))
    (imported / ORIGIN_FILE).write_text(json.dumps({"license": "apache-2.0", "base_model": "some/base"}))
    run_export(tmp_path, ckpt_load_path=str(tmp_path / "imported"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'tags: ["qwen3"]\n' in card and "- family: qwen3\n" in card and "optimizer" not in card
    assert "- license: apache-2.0\n- base model: some/base\n" in card


def test_a_lost_tokenizer_is_warned_of_and_a_named_one_must_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tokenizer(tmp_path)
    make_run(tmp_path / "run", tokenizer_path=str(tmp_path / "gone"))
    run_export(tmp_path)
    assert len(caplog.messages) == 2 and not (tmp_path / "out/tokenizer.json").exists()
    for named, kind in ((str(tmp_path / "gone"), DataError), (path, ConfigError)):
        with pytest.raises(kind):
            run_export(tmp_path, output_path=str(tmp_path / "b"), tokenizer_path=named)
    assert not (tmp_path / "b").exists()
    make_run(tmp_path / "own/run", tokenizer_path=path)  # accepted by its run
    caplog.clear()
    run_export(tmp_path / "own")
    assert " entries, but the model has " in caplog.messages[0] and not (tmp_path / "own/out/tokenizer.json").exists()


@pytest.mark.parametrize("full", [False, True])
def test_the_full_form_holds_the_same_tensors(tmp_path: Path, full: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_run(tmp_path / "run", full=full)
    run_export(tmp_path, format="full")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*FULL_FILES, MANIFEST}
    manifest = read_manifest(tmp_path / "out")
    source = open_tensors(tmp_path / "out", manifest.files)
    assert source.chunks.keys() == tensors.keys()
    assert all(torch.equal(read_tensor(source, name), value) for name, value in tensors.items())
    original = read_manifest(tmp_path / "run" / "checkpoints" / "step_3_ckp")
    assert replace(manifest, files={}) == replace(original, files={})
    assert list(torch.load(tmp_path / "out" / FULL_FILES[0], weights_only=True)) == list(parameter_shapes(PLAIN))
    assert "--ckpt_load_path=" in capsys.readouterr().out


def not_finite(folder: Path) -> None:
    weights = tensors_of(PLAIN)
    weights["model.norm.weight"][3] = -torch.inf
    shutil.rmtree(folder)
    write_sharded(folder, weights, manifest_of(PLAIN, 3, config=dump_config(config_of(PLAIN))))


def of_another_model(folder: Path) -> None:
    files = {path.name: file_entry(path) for path in folder.glob("*.safetensors")}
    write_manifest(folder, manifest_of(replace(PLAIN, num_hidden_layers=3)), files)


@pytest.mark.parametrize(
    ("spoil", "form", "said"),
    [
        *((lambda folder: flip_byte(folder / SHARD), form, "its checksum is") for form in ("hf", "full")),
        *((not_finite, form, "model.norm.weight") for form in ("hf", "full")),
        (of_another_model, "hf", "model.layers.2."),
    ],
)
def test_a_damaged_checkpoint_leaves_nothing(
    tmp_path: Path, spoil: Callable[[Path], None], form: str, said: str
) -> None:
    make_run(tmp_path / "run")
    spoil(tmp_path / "run/checkpoints/step_3_ckp")
    with pytest.raises(CheckpointError, match=re.escape(said)):
        run_export(tmp_path, format=form)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_existing_files_stay_and_unsuitable_sources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    run_export(tmp_path)  # into an empty folder
    taken = "run/checkpoints/step_3_ckp/manifest.json"
    for path in (*(str(tmp_path / name) for name in ("out", taken, f"{taken}/out")), "", ".", "/", "a/.."):
        with pytest.raises(CheckpointError) as refusal:
            run_export(tmp_path, output_path=path)
        assert "output_path" in refusal.value.settings
    monkeypatch.setattr("pretraining.files.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    monkeypatch.setattr(pt_files, "machine_memory", lambda: MachineMemory(10_000, 10**6, "this machine"))
    for form in ("hf", "full"):
        with pytest.raises(CheckpointError):
            run_export(tmp_path, format=form, output_path=str(tmp_path / "large"))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    folder = tmp_path / "none"
    for make in (folder.mkdir, (folder / "config.json").touch):  # no checkpoint, and a Hugging Face folder
        make()
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            run_export(tmp_path, ckpt_load_path=str(folder), output_path=str(tmp_path / "b"))


# pretrain import: weights of Hugging Face become a run's checkpoint of step 0


def run_import(root: Path) -> None:
    import_weights(ImportConfig(str(root / "m"), str(root / "run")))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("layout", [single, sharded])
def test_the_checkpoint_holds_the_weights_in_float32_and_has_no_faults(
    tmp_path: Path, shape: LlamaShape, layout: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module, "FILE_BYTES", 5000)
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


def exported(root: Path, name: str) -> tuple[dict[str, Any], str]:
    export(ExportConfig(ckpt_load_path=str(root / "run"), output_path=str(root / name)))
    return json.loads((root / name / "config.json").read_text()), (root / name / "README.md").read_text()


@pytest.mark.parametrize("end", [7, [7, 8]])
def test_an_export_keeps_imported_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int | list[int]) -> None:
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
    config, card = exported(tmp_path, "out")
    assert {name: config[name] for name in changed} == changed
    assert card.startswith("---\n") and '\nlicense: "llama3.2"\nbase_model: "someone/llama"\n---\n' in card
    (tmp_path / "run/imported.json").write_text("{")
    with pytest.raises(CheckpointError) as damage:
        exported(tmp_path, "damaged")
    assert damage.value.path == tmp_path / "run/imported.json"


@pytest.mark.parametrize("card", ["no header", "---\nlicense: [a]\n---\n", "---\n{\n---\n", None])
def test_unknown_facts_of_an_imported_model_are_left_out(tmp_path: Path, card: str | None) -> None:
    folder = single(tmp_path / "m")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"bos_token_id": {"a": 1}, "eos_token_id": []}))
    if card is not None:
        (folder / "README.md").write_text(card)
    run_import(tmp_path)
    config, written = exported(tmp_path, "out")
    assert config["bos_token_id"] is None and config["eos_token_id"] is None
    assert "license:" not in written and "base_model:" not in written and str(tmp_path) not in written
