"""Records that cannot be read: they stop the command, or are left out, counted and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.tools.prepare.prepare_files import contents, prepare_config, rows

from pretraining.data.tokenizer import load_tokenizer, train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import documents, encode, units
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import UnitRecord, WorkFolder

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


def test_without_it_the_first_one_stops_and_the_error_names_the_flag(config: PrepareConfig) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: .*--bad_records=skip"):
        prepare(config)


def test_a_resume_with_the_flag_keeps_encoded_units_and_without_it_rereads_bad_ones(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [b'{"text": "good"}'] * 9
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good, b"bad", *good]))
    monkeypatch.setattr(units, "UNIT_BYTES", 90)
    config = replace(config, num_workers=1)
    with pytest.raises(DataError, match="not valid JSON"):
        prepare(config)
    files = tmp_path / "out/.a.preparing/files"
    before = {path.name: path.stat().st_ino for path in files.glob("*.arrow")}
    assert before
    encoded, encode_unit = [], encode.encode_unit

    def counted(unit: units.Unit, *rest: object) -> object:
        encoded.append(unit.number)
        return encode_unit(unit, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "encode_unit", counted)
    write_record = WorkFolder.write_record

    def stop_at_last(self: WorkFolder, unit: units.Unit, record: UnitRecord) -> None:
        if unit.number == 3:
            raise OSError(28, "No space left on device")
        write_record(self, unit, record)

    monkeypatch.setattr(WorkFolder, "write_record", stop_at_last)
    with pytest.raises(DataError, match="No space"):
        prepare(replace(config, bad_records="skip"))
    assert encoded and 0 not in encoded, "units without bad records are kept"
    assert {name: (files / name).stat().st_ino for name in before} == before
    monkeypatch.setattr(WorkFolder, "write_record", write_record)
    with pytest.raises(DataError, match="not valid JSON"):
        prepare(config)
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


def test_rows_of_token_ids_with_a_missing_token_are_left_out(config: PrepareConfig, tmp_path: Path) -> None:
    ids = pa.array([[1, 2], [3, None], [4]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"ids": ids}), tmp_path / "ids.parquet")
    config = replace(config, input_path=(str(tmp_path / "ids.parquet"),), text_field="ids", bad_records="skip")
    summary = prepare(config)
    assert rows(summary.folder) == [[1, 2], [4]]
    assert summary.bad_record_names[0].startswith("ids.parquet, row 1: a token is missing (null)")


def test_an_input_without_good_records_is_an_error(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n' * 3)
    with pytest.raises(DataError, match=r"cannot be read \(the first: a\.jsonl, row 1: no field 'text'"):
        prepare(replace(config, bad_records="skip"))
    assert not [name for name in contents(tmp_path / "out") if "prepare.json" in name]
