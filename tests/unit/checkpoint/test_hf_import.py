"""A Hugging Face folder is read from one or several files; faulty or hostile content is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.checkpoint.checkpoint_files import SHAPES

from pretraining.checkpoint.hf_import import manifest_of_folder, open_folder
from pretraining.checkpoint.manifest import shape_of
from pretraining.checkpoint.reader import read_tensor
from pretraining.checkpoint.start_point import find_newest, find_start
from pretraining.config.training import CheckpointConfig
from pretraining.config.variants import LlamaShape
from pretraining.errors import CheckpointError
from pretraining.model.hf import config_document, parameter_shapes
from pretraining.model.llama import Llama
from pretraining.tools.commands import ExportConfig, ImportConfig
from pretraining.tools.export import export
from pretraining.tools.import_weights import import_weights
from pretraining.tools.verify import faults_of

PLAIN, TIED = SHAPES["plain"], SHAPES["tied"]
UP = "model.layers.1.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def weights(shape: LlamaShape = PLAIN, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in parameter_shapes(shape).items()}


def single(folder: Path, tensors: dict[str, torch.Tensor] | None = None, shape: LlamaShape = PLAIN) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_document(shape, "float32", 32, None, None)))
    save_file(weights(shape) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def sharded(folder: Path, tensors: dict[str, torch.Tensor] | None = None, shape: LlamaShape = PLAIN) -> Path:
    single(folder, {}, shape)
    (folder / "model.safetensors").unlink()
    tensors = weights(shape) if tensors is None else tensors
    places = {name: f"model-{number % 3 + 1:05d}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    set_index(folder, places)
    return folder


def set_index(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        (PLAIN, single, torch.float32),
        (TIED, sharded, torch.bfloat16),
        (SHAPES["scaled"], single, torch.float16),
        (PLAIN, sharded, torch.float16),
    ],
)
def test_weights_are_read_in_any_layout_and_type(tmp_path: Path, shape: LlamaShape, layout, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    expected = weights(shape, dtype)
    found, stored = open_folder(layout(tmp_path / "m", expected, shape))
    assert found == shape and stored.chunks.keys() == expected.keys()
    assert all(torch.equal(read_tensor(stored, name), value) for name, value in expected.items())
    manifest = manifest_of_folder(tmp_path / "m")
    assert shape_of(manifest) == shape and manifest.step == 0 and not manifest.data


@pytest.mark.parametrize(
    "index",
    [
        *("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'),
        *(json.dumps({"weight_map": {UP: place}}) for place in ("../secret.safetensors", "/etc/secret.safetensors")),
        *(json.dumps({"weight_map": {UP: place}}) for place in ("sub/part.safetensors", "..", "", "model.bin", 7)),
    ],
)
def test_an_index_that_leaves_the_folder_or_maps_nothing_is_refused(tmp_path: Path, index: str) -> None:
    folder = sharded(tmp_path / "m")
    save_file(weights(), tmp_path / "secret.safetensors")
    (folder / "sub").mkdir()
    for name in ("sub/part.safetensors", "model.bin"):
        shutil.copy(tmp_path / "secret.safetensors", folder / name)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError) as refused:
        open_folder(folder)
    assert refused.value.path == folder / "model.safetensors.index.json"


def remove(file: Path) -> None:
    file.unlink()


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def overwrite(file: Path) -> None:
    file.write_bytes(b"\xff" * 100)


@pytest.mark.parametrize("change", [remove, link_to_itself, overwrite])
def test_a_file_that_is_gone_or_damaged_is_named(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = sharded(tmp_path / "m")
    for file in (max(folder.glob("*.safetensors")), folder / "config.json"):
        change(file)
        with pytest.raises(CheckpointError) as refused:
            open_folder(folder)
        assert refused.value.path == file


def test_a_link_out_of_the_folder_is_refused_but_hugging_faces_own_cache_is_read(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to("../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        open_folder(folder)
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "5f3c"
    snapshot.parent.mkdir(parents=True)
    single(snapshot)
    (cache / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(cache / "blobs" / "77ab")
    (snapshot / "model.safetensors").symlink_to("../../blobs/77ab")
    assert open_folder(snapshot)[0] == PLAIN
    (tmp_path / "link").symlink_to(snapshot)
    assert open_folder(tmp_path / "link")[0] == PLAIN
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        open_folder(snapshot)


def changed(name: str, to: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the weights with another tensor of this name, or without the tensor."""
    return {key: tensor for key, tensor in {**weights(), name: to}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.norm.weight", None),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(16)),
        ("model.norm.weight", torch.zeros(4)),
        ("model.norm.weight", torch.zeros(16, dtype=torch.int8)),
    ],
)
def test_tensors_that_do_not_make_this_llama_are_named(tmp_path: Path, name: str, tensor: torch.Tensor | None) -> None:
    with pytest.raises(CheckpointError, match=name):
        open_folder(single(tmp_path / "m", changed(name, tensor)))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    second = folder / "model-00002-of-00003.safetensors"
    first = load_file(folder / "model-00001-of-00003.safetensors")
    name = next(iter(first))
    save_file({**load_file(second), name: first[name]}, second)
    with pytest.raises(CheckpointError, match=name):
        open_folder(folder)


def test_tensors_that_a_llama_does_not_read_are_ignored(tmp_path: Path) -> None:
    """Older conversions hold the rotary frequencies, and a head that is the embedding."""
    frequencies = changed("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))
    assert open_folder(single(tmp_path / "m", frequencies))[0] == PLAIN
    tied = weights(TIED)
    assert open_folder(single(tmp_path / "tied", {**tied, HEAD: tied[EMBEDDING].clone()}, TIED))[0] == TIED
    assert faults_of(tmp_path / "m") == faults_of(tmp_path / "tied") == []
    export(ExportConfig(str(tmp_path / "m"), str(tmp_path / "hf"), dtype="float32"))
    export(ExportConfig(str(tmp_path / "tied"), str(tmp_path / "full"), format="full"))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in weights().items())
    assert faults_of(tmp_path / "full") == []


@pytest.mark.parametrize("head", [torch.zeros(3), torch.ones(SHAPES["tied"].vocab_size, SHAPES["tied"].hidden_size)])
def test_a_stored_head_that_differs_from_its_tied_embedding_is_refused(tmp_path: Path, head: torch.Tensor) -> None:
    folder = single(tmp_path / "m", {**weights(TIED), HEAD: head}, TIED)
    with torch.device("meta"), pytest.raises(CheckpointError, match="tie_word_embeddings to false"):
        open_folder(folder)


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "consolidated.00.pth", "model-00001-of-00002.safetensors", "model.gguf"]
)
def test_weights_of_another_form_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = single(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} cannot be read.*save_pretrained"):
        open_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} cannot be read"):
        find_newest(folder)
    with pytest.raises(CheckpointError, match=rf"config\.json: is missing.*{re.escape(name)} cannot be read"):
        open_folder(folder)


def test_files_of_weights_that_are_not_read_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pretraining")
    folder = sharded(tmp_path / "m")
    for name in ("model-00009-of-00009.safetensors", "consolidated.safetensors", "pytorch_model.bin"):
        shutil.copy(folder / "model-00001-of-00003.safetensors", folder / name)
    open_folder(folder)
    open_folder(folder)
    [line] = caplog.messages
    assert "not read: consolidated.safetensors, model-00009-of-00009.safetensors, pytorch_model.bin" in line
    caplog.clear()
    open_folder(sharded(tmp_path / "n"))
    assert not caplog.messages


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter of PEFT.*merge_and_unload"):
        open_folder(folder)


def test_an_inner_model_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    inner = {name.removeprefix("model."): value for name, value in weights(TIED).items()}
    folder = single(tmp_path / "m", inner, TIED)
    with pytest.raises(CheckpointError, match="inner model alone"):
        open_folder(folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "architectures": ["LlamaModel"]}))
    with pytest.raises(CheckpointError, match="inner model alone"):
        open_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"])
def test_a_git_lfs_pointer_in_a_folder_is_named_as_one(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "m")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull") as refused:
        open_folder(folder)
    assert refused.value.path == folder / name


def test_a_tensor_of_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = single(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"U32"', 1))
    with pytest.raises(CheckpointError, match="is of type U32, which is not read"):
        open_folder(tmp_path / "m")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
AS_OTHERS_WRITE: dict[str, dict[str, Any]] = {
    "rope of transformers 4": {"rope_parameters": None, "rope_scaling": LLAMA3, "rope_theta": 5e3},
    "two different ropes": {
        "rope_parameters": {**LLAMA3, "rope_theta": 5e5},
        "rope_scaling": {**LLAMA3, "factor": 2.0},
    },
    "theta in the scaling": {"rope_scaling": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 5e5},
    "original context beside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8},
    "neither dtype nor architectures": {"dtype": None, "torch_dtype": None, "architectures": None},
}


@pytest.mark.parametrize("case", AS_OTHERS_WRITE)
def test_folders_of_others_give_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = single(tmp_path / "m", {name: value / 4 for name, value in weights().items()})
    document = {**json.loads((folder / "config.json").read_text()), **AS_OTHERS_WRITE[case]}
    written = {name: value for name, value in document.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    tokens = torch.arange(60).reshape(2, 30) % PLAIN.vocab_size
    shape, stored = open_folder(folder)
    model = Llama(shape).eval()
    model.load_state_dict({name: read_tensor(stored, name) for name in stored.chunks})
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
        torch.testing.assert_close(model(tokens), theirs, atol=1e-5, rtol=0)


def test_a_rope_per_kind_of_layer_is_refused(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    document = json.loads((folder / "config.json").read_text())
    changed_rope = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
    (folder / "config.json").write_text(json.dumps({**document, "rope_parameters": changed_rope}))
    with pytest.raises(CheckpointError, match="differs between layers"):
        open_folder(folder)


def test_pickles_are_refused_and_so_is_a_folder_without_weights(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as refused:
        open_folder(folder)
    assert refused.value.path == folder
    torch.save(weights(), folder / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError):
        open_folder(folder)


def test_weights_of_the_hub_are_fetched_by_name_and_a_name_without_any_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        if name != "someone/llama":
            raise OSError("not found")
        assert "*.safetensors" in allow_patterns
        return str(single(tmp_path / "cache"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = find_start(CheckpointConfig(ckpt_save_path="runs/new", ckpt_load_path="someone/llama"))
    assert found is not None and found.weights_only and found.path == tmp_path / "cache"
    import_weights(ImportConfig(input_path="someone/llama", ckpt_save_path=str(tmp_path / "run")))
    assert find_newest(tmp_path / "run").step == 0
    with pytest.raises(CheckpointError, match="someone/else"):
        find_start(CheckpointConfig(ckpt_save_path="runs/new", ckpt_load_path="someone/else"))
    (tmp_path / "someone").mkdir()  # now the name is a path
    with pytest.raises(CheckpointError):
        find_start(CheckpointConfig(ckpt_save_path="runs/new", ckpt_load_path="someone/llama"))
