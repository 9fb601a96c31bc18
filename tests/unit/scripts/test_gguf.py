"""The way to llama.cpp that docs/checkpoints.md shows: its greedy text is that of `pretrain sample`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import ROOT, plain_environment
from safetensors.torch import load_file
from unit.checkpoint.checkpoint_files import SHAPES
from unit.tools.test_sample import TEXTS, make_run, printed

from pretraining.config.commands import ExportConfig
from pretraining.config.variants import LlamaShape
from pretraining.data.tokenizer import train_tokenizer
from pretraining.tools.export import export

pytestmark = pytest.mark.slow
gguf = pytest.importorskip("gguf", reason="needs the extra `slow`")
from scripts import to_gguf  # noqa: E402  # it imports gguf

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PROMPTS = ("some text", "and ä few ✓", "0123 !\n\n\t  signs")
GREEDY = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 64, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
for prompt in json.loads(sys.argv[2]):
    asked = {"prompt": prompt, "temperature": 0, "n_predict": 24, "return_tokens": True}
    print("ANSWER", json.dumps(server.handle_completions(asked)))
"""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_llama_cpp_writes_the_same_text(shape: LlamaShape, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra `slow`")
    exported = export_of(tmp_path, shape, "float32")
    capsys.readouterr()
    ours = [printed(capsys, exported, prompt=prompt, max_new_tokens=24, temperature=0) for prompt in PROMPTS]
    python([str(ROOT / "scripts/to_gguf.py"), "exported", "mine.gguf"], tmp_path)
    lines = python(["-c", GREEDY, "mine.gguf", json.dumps(PROMPTS)], tmp_path).splitlines()
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in lines if line.startswith("ANSWER ")]
    theirs = [prompt + answer["choices"][0]["text"] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert theirs == ours


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "exported cannot be written as"),
        ("config.json", '{"model_type": "gpt2"}', "gpt2"),
        ("tokenizer.json", None, "tokenizer.json"),
    ],
)
def test_what_is_no_export_is_named_and_an_older_file_stays(
    name: str, content: str | None, said: str, tmp_path: Path
) -> None:
    exported = export_of(tmp_path, SHAPES["plain"], "float32")
    if content is None:
        (exported / name).unlink()
    else:
        (exported / name).write_text(content)
    (tmp_path / "mine.gguf").write_text("older")
    with pytest.raises(SystemExit, match=f"(?s)error: .*{said}"):
        to_gguf.convert(exported, tmp_path / "mine.gguf")
    assert (tmp_path / "mine.gguf").read_text() == "older"
    assert not list(tmp_path.glob(".*.tmp"))


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    exported = export_of(tmp_path, SHAPES["plain"], "bfloat16")
    python([str(ROOT / "scripts/to_gguf.py"), str(exported), "mine.gguf"], tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "mine.gguf").tensors}
    head = load_file(exported / "model.safetensors")["lm_head.weight"]
    assert torch.equal(torch.from_numpy(tensors["output.weight"].data.copy()).view(torch.bfloat16), head)
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": LLAMA3}}, BYTES]}, "llama-bpe"),
    ],
)
def test_how_text_is_split_has_a_name(steps: dict[str, Any], name: str) -> None:
    assert to_gguf.split_of(steps) == name


def test_what_cannot_be_said_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"splits text by Metaspace: known here are"):
        to_gguf.split_of({"type": "Metaspace"})
    with pytest.raises(SystemExit, match=r"splits text by Split \+ ByteLevel: known here are"):
        to_gguf.split_of({"pretokenizers": [{"type": "Split", "pattern": {"Regex": "[0-9]"}}, BYTES]})
    exported = export_of(tmp_path, SHAPES["plain"], "bfloat16")
    document = json.loads((exported / "tokenizer.json").read_text())
    (exported / "tokenizer.json").write_text(json.dumps({**document, "model": {"type": "Unigram"}}))
    with pytest.raises(SystemExit, match=r"tokenizer\.json is of the kind Unigram, and this writes byte-level BPE"):
        to_gguf.convert(exported, tmp_path / "mine.gguf")


def export_of(folder: Path, shape: LlamaShape, dtype: Literal["bfloat16", "float32"]) -> Path:
    (folder / "tokenizer").mkdir()
    train_tokenizer(TEXTS, 290).save(folder / "tokenizer")
    run = make_run(folder, replace(shape, vocab_size=300), tokenizer_path=str(folder / "tokenizer"), sep_token=299)
    export(ExportConfig(str(run), str(folder / "exported"), dtype=dtype))
    return folder / "exported"


def python(arguments: list[str], folder: Path) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=plain_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
