"""`pretrain sample`: what it prints is what the model would say, token by token, and what transformers say too."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from helpers import run_command
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import SHAPES, config_of, manifest_of, tensors_of, write_sharded

from pretraining.api import load_model
from pretraining.config.read import check_config
from pretraining.config.recipe_files import dump_config
from pretraining.config.variants import LlamaShape
from pretraining.data.tokenizer import END_OF_TEXT, train_tokenizer
from pretraining.errors import CheckpointError, ConfigError
from pretraining.evaluation.generation import CachedModel, stream_text
from pretraining.launch.terminal import escape_controls
from pretraining.model.hf import parameter_shapes
from pretraining.tools import gguf_file
from pretraining.tools.command_settings import ExportConfig, SampleConfig
from pretraining.tools.export import export
from pretraining.tools.sample import sample

WITH_TEXT = replace(SHAPES["plain"], vocab_size=300)
TEXTS = ["some text to train on, and ä few ✓ signs"] * 20


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def make_run(root: Path, shape: LlamaShape, **data: Any) -> Path:
    config = dump_config(config_of(shape, **data))
    write_sharded(root / "run/checkpoints/step_3_ckp", tensors_of(shape), manifest_of(shape, config=config))
    return root / "run"


def printed(capsys: pytest.CaptureFixture[str], path: Path, **settings: Any) -> str:
    sample(SampleConfig(str(path), **settings))
    return capsys.readouterr().out.removesuffix("\n")


def ids_of(text: str) -> list[int]:
    return [int(token) for token in text.split(",")]


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """Looks at all tokens again for each new one."""
    model, tokens = load_model(path), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, shape: LlamaShape, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run, exported = make_run(tmp_path, shape), tmp_path / "exported"
    export(ExportConfig(str(run), str(exported), dtype="float32"))
    capsys.readouterr()
    asked: dict[str, Any] = {"prompt_tokens": (1, 5, 9), "max_new_tokens": 40, "temperature": 0.0}
    expected = greedy(run, [1, 5, 9], 40)
    for source in (run, run / "checkpoints", run / "checkpoints" / "step_3_ckp", exported):
        assert ids_of(printed(capsys, source, **asked)) == expected
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    theirs = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=40, do_sample=False)
    assert theirs[0].tolist() == expected


def test_a_cache_gives_the_models_logits_and_past_the_context_those_of_the_newest_half(tmp_path: Path) -> None:
    model, tokens = load_model(make_run(tmp_path, SHAPES["plain"])), list(range(30))
    cached = CachedModel(model, 8, torch.device("cpu"))
    for length in range(6, 15):
        window = length if length <= 8 else 4 + (length - 9) % 5
        with torch.no_grad():
            expected = model(torch.tensor([tokens[length - window : length]]))[0, -1]
        torch.testing.assert_close(cached(tokens[:length]), expected, atol=1e-5, rtol=0)


def make_tokenizer(root: Path) -> str:
    (root / "tokenizer").mkdir()
    train_tokenizer(TEXTS, 290).save(root / "tokenizer")
    return str(root / "tokenizer")


def test_a_prompt_of_text_is_continued_with_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tokenizer(tmp_path)
    run = make_run(tmp_path, WITH_TEXT, tokenizer_path=path, sep_token=299)
    text = printed(capsys, run, prompt="some ", max_new_tokens=20)
    assert text.startswith("some ") and len(text) > 5
    assert printed(capsys, run, prompt="some ", max_new_tokens=20) == text
    assert printed(capsys, run, prompt="some ", max_new_tokens=20, seed=1) != text
    likeliest = [printed(capsys, run, **{name: 0.0}) for name in ("temperature", "top_p")]
    assert likeliest == [printed(capsys, run, top_k=1)] * 2 != [printed(capsys, run, top_k=0)] * 2
    assert printed(capsys, run, max_new_tokens=5)  # begins with what stands before a document
    export(ExportConfig(str(run), str(tmp_path / "exported"), dtype="float32"))
    capsys.readouterr()
    assert printed(capsys, tmp_path / "exported", prompt="some ", max_new_tokens=20) == text


def test_generation_stops_at_the_end_of_text_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, SHAPES["plain"])
    tokens = greedy(run, [1, 5], 10)
    end = next(token for token in tokens[4:] if token not in tokens[2:4])
    ending = make_run(tmp_path / "ending", SHAPES["plain"], sep_token=end)
    asked: dict[str, Any] = {"prompt_tokens": (1, 5), "max_new_tokens": 10, "temperature": 0.0}
    assert ids_of(printed(capsys, ending, **asked)) == tokens[: tokens.index(end, 2)]
    export(ExportConfig(str(ending), str(tmp_path / "exported"), dtype="float32"))
    capsys.readouterr()
    assert ids_of(printed(capsys, tmp_path / "exported", **asked)) == tokens[: tokens.index(end, 2)]


def watched_prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Let no token be drawn; return a list to which each prompt is added."""
    prompts: list[list[int]] = []

    def watched(next_logits: object, prompt: Sequence[int], *_: object, **__: object) -> list[int]:
        prompts.append(list(prompt))
        return []

    monkeypatch.setattr("pretraining.tools.sample.draw_tokens", watched)
    return prompts


def test_a_prompt_starts_with_the_begin_of_text_token_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = watched_prompts(monkeypatch)
    run = make_run(tmp_path, WITH_TEXT, tokenizer_path=make_tokenizer(tmp_path), bos_token=7)
    assert printed(capsys, run, prompt="") == "" and prompts == [[7]]
    without = make_run(tmp_path / "without", WITH_TEXT, tokenizer_path=str(tmp_path / "tokenizer"), sep_token=9)
    assert printed(capsys, without, prompt="") == "" and prompts[1:] == [[9]]


def test_weights_that_are_not_finite_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, SHAPES["plain"])
    weights = tensors_of(SHAPES["plain"])
    weights["lm_head.weight"][5] = torch.nan
    write_sharded(run / "checkpoints" / "step_4_ckp", weights, manifest_of(SHAPES["plain"], 4))
    with pytest.raises(CheckpointError, match=r"step_4_ckp.*lm_head\.weight has values that are not finite"):
        printed(capsys, run, prompt_tokens=(1,))


def test_a_prompt_that_cannot_be_continued_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, SHAPES["plain"])
    with pytest.raises(ConfigError) as refusal:
        check_config(SampleConfig("run", prompt="a", prompt_tokens=(1, 2)))
    assert refusal.value.settings == ("prompt", "prompt_tokens")
    for settings, named in (
        ({"prompt": "some"}, {"tokenizer_path", "prompt_tokens"}),
        ({}, {"tokenizer_path", "prompt_tokens"}),
        ({"prompt_tokens": (1, 32)}, {"prompt_tokens"}),
        ({"prompt": "some", "tokenizer_path": make_tokenizer(tmp_path)}, {"prompt"}),  # with more entries
    ):
        with pytest.raises(ConfigError) as refusal:
            printed(capsys, run, **settings)
        assert set(refusal.value.settings) == named


TOKENIZER = train_tokenizer(TEXTS, 290)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20), st.integers(0, 5))
def test_streamed_text_is_the_text_of_all_tokens(tokens: list[int], prompt_length: int) -> None:
    before, new = tokens[:prompt_length], tokens[prompt_length:]
    if TOKENIZER.decode(before).endswith("\ufffd"):
        before, new = [], tokens
    streamed = "".join(stream_text(TOKENIZER.decode, before, new))
    assert TOKENIZER.decode(before) + streamed == TOKENIZER.decode(tokens)


# pretrain export --format=gguf: the greedy text of llama.cpp is that of pretrain sample

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
    tokenizer = make_tokenizer(tmp_path)
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


def test_what_llama_cpp_does_not_know_and_an_existing_file_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra `slow`")
    shape = replace(SHAPES["plain"], vocab_size=300)
    run, tokenizer = make_run(tmp_path, shape), make_tokenizer(tmp_path)
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
    named_otherwise = replace(shape, qk_norm="head", attention_bias="true", model_family="qwen3")
    run = make_run(tmp_path / "qwen", named_otherwise, tokenizer_path=tokenizer)
    with pytest.raises(ConfigError, match=r"its qk_norm, biases need llama\.cpp's own convert_hf_to_gguf\.py"):
        export(ExportConfig(str(run), str(tmp_path / "a.gguf"), format="gguf"))
    assert [path.name for path in tmp_path.iterdir() if "gguf" in path.name] == ["taken.gguf"]


LLAMA3 = gguf_file._LLAMA3
NEAR = LLAMA3.replace(r"\p{L}+", r"[\p{Lu}\p{Lt}\p{M}]*\p{L}+")
"""Contains Llama 3's rules for numbers and for 's, as that of GPT-4o does."""


def split_by(pattern: str, **more: object) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **more}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}


def around(single: str) -> dict[str, Any]:
    library = tokenizers.Tokenizer.from_str(TOKENIZER.definition.decode())
    names = {name: library.token_to_id(name) for name in ("a", "b", END_OF_TEXT) if name in single}
    library.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=list(names.items()))
    return {"post_processor": json.loads(library.to_str())["post_processor"]}


def gguf_of(root: Path, changes: dict[str, Any], shape: LlamaShape = WITH_TEXT, **data: Any) -> dict[str, Any]:
    """Export a run whose tokenizer.json has these changes, and return the values of the file."""
    gguf = pytest.importorskip("gguf", reason="needs the extra `slow`")
    file = Path(make_tokenizer(root), "tokenizer.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    run = make_run(root, shape, tokenizer_path=str(file.parent), **data)
    export(ExportConfig(str(run), str(root / "a.gguf"), format="gguf"))
    fields = gguf.GGUFReader(root / "a.gguf").fields
    return {name: field.contents() for name, field in fields.items() if len(field.data) == 1}


END = TOKENIZER.end_of_text


@pytest.mark.parametrize(
    ("changes", "data", "adds"),
    [
        ({}, {"bos_token": 5}, (5, False, False)),
        ({}, {}, (None, False, False)),
        (around("a $A"), {"bos_token": TOKENIZER.encode("a")[0]}, (TOKENIZER.encode("a")[0], True, False)),
        (around("a $A"), {}, (TOKENIZER.encode("a")[0], True, False)),
        (around(f"$A {END_OF_TEXT}"), {"bos_token": 5}, (5, False, True)),
        (split_by(LLAMA3), {}, (None, False, False)),
    ],
)
def test_a_gguf_file_adds_what_the_tokenizer_adds(
    tmp_path: Path, changes: dict[str, Any], data: dict[str, Any], adds: tuple[int | None, bool, bool]
) -> None:
    values = gguf_of(tmp_path, changes, **data)
    names = ("bos_token_id", "add_bos_token", "add_eos_token")
    assert tuple(values.get(f"tokenizer.ggml.{name}") for name in names) == adds
    assert values["tokenizer.ggml.eos_token_id"] == END
    assert values["tokenizer.ggml.pre"] == ("llama-bpe" if "pre_tokenizer" in changes else "gpt-2")


def test_a_gguf_file_has_the_width_of_heads_that_are_not_the_hidden_width(tmp_path: Path) -> None:
    shape = replace(WITH_TEXT, head_dim=2 * WITH_TEXT.head_dim)
    values = gguf_of(tmp_path, {}, shape)
    assert [values[f"llama.attention.{name}_length"] for name in ("key", "value")] == [shape.head_dim] * 2


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"normalizer": {"type": "NFC"}}, {}, "the tokenizer has the normalizer NFC, which GGUF cannot express"),
    (split_by(NEAR), {}, "splits text by Split pattern=(?i:'s|'t|"),
    (split_by(LLAMA3, add_prefix_space=True), {}, "ByteLevel add_prefix_space=True use_regex=False; supported is"),
    (split_by(LLAMA3, use_regex=True), {}, "+ ByteLevel; supported is byte-level BPE"),
    (around("a $A"), {"bos_token": 5}, f"puts the tokens [{TOKENIZER.encode('a')[0]}] and [] around texts"),
    (around("$A b"), {}, f"puts the tokens [] and [{TOKENIZER.encode('b')[0]}] around texts"),
]


@pytest.mark.parametrize(("changes", "data", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], data: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        gguf_of(tmp_path, changes, **data)
    assert words in str(error.value) and "convert_hf_to_gguf.py may know it" in str(error.value)


def test_a_sliding_window_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its sliding_window need llama\.cpp's own"):
        gguf_of(tmp_path, {}, replace(WITH_TEXT, sliding_window=8, model_family="mistral"))


def test_without_its_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'pretraining\[gguf\]'"):
        export(ExportConfig(str(make_run(tmp_path, SHAPES["plain"])), str(tmp_path / "a.gguf"), format="gguf"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_file_holds_every_tensor_once(dtype: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra `slow`")
    shape = replace(SHAPES["plain"], vocab_size=300)
    run = make_run(tmp_path, shape, tokenizer_path=make_tokenizer(tmp_path))
    export(ExportConfig(str(run), str(tmp_path / "new" / "a.gguf"), format="gguf", dtype=dtype))
    read = gguf.GGUFReader(tmp_path / "new" / "a.gguf")
    assert len(read.tensors) == len(parameter_shapes(shape))
    kinds = {len(each.shape): each.tensor_type.name for each in read.tensors}
    assert kinds == {1: "F32", 2: "BF16" if dtype == "bfloat16" else "F32"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.gguf"]
