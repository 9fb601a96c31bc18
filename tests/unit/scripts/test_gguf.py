"""The way to llama.cpp that docs/tutorial.md shows: its greedy text is that of `pretrain sample`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ROOT, run_command
from unit.checkpoint.checkpoint_files import SHAPES
from unit.tools.test_sample import TEXTS, make_run, printed

from pretraining.config.variants import LlamaShape
from pretraining.data.tokenizer import train_tokenizer
from pretraining.tools.commands import ExportConfig
from pretraining.tools.export import export

pytestmark = pytest.mark.slow
gguf = pytest.importorskip("gguf", reason="needs the extra `slow`")

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
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(TEXTS, 290).save(tmp_path / "tokenizer")
    tokenizer = str(tmp_path / "tokenizer")
    run = make_run(tmp_path, replace(shape, vocab_size=300), tokenizer_path=tokenizer, sep_token=299)
    exported = tmp_path / "exported"
    export(ExportConfig(str(run), str(exported), dtype="float32"))
    capsys.readouterr()
    ours = [printed(capsys, exported, prompt=prompt, max_new_tokens=24, temperature=0) for prompt in PROMPTS]
    run_command([sys.executable, ROOT / "scripts/to_gguf.py", "exported", "mine.gguf"], cwd=tmp_path)
    greedy = [sys.executable, "-c", GREEDY, "mine.gguf", json.dumps(PROMPTS)]
    lines = run_command(greedy, cwd=tmp_path).stdout.splitlines()
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in lines if line.startswith("ANSWER ")]
    theirs = [prompt + answer["choices"][0]["text"] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert theirs == ours


def test_what_llama_cpp_calls_by_another_name_is_refused(tmp_path: Path) -> None:
    shape = replace(SHAPES["plain"], qk_norm="head", attention_bias="true", model_family="qwen3")
    export(ExportConfig(str(make_run(tmp_path, shape)), str(tmp_path / "exported"), dtype="float32"))
    refused = run_command(
        [sys.executable, ROOT / "scripts/to_gguf.py", "exported", "a.gguf"], cwd=tmp_path, check=False
    )
    assert (
        refused.returncode == 1 and "its qk_norm, biases need llama.cpp's own convert_hf_to_gguf.py" in refused.stderr
    )
    assert not (tmp_path / "a.gguf").exists()
