"""Names of special tokens in texts: ordinary characters, or on request their ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from unit.tools.prepare.prepare_files import json_lines, prepare_config, rows

from pretraining.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import documents, encode
from pretraining.tools.prepare.chats import Marks
from pretraining.tools.prepare.prepare import prepare

NAMES = ["<|fim_prefix|>", "<|fim|>", "[END]"]
TEXTS = ["plain text", "a <|fim_prefix|>b<|fim|>", "[END]", "<|fim_", "<think>x", ""]


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    train_tokenizer(["one two three " * 9], 300).save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(NAMES)
    library.add_tokens(["<think>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    return prepare_config(tmp_path, tokenizer_path=str(tmp_path))


def tokenizer_of(names: list[str]) -> Tokenizer:
    """Return a tokenizer with these special tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.add_special_tokens(names)
    return Tokenizer(library, library.to_str().encode(), b"{}", None, len(names))


def wanted(config: PrepareConfig, texts: list[str], *, ids: bool) -> list[list[int]]:
    library = tokenizers.Tokenizer.from_file(f"{config.tokenizer_path}/tokenizer.json")
    library.encode_special_tokens = not ids
    return [library.encode(text, add_special_tokens=False).ids for text in texts if text]


@pytest.mark.parametrize("encoder", ["tokenizers", "auto"])
def test_marks_are_text_by_default_and_ids_on_request_and_their_share_is_said(
    config: PrepareConfig, encoder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, encoder=encoder)
    values: list[tuple[Literal["ids"] | None, str]] = [(None, "text"), ("ids", "ids")]
    for asked, kind in values:
        summary = prepare(replace(config, special_tokens=asked, dataset=kind))
        assert rows(summary.folder) == wanted(config, TEXTS, ids=kind == "ids")
        assert (summary.settings["special_tokens"], summary.marked_documents) == (kind, 2)
        kept = "as ids" if asked else "as ordinary characters (--special_tokens=ids)"
        line = f"marks      2 documents (33.3%) with names of special tokens encoded {kept}\n"
        assert line in capsys.readouterr().out
    with pytest.raises(DataError, match="special_tokens: it has text, requested is ids"):
        prepare(replace(config, special_tokens="ids", dataset="text"))
    Path(config.input_path[0]).write_bytes(json_lines(["plain", "<|fim"]))
    prepare(replace(config, dataset="plain"))
    assert "names of special tokens" not in capsys.readouterr().out
    largest = max(map(max, rows(Path(config.output_path, "text"))))
    tokenizer = load_tokenizer(config.output_path)
    assert tokenizer.library.id_to_token(largest) == "<think>", "added tokens that are not special are always ids"


def test_token_ids_have_no_marks_and_refuse_the_flag(config: PrepareConfig, tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1, 2], [3]]}), tmp_path / "ids.parquet")
    config = replace(config, input_path=(str(tmp_path / "ids.parquet"),), text_field="ids")
    assert "special_tokens" not in prepare(config).settings
    with pytest.raises(DataError, match="--special_tokens=ids: --text_field=ids holds token ids"):
        prepare(replace(config, special_tokens="ids", dataset="other"))


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_long_document_is_cut_through_no_mark(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = "".join(f"{'x' * n}<|fim_prefix|>[END]" for n in range(40))
    (tmp_path / name).write_bytes(json_lines([text]) if name == "in.jsonl" else text.encode())
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 60)
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 60)
    config = replace(config, input_path=(str(tmp_path / name),), special_tokens="ids", dataset=name)
    summary = prepare(config)
    tokenizer = load_tokenizer(tmp_path)
    found = rows(summary.folder)[0]
    assert tokenizer.decode(found) == text
    assert [found.count(tokenizer.library.token_to_id(each) or 0) for each in NAMES] == [40, 0, 40]
    assert summary.marked_documents == 1


def test_names_of_any_form_are_found() -> None:
    marks = Marks(tokenizer_of(["<s>", "</s>", "[INST]", "<｜begin▁of▁sentence｜>", "a.b"]))
    held = ["x<s>", "</s>", "[INST] a", "<｜begin▁of▁sentence｜>", "a.b"]
    assert marks.find([*held, "", "s>", "<S>", "[INST", "axb", "<s>[INST]"]) == [0, 1, 2, 3, 4, 10]
    assert Marks(tokenizer_of([])).find(["text"]) == []
