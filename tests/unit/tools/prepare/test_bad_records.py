"""Records that cannot be read: they stop the command, or are left out, counted and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors
from unit.tools.prepare.prepare_files import contents, json_lines, prepare_config, rows

from pretraining.cli import main
from pretraining.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare import documents, encode, units
from pretraining.tools.prepare.encode import loss_counter
from pretraining.tools.prepare.prepare import prepare

LINES = [
    b'{"text": "one"}',
    b'{"text": "half a pair \\ud800"}',
    b'{"text": "two"}',
    b'{"text": "cut',
    b'{"text": 12}',
    b'{"text": ""}',
    b'{"text": "latin \xf6"}',
    b'{"body": "no text"}',
    b'{"text": "three"}',
]
FAULTS = [
    "a.jsonl, row 2: its text has half of a surrogate pair (\\ud800), which is not Unicode",
    "a.jsonl, row 4: not valid JSON (Invalid control character at",
    "a.jsonl, row 5: field 'text' holds 12, not text. Set another --text_field",
    "a.jsonl, row 7: not UTF-8 at byte 119 (0xf6, invalid start byte)",
    "a.jsonl, row 8: no field 'text'. The fields are: 'body'",
]


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES) + b"\n")
    train_tokenizer(["one two three"], 300).save(tmp_path)
    return prepare_config(tmp_path, "a.jsonl", tokenizer_path=str(tmp_path))


@pytest.mark.parametrize("unit_bytes", [1 << 28, 40])
def test_on_request_bad_records_are_left_out_counted_and_named(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unit_bytes: int
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    config = replace(config, bad_records="skip")
    summary = prepare(config)
    tokenizer = load_tokenizer(config.output_path)
    assert [tokenizer.decode(row) for row in rows(summary.folder)] == ["one", "two", "three"]
    assert (summary.documents, summary.empty_documents, summary.bad_records) == (3, 1, 5)
    if unit_bytes > 40:
        for name, wanted in zip(summary.bad_record_names, FAULTS, strict=True):
            assert wanted in name
    content = json.loads((summary.folder / "prepare.json").read_text())
    assert (content["bad_records"], content["bad_record_names"]) == (5, summary.bad_record_names)
    printed = capsys.readouterr().out
    assert "left out   5 records that cannot be read, the first:" in printed and summary.bad_record_names[0] in printed
    assert prepare(config) == summary


def test_a_resume_with_the_flag_keeps_encoded_units_and_without_it_rereads_bad_ones(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [b'{"text": "good"}'] * 9
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good, b"bad", *good]))
    monkeypatch.setattr(units, "UNIT_BYTES", 90)
    config = replace(config, num_workers=1)
    encoded, stopped, encode_unit = list[int](), set[int](), encode.encode_unit

    def counted(unit: units.Unit, *rest: Any) -> Any:
        encoded.append(unit.number)
        if unit.number in stopped:
            raise DataError("stopped")
        return encode_unit(unit, *rest)

    monkeypatch.setattr(encode, "encode_unit", counted)
    with pytest.raises(DataError, match=r"row \d+: not valid JSON .*--bad_records=skip"):
        prepare(config)
    stopped.add(3)
    with pytest.raises(DataError, match="stopped"):
        prepare(replace(config, bad_records="skip"))
    stopped.clear()
    with pytest.raises(DataError, match="not valid JSON"):
        prepare(config)
    assert encoded.count(0) == 1, "units without bad records are kept"
    assert prepare(replace(config, bad_records="skip")).bad_records == 1


def test_a_text_with_a_bad_later_part_is_skipped_completely(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 20)
    (tmp_path / "in").mkdir()
    for name, content in (("a.txt", b"one " * 50), ("b.txt", b"two " * 50 + b"\xff"), ("c.txt", b"three " * 50)):
        (tmp_path / "in" / name).write_bytes(content)
    config = replace(config, input_path=(str(tmp_path / "in"),), bad_records="skip")
    for batch in (1 << 19, 30):
        monkeypatch.setattr(encode, "BATCH_CHARACTERS", batch)
        summary = prepare(replace(config, output_path=str(tmp_path / f"out{batch}")))
        decoded = [load_tokenizer(tmp_path).decode(row) for row in rows(summary.folder)]
        assert decoded == ["one " * 50, "three " * 50]
        assert summary.bad_record_names[0].startswith("b.txt: not UTF-8 at byte 200 (0xff")


def test_an_input_without_good_records_is_an_error(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n' * 3)
    with pytest.raises(DataError, match=r"cannot be read \(the first: a\.jsonl, row 1: no field 'text'"):
        prepare(replace(config, bad_records="skip"))
    assert not [name for name in contents(tmp_path / "out") if "prepare.json" in name]


# Text that a tokenizer cannot encode is counted, and named where it begins

LETTERS = {letter: number for number, letter in enumerate("abcde ▁")}
BYTES = {f"<0x{byte:02X}>": 100 + byte for byte in range(256)}
ALPHABET = set(pre_tokenizers.ByteLevel.alphabet())


def made(model: models.Model, pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    return library


def saved(folder: Path, library: tokenizers.Tokenizer) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def losses(tokenizer: Tokenizer, *texts: str) -> list[int] | None:
    count, ids = loss_counter(tokenizer), tokenizer.encode_batch(texts)
    flat = np.array([token for each in ids for token in each], np.uint32)
    return None if count is None else count(texts, flat, np.array([len(each) for each in ids])).tolist()


def words(*known: str) -> dict[str, int]:
    return {word: number for number, word in enumerate(["<unk>", *known])}


def of_bytes(alphabet: set[str]) -> models.Model:
    return models.BPE({letter: number for number, letter in enumerate(sorted(alphabet))}, [])


UNKNOWN = {"<unk>": 50, **LETTERS}
CASES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], list[int] | None]] = {
    "bpe drops": (lambda: made(models.BPE(LETTERS, [])), [0, 2, 3, 0]),
    "metaspace drops": (lambda: made(models.BPE(LETTERS, []), pre_tokenizers.Metaspace()), [0, 2, 3, 0]),
    "bpe unknown": (lambda: made(models.BPE(UNKNOWN, [], unk_token="<unk>")), [0, 2, 3, 0]),
    "bpe fused": (lambda: made(models.BPE(UNKNOWN, [], unk_token="<unk>", fuse_unk=True)), [0, 1, 1, 0]),
    "unigram": (lambda: made(models.Unigram([("<unk>", -9.0), *((each, -1.0) for each in LETTERS)], 0)), [0, 1, 1, 0]),
    "words": (
        lambda: made(models.WordLevel(words("ab", "cd"), unk_token="<unk>"), pre_tokenizers.Whitespace()),
        [0, 1, 1, 0],
    ),
    "word pieces": (
        lambda: made(models.WordPiece(words("ab", "cd", "é"), unk_token="<unk>"), pre_tokenizers.Whitespace()),
        [0, 1, 1, 0],
    ),
    "some bytes": (lambda: made(of_bytes(ALPHABET - {"Ã"}), pre_tokenizers.ByteLevel(False)), [0, 2, 0, 0]),
    "bytes": (lambda: made(of_bytes(ALPHABET), pre_tokenizers.ByteLevel(False)), None),
    "trained here": (lambda: train_tokenizer(["text"], 300).library, None),
    "byte fallback": (lambda: made(models.BPE({**BYTES, **LETTERS}, [], byte_fallback=True)), None),
    "unused bytes": (lambda: made(models.BPE({**BYTES, **LETTERS}, [])), [0, 2, 3, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_each_kind_of_tokenizer_is_counted_in_each_text(tmp_path: Path, name: str) -> None:
    make, wanted = CASES[name]
    assert losses(saved(tmp_path, make()), "ab cd", "ab éñ", "漢字語", "") == wanted


def test_characters_that_a_tokenizer_removes_on_purpose_are_no_loss(tmp_path: Path) -> None:
    library = made(models.BPE(LETTERS, []), pre_tokenizers.Whitespace())
    library.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    assert losses(saved(tmp_path, library), "á B\n\tc", "áx") == [0, 1]


def test_a_tokenizer_without_the_letter_a_and_without_unknown_tokens_is_used(tmp_path: Path) -> None:
    library = made(
        models.WordLevel({"A": 0, "C": 1, "<s>": 2}, unk_token="<unk>"), pre_tokenizers.Split("", "isolated")
    )
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    assert saved(tmp_path / "dna", library).begin_of_text == 2
    (tmp_path / "in.txt").write_text("ACCA")
    summary = prepare(prepare_config(tmp_path, "in.txt", tokenizer_path=str(tmp_path / "dna")))
    assert rows(summary.folder) == [[0, 1, 1, 0]]


def test_a_loss_in_a_file_whose_name_is_not_utf_8_is_recorded(tmp_path: Path) -> None:
    saved(tmp_path, made(models.BPE(LETTERS, [])))
    (tmp_path / "\udcff.txt").write_text("aé")
    config = prepare_config(tmp_path, "?.txt", tokenizer_path=str(tmp_path), dataset="odd")
    assert prepare(config).first_loss == prepare(config).first_loss == "\udcff.txt"


def test_the_summary_names_the_first_place_and_above_one_percent_there_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, made(models.BPE(LETTERS, [])))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(["abc " * 100]))
    (tmp_path / "in/b.jsonl").write_bytes(json_lines(["cab", "é漢", "aé"]))
    flags = [f"--input_path={tmp_path}/in", f"--tokenizer_path={tmp_path}"]
    main(["prepare", *flags, f"--output_path={tmp_path}/out"])
    lost = "3 of 407 characters have no token (0.7%), the first in b.jsonl, row 2"
    printed = capsys.readouterr().out
    assert f"  lost       {lost}\n" in printed and "(1 empty ones left out)" in printed
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    content = json.loads((tmp_path / "out/in/prepare.json").read_text())
    assert (content["lost"], content["first_loss"]) == (3, "b.jsonl, row 2")
    (tmp_path / "in/a.jsonl").unlink()
    main(["prepare", *flags, f"--output_path={tmp_path}/again"])
    main(["prepare", *flags, f"--output_path={tmp_path}/again"])
    assert caplog.text.count("The tokenizer cannot encode this text: 3 of 7 characters have no token (42.9%)") == 2


def test_unknown_tokens_are_named_and_a_text_that_vanishes_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.txt").write_text("ab xx cd " * 9)
    config = prepare_config(tmp_path, "in.txt", tokenizer_path=str(tmp_path / "words"))
    saved(tmp_path / "words", CASES["words"][0]())
    summary = prepare(config)
    assert (summary.lost, summary.tokens, summary.first_loss) == (9, 27, "in.txt")
    assert "9 of 27 tokens are '<unk>' (0) (33.3%), the first in in.txt. Use one that encodes bytes." in caplog.text
    saved(tmp_path / "words", made(models.BPE({"q": 0}, [])))
    with pytest.raises(DataError, match="hold only characters that the tokenizer cannot encode: there is nothing"):
        prepare(replace(config, output_path=str(tmp_path / "none")))
    saved(tmp_path / "words", made(models.WordLevel({"ab xx cd": 0}, unk_token="<unk>")))
    with pytest.raises(DataError, match=r"the tokenizer fails on a text \(WordLevel error: Missing"):
        prepare(replace(config, output_path=str(tmp_path / "fails")))


def test_rows_of_token_ids_with_a_missing_token_are_left_out(config: PrepareConfig, tmp_path: Path) -> None:
    ids = pa.array([[1, 2], [3, None], [4]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"ids": ids}), tmp_path / "ids.parquet")
    config = replace(config, input_path=(str(tmp_path / "ids.parquet"),), text_field="ids", bad_records="skip")
    summary = prepare(config)
    assert rows(summary.folder) == [[1, 2], [4]]
    assert summary.bad_record_names[0].startswith("ids.parquet, row 1: a token is missing (null)")
