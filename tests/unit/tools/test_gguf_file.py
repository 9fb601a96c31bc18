"""`pretrain export --format=gguf`: the greedy text of llama.cpp is that of `pretrain sample`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import run_command
from unit.checkpoint.checkpoint_files import SHAPES
from unit.tools.test_sample import TEXTS, make_run, printed

from pretraining.config.variants import LlamaShape
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import CheckpointError, ConfigError
from pretraining.launch.terminal import escape_controls
from pretraining.model.hf import parameter_shapes
from pretraining.tools.commands import ExportConfig
from pretraining.tools.export import export

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


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_llama_cpp_writes_the_same_text(shape: LlamaShape, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra `slow`")
    pytest.importorskip("gguf", reason="needs the extra `slow`")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    run = make_run(tmp_path, replace(shape, vocab_size=300), tokenizer_path=tokenizer, sep_token=299)
    capsys.readouterr()
    ours = [printed(capsys, run, prompt=prompt, max_new_tokens=24, temperature=0) for prompt in PROMPTS]
    output = tmp_path / "mine.gguf"
    export(ExportConfig(str(run), str(output), format="gguf", dtype="float32"))
    greedy = [sys.executable, "-c", GREEDY, "mine.gguf", json.dumps(PROMPTS)]
    lines = run_command(greedy, cwd=tmp_path).stdout.splitlines()
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in lines if line.startswith("ANSWER ")]
    theirs = [
        escape_controls(prompt + answer["choices"][0]["text"]) for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    assert theirs == ours


def make_tokenizer(folder: Path) -> str:
    folder.mkdir()
    train_tokenizer(TEXTS, 290).save(folder)
    return str(folder)


def test_what_llama_cpp_calls_by_another_name_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra `slow`")
    shape = replace(SHAPES["plain"], vocab_size=300, qk_norm="head", attention_bias="true", model_family="qwen3")
    run = make_run(tmp_path, shape, tokenizer_path=make_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match=r"its qk_norm, biases need llama\.cpp's own convert_hf_to_gguf\.py"):
        export(ExportConfig(str(run), str(tmp_path / "a.gguf"), format="gguf"))
    assert [path.name for path in tmp_path.iterdir() if "gguf" in path.name] == []


def test_a_tokenizer_that_splits_otherwise_a_missing_one_and_an_existing_file_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra `slow`")
    shape = replace(SHAPES["plain"], vocab_size=300)
    run, tokenizer = make_run(tmp_path, shape), make_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="give --tokenizer_path"):
        export(ExportConfig(str(run), str(tmp_path / "a.gguf"), format="gguf"))
    (tmp_path / "taken.gguf").touch()
    with pytest.raises(CheckpointError, match="it exists already"):
        export(ExportConfig(str(run), str(tmp_path / "taken.gguf"), format="gguf", tokenizer_path=tokenizer))
    definition = json.loads(Path(tokenizer, "tokenizer.json").read_text())
    definition["pre_tokenizer"] = {"type": "Whitespace"}
    Path(tokenizer, "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ConfigError, match="splits text by Whitespace"):
        export(ExportConfig(str(run), str(tmp_path / "a.gguf"), format="gguf", tokenizer_path=tokenizer))


def test_without_its_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'pretraining\[gguf\]'"):
        export(ExportConfig(str(make_run(tmp_path, SHAPES["plain"])), str(tmp_path / "a.gguf"), format="gguf"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_file_holds_every_tensor_once(dtype: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra `slow`")
    shape = replace(SHAPES["plain"], vocab_size=300)
    run = make_run(tmp_path, shape, tokenizer_path=make_tokenizer(tmp_path / "tokenizer"))
    export(ExportConfig(str(run), str(tmp_path / "new" / "a.gguf"), format="gguf", dtype=dtype))
    read = gguf.GGUFReader(tmp_path / "new" / "a.gguf")
    assert len(read.tensors) == len(parameter_shapes(shape))
    kinds = {len(each.shape): each.tensor_type.name for each in read.tensors}
    assert kinds == {1: "F32", 2: "BF16" if dtype == "bfloat16" else "F32"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.gguf"]
