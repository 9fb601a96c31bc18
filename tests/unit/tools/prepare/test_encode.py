"""fastokens and the tokenizers library: which of them encodes, that they agree, and where long texts are cut."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from unit.tools.prepare.prepare_files import (
    contents,
    json_lines,
    made_elsewhere,
    packed,
    prepare_config,
    rows,
    write_table,
)

from pretraining.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare import documents, encode, units
from pretraining.tools.prepare.encode import choose_encoder
from pretraining.tools.prepare.prepare import prepare

fastokens = pytest.importorskip("fastokens")

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [f"Document {n}: größe, 漢字 and naïve words; it's {n}.\n" * (n % 7 + 1) for n in range(60)]
GPT2_LIKE = train_tokenizer(TEXTS, 400)


def test_the_library_encodes_with_a_line_if_the_faster_one_refuses_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    library = tokenizers.Tokenizer(models.WordLevel({"?": 0, "Document": 1, "stop": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_bytes(json_lines(["Document stop", "Document"]))
    config = prepare_config(tmp_path, tokenizer_path=str(tmp_path))
    with pytest.raises(DataError, match="--encoder=fastokens"):
        prepare(replace(config, encoder="fastokens"))
    assert rows(prepare(config).folder) == [[1, 2], [1]]
    assert len([line for line in caplog.messages if "fastokens" in line]) == 1
    caplog.clear()
    encode._load_fastokens.cache_clear()
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert choose_encoder(GPT2_LIKE, "tokenizers") == choose_encoder(GPT2_LIKE, "auto") == "tokenizers"
    assert len(caplog.messages) == 1 and "pretraining[fast]" in caplog.messages[0]
    with pytest.raises(DataError, match=r"pretraining\[fast\]"):
        choose_encoder(GPT2_LIKE, "fastokens")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    """Inputs of all kinds, in units of which some end in the middle of a file."""
    monkeypatch.setattr(units, "UNIT_BYTES", 3000)
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [*TEXTS, "", f"a{END_OF_TEXT}b", "x" * 2000, "größe \x00\u2028 " * 300]
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt", "e.txt.gz"):
        content = json_lines(texts) if "jsonl" in name else "".join(texts).encode()
        (folder / name).write_bytes(packed(name, content))
    write_table(folder / "f.parquet", {"text": texts}, 7)
    write_table(folder / "g.arrow", {"text": texts}, 5)
    GPT2_LIKE.save(tmp_path)
    return prepare_config(tmp_path, "in", tokenizer_path=str(tmp_path), tokens_per_file=900, num_workers=1)


def test_both_encoders_write_the_same_files_and_a_difference_is_an_error(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = made_elsewhere(config, encoder="tokenizers")
    prepare(replace(config, output_path=f"{config.output_path}_fast", encoder="fastokens"))
    assert len(wanted) > 20 and contents(f"{config.output_path}_fast") == wanted

    class Spoilt:
        def encode_batch_flat(self, texts: list[str], **settings: Any) -> tuple[bytes, bytes]:
            if "error" in failures:
                raise ValueError("match limit exceeded")
            library = fastokens.Tokenizer.from_json_str(GPT2_LIKE.definition.decode())
            ids, ends = library.encode_batch_flat(texts, **settings)
            changed = np.frombuffer(ids, np.uint32).copy()
            if TEXTS[50] in texts and TEXTS[0] not in texts:  # behind the first
                changed[sum(len(GPT2_LIKE.encode(text)) for text in texts[: texts.index(TEXTS[50])])] += 1
            return changed.tobytes(), ends

    failures = ["error"]
    with monkeypatch.context() as patch:
        patch.setattr(encode, "_load_fastokens", lambda definition: Spoilt())
        with pytest.raises(DataError, match=r"a\.jsonl, row 1: .*match limit exceeded") as error:
            prepare(config)
        assert error.value.settings == ("encoder",) and failures.pop()
        with pytest.raises(DataError) as error:
            prepare(config)
    assert "a.jsonl from byte " in str(error.value) and error.value.row is not None
    assert "encoder" in error.value.settings
    assert list(Path(config.output_path, ".in.preparing").glob("unit_*"))
    prepare(replace(config, encoder="tokenizers"))
    assert contents(config.output_path) == wanted


def test_the_beginning_of_a_unit_and_one_text_in_a_thousand_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x" * 100] * 100_000
    sample = encode._texts_to_check(texts, 3, 1)
    assert 60 < len(sample) < 140 and encode._texts_to_check(texts, 4, 1) != sample
    monkeypatch.setattr(encode, "CHECKED_FIRST_CHARACTERS", 250)
    assert encode._texts_to_check(texts, 3, 0)[:3] == [0, 1, 2]


# Long documents in pieces


@pytest.mark.parametrize(
    "words_of",
    [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated")],
    ids=["gpt2", "llama3"],
)
@given(
    text=st.text(alphabet=st.one_of(st.sampled_from("ab1 \n\r.'é漢_\t"), st.characters(codec="utf-8")), max_size=100)
)
def test_a_cut_goes_through_no_word_of_the_usual_tokenizers(words_of: pre_tokenizers.PreTokenizer, text: str) -> None:
    for match in documents._SAFE_CUT.finditer(text):
        parts = text[: match.start()], text[match.start() :]
        words = [word for part in parts for word, _ in words_of.pre_tokenize_str(part)]
        assert words == [word for word, _ in words_of.pre_tokenize_str(text)]


# Names of special tokens in texts: ordinary characters, or on request their ids

NAMES = ["<|fim_prefix|>", "<|fim|>", "[END]"]
MARKED = ["plain text", "a <|fim_prefix|>b<|fim|>", "[END]", "<|fim_", "<think>x", ""]


@pytest.fixture
def marked(tmp_path: Path) -> PrepareConfig:
    train_tokenizer(["one two three " * 9], 300).save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(NAMES)
    library.add_tokens(["<think>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_bytes(json_lines(MARKED))
    return prepare_config(tmp_path, tokenizer_path=str(tmp_path))


def wanted(marked: PrepareConfig, texts: list[str], *, ids: bool) -> list[list[int]]:
    library = tokenizers.Tokenizer.from_file(f"{marked.tokenizer_path}/tokenizer.json")
    library.encode_special_tokens = not ids
    return [library.encode(text, add_special_tokens=False).ids for text in texts if text]


@pytest.mark.parametrize("encoder", ["tokenizers", "auto"])
def test_marks_are_text_by_default_and_ids_on_request_and_their_share_is_said(
    marked: PrepareConfig, encoder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = replace(marked, encoder=encoder)
    values: list[tuple[Literal["ids"] | None, str]] = [(None, "text"), ("ids", "ids")]
    for asked, kind in values:
        summary = prepare(replace(marked, special_tokens=asked, dataset=kind))
        assert rows(summary.folder) == wanted(marked, MARKED, ids=kind == "ids")
        assert (summary.settings["special_tokens"], summary.marked_documents) == (kind, 2)
        kept = "as ids" if asked else "as ordinary characters (--special_tokens=ids)"
        line = f"marks      2 documents (33.3%) with names of special tokens encoded {kept}\n"
        assert line in capsys.readouterr().out
    with pytest.raises(DataError, match="special_tokens: it has text, requested is ids"):
        prepare(replace(marked, special_tokens="ids", dataset="text"))
    Path(marked.input_path[0]).write_bytes(json_lines(["plain", "<|fim"]))
    prepare(replace(marked, dataset="plain"))
    assert "names of special tokens" not in capsys.readouterr().out
    largest = max(map(max, rows(Path(marked.output_path, "text"))))
    tokenizer = load_tokenizer(marked.output_path)
    assert tokenizer.library.id_to_token(largest) == "<think>", "added tokens that are not special are always ids"


def test_token_ids_have_no_marks_and_refuse_the_flag(marked: PrepareConfig, tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1, 2], [3]]}), tmp_path / "ids.parquet")
    marked = replace(marked, input_path=(str(tmp_path / "ids.parquet"),), text_field="ids")
    assert "special_tokens" not in prepare(marked).settings
    with pytest.raises(DataError, match="--special_tokens=ids: --text_field=ids holds token ids"):
        prepare(replace(marked, special_tokens="ids", dataset="other"))


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_long_document_is_cut_through_no_mark(
    marked: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = "".join(f"{'x' * n}<|fim_prefix|>[END]" for n in range(40))
    (tmp_path / name).write_bytes(json_lines([text]) if name == "in.jsonl" else text.encode())
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 60)
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 60)
    marked = replace(marked, input_path=(str(tmp_path / name),), special_tokens="ids", dataset=name)
    summary = prepare(marked)
    tokenizer = load_tokenizer(tmp_path)
    found = rows(summary.folder)[0]
    assert tokenizer.decode(found) == text
    assert [found.count(tokenizer.library.token_to_id(each) or 0) for each in NAMES] == [40, 0, 40]
    assert summary.marked_documents == 1
