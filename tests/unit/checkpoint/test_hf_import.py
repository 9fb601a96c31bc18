"""A Hugging Face folder is read from one or several files; faulty or hostile content is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
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
from pretraining.tools.command_settings import ExportConfig, ImportConfig
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
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


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


Change = Callable[[Path], object]


def put(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def link_to_itself(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(name)


def set_config(folder: Path, **values: object) -> None:
    """Change entries of config.json; None removes one."""
    document = {**json.loads((folder / "config.json").read_text()), **values}
    document = {name: value for name, value in document.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(document))


def set_tensor(name: str, to: torch.Tensor | None, shape: LlamaShape = PLAIN) -> Change:
    tensors = {key: tensor for key, tensor in {**weights(shape), name: to}.items() if tensor is not None}
    return lambda folder: single(folder, tensors, shape)


def store_twice(folder: Path) -> None:
    """Store a tensor of the first file in the second one, too."""
    tensors = {
        name: value for file in sorted(folder.glob("*.safetensors"))[:2] for name, value in load_file(file).items()
    }
    save_file(tensors, folder / SECOND)


def store_inner_model(folder: Path) -> None:
    single(folder, {name.removeprefix("model."): value for name, value in weights(TIED).items()}, TIED)


def store_unread_type(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"U32"', 1))


def store_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(weights(), folder / "pytorch_model-00001-of-00002.bin")


INDEX, SECOND = "model.safetensors.index.json", "model-00002-of-00003.safetensors"
OUTSIDE = ["../secret.safetensors", "/etc/secret.safetensors", "sub/part.safetensors", "..", "", "model.bin", 7]
INDICES = ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}']
INDICES += [json.dumps({"weight_map": {UP: place}}) for place in OUTSIDE]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
TIED_HEAD = (TIED.vocab_size, TIED.hidden_size)
Row = tuple[Callable[[Path], Path], Change, str, str | None]
REFUSED: list[Row] = [
    *((sharded, put(INDEX, index), "", INDEX) for index in INDICES),
    *((sharded, put(name, POINTER), "git lfs pull", name) for name in ("config.json", INDEX, SECOND)),
    *((sharded, put(name, b"\xff" * 100), "", name) for name in ("config.json", SECOND)),
    *((sharded, partial(link_to_itself, name=name), "", name) for name in ("config.json", SECOND)),
    (sharded, lambda folder: (folder / "config.json").unlink(), "is missing", "config.json"),
    (sharded, lambda folder: (folder / SECOND).unlink(), "", SECOND),
    (sharded, store_twice, EMBEDDING, None),
    (single, lambda folder: (folder / "model.safetensors").unlink(), "fetch", ""),
    (single, store_pickle, "pytorch_model-00001-of-00002.bin cannot be read.*save_pretrained", ""),
    (single, store_unread_type, "is of type U32, which is not read", None),
    (single, set_tensor("model.norm.weight", None), "model.norm.weight", None),
    (single, set_tensor("model.norm.weight", torch.zeros(4)), "model.norm.weight", None),
    (single, set_tensor("model.norm.weight", torch.zeros(16, dtype=torch.int8)), "model.norm.weight", None),
    (single, set_tensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(16)), "q_proj.bias", None),
    (single, set_tensor(HEAD, torch.zeros(3), TIED), "tie_word_embeddings to false", ""),
    (single, set_tensor(HEAD, torch.ones(TIED_HEAD), TIED), "tie_word_embeddings to false", ""),
    (single, store_inner_model, "inner model alone", ""),
    (single, partial(set_config, architectures=["LlamaModel"]), "inner model alone", "config.json"),
    (single, partial(set_config, rope_parameters=ROPES), "differs between layers", "config.json"),
    (single, put("adapter_config.json", "{}"), "adapter of PEFT.*merge_and_unload", ""),
]


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_what_cannot_be_read_is_refused_with_the_file_and_the_reason(tmp_path: Path, row: int) -> None:
    layout, change, words, name = REFUSED[row]
    folder = layout(tmp_path / "m")
    (folder / "sub").mkdir()
    for place in (tmp_path / "secret.safetensors", folder / "sub" / "part.safetensors", folder / "model.bin"):
        save_file(weights(), place)
    change(folder)
    with torch.device("meta"), pytest.raises(CheckpointError, match=words or None) as refused:
        open_folder(folder)
    assert name is None or refused.value.path == folder / name


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


def test_tensors_that_a_llama_does_not_read_are_ignored(tmp_path: Path) -> None:
    """Older conversions hold the rotary frequencies, and a head that is the embedding."""
    set_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))(tmp_path / "m")
    set_tensor(HEAD, weights(TIED)[EMBEDDING].clone(), TIED)(tmp_path / "tied")
    assert open_folder(tmp_path / "m")[0] == PLAIN and open_folder(tmp_path / "tied")[0] == TIED
    assert faults_of(tmp_path / "m") == faults_of(tmp_path / "tied") == []
    export(ExportConfig(str(tmp_path / "m"), str(tmp_path / "hf"), dtype="float32"))
    export(ExportConfig(str(tmp_path / "tied"), str(tmp_path / "full"), format="full"))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in weights().items())
    assert faults_of(tmp_path / "full") == []


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
    set_config(folder, **AS_OTHERS_WRITE[case])
    tokens = torch.arange(60).reshape(2, 30) % PLAIN.vocab_size
    shape, stored = open_folder(folder)
    model = Llama(shape).eval()
    model.load_state_dict({name: read_tensor(stored, name) for name in stored.chunks})
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
        torch.testing.assert_close(model(tokens), theirs, atol=1e-5, rtol=0)


def test_weights_are_fetched_from_the_hub_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
