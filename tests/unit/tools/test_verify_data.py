"""Every fault of token files is named with its place."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from unit.data.token_files import make_root, random_documents, write_documents

from pretraining.config.commands import PrepareConfig, VerifyConfig
from pretraining.config.training import DataConfig
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.errors import DataError
from pretraining.tools import verify_data as verify_module
from pretraining.tools.prepare.console import LINE_INTERVAL_SECONDS
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.token_files import TokenWriter
from pretraining.tools.verify_data import verify

FIRST, SECOND = "part_000000_000000.arrow", "part_000000_000001.arrow"


def faults_of(config: VerifyConfig) -> list[str]:
    with redirect_stdout(StringIO()) as out, pytest.raises(DataError, match=r"\d+ faults? in \d+ files?"):
        verify(config)
    return out.getvalue().splitlines()


def summary_of(config: VerifyConfig) -> list[str]:
    with redirect_stdout(StringIO()) as out:
        verify(config)
    return out.getvalue().splitlines()


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A dataset folder as `prepare` makes it, of several files."""
    for number in range(6):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / f"texts/{number}.txt").write_text(f"Document {number}. " * (20 + number))
    config = PrepareConfig(
        input_path=(str(tmp_path / "texts"),), output_path=str(tmp_path / "out"), tokens_per_file=100
    )
    return prepare(config).folder


def test_files_without_faults_are_summed_up(tmp_path: Path) -> None:
    root = make_root(tmp_path, web=60, code=30)
    lines = summary_of(VerifyConfig(data_path=str(root), vocab_size=1000))
    assert lines[0].startswith("dataset 'code': 2 files, 30 documents, ")
    assert "all below 1,000; no checksums in a prepare.json to compare with" in lines[0]
    assert lines[-1].startswith("4 files, ") and lines[-1].endswith("no faults")
    assert "vocabulary not checked" in summary_of(VerifyConfig(data_path=str(root), datasets=("web",)))[0]


def test_a_prepared_dataset_is_compared_with_what_was_written(prepared: Path) -> None:
    record = json.loads((prepared / "prepare.json").read_text())
    assert len(record["files"]) > 2 and all(re.fullmatch("[0-9a-f]{8}", entry["crc32"]) for entry in record["files"])
    lines = summary_of(VerifyConfig(data_path=str(prepared.parent)))
    assert f"all below {record['tokenizer']['vocab_size']:,}; checksums as in prepare.json" in lines[0]
    assert f"{record['documents']:,} documents, {record['tokens']:,} tokens" in lines[0]


def flip_a_token(folder: Path) -> str:
    path = folder / SECOND
    content = bytearray(path.read_bytes())
    middle = content.index(np.array(pa.ipc.open_file(path).read_all()["tokens"][0].as_py()[:4], "<u2").tobytes())
    content[middle] ^= 1
    path.write_bytes(content)
    return rf"{SECOND} has changed since `pretrain prepare` wrote it: its bytes have the checksum \w{{8}}, not "


def truncate(folder: Path) -> str:
    path = folder / SECOND
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    return rf"{SECOND} has {size - 100:,} bytes, but `pretrain prepare` wrote {size:,}"


def remove(folder: Path) -> str:
    (folder / SECOND).unlink()
    return rf"{SECOND} is gone, but prepare\.json names it"


def add(folder: Path) -> str:
    write_documents(folder / "more.arrow", [[1, 2]])
    return r"more\.arrow was not made by `pretrain prepare`"


def swap(folder: Path) -> str:
    one, two = folder / FIRST, folder / SECOND
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return rf"{FIRST} has (changed|[\d,]+ bytes)"


def damage_record(folder: Path) -> str:
    (folder / "prepare.json").write_text("{")
    return r"prepare\.json cannot be read \(JSONDecodeError"


@pytest.mark.parametrize("damage", [flip_a_token, truncate, remove, add, swap, damage_record])
def test_what_changed_since_it_was_prepared_is_named(prepared: Path, damage: Callable[[Path], str]) -> None:
    message = damage(prepared)
    faults = faults_of(VerifyConfig(data_path=str(prepared.parent)))
    assert re.search(message, "\n".join(faults)), faults


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record["files"][0].update(name=None),
        lambda record: record["files"][0].update(bytes="12"),
        lambda record: record["files"].append({}),
        lambda record: record.update(files=3),
        lambda record: record["tokenizer"].update(vocab_size=float("inf")),
        lambda record: record.update(tokenizer=[]),
        lambda record: record.pop("tokenizer"),
    ],
)
def test_a_record_that_holds_nonsense_is_a_fault(prepared: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((prepared / "prepare.json").read_text())
    damage(record)
    (prepared / "prepare.json").write_text(json.dumps(record))
    (fault,) = faults_of(VerifyConfig(data_path=str(prepared.parent)))
    assert fault.startswith(f"{prepared}/prepare.json cannot be read (")


def test_a_prepared_dataset_that_lost_all_its_files_is_named(prepared: Path) -> None:
    write_documents(prepared.parent / "web/x.arrow", [[1]])
    for path in prepared.glob("*.arrow"):
        path.unlink()
    assert faults_of(VerifyConfig(data_path=str(prepared.parent))) == [
        f"{prepared} has a prepare.json, but its token files are gone"
    ]


def test_a_record_of_an_older_release_has_no_checksums(prepared: Path) -> None:
    record = json.loads((prepared / "prepare.json").read_text())
    for entry in record["files"]:
        del entry["crc32"]
    (prepared / "prepare.json").write_text(json.dumps(record))
    assert "no checksums" in summary_of(VerifyConfig(data_path=str(prepared.parent)))[0]


def test_all_faults_of_all_files_are_named_not_only_the_first(tmp_path: Path) -> None:
    web = tmp_path / "web"
    write_documents(web / "a.arrow", [[1, 2]])
    write_documents(web / "column.arrow", [[1]], column="ids")
    write_documents(web / "type.arrow", [[1]], kind=pa.list_(pa.float32()))
    write_documents(web / "null.arrow", [[1, 2], [3, None]])  # type: ignore[list-item]
    write_documents(web / "short.arrow", random_documents(50))
    (web / "short.arrow").write_bytes((web / "short.arrow").read_bytes()[:-7])
    (web / "zero.arrow").write_bytes(b"")
    (web / "text.arrow").write_text("no Arrow file at all, but text")
    faults = faults_of(VerifyConfig(data_path=str(tmp_path), num_workers=3))
    expected = {
        "column": "no column 'tokens', but ids",
        "null": "has missing tokens (null) in rows from 0 on",
        "short": "truncated or damaged",
        "text": "truncated or damaged",
        "type": "of type list<item: float>",
        "zero": "damaged: 0 bytes are no Arrow file",
    }
    assert len(faults) == len(expected)
    for fault, (name, message) in zip(faults, expected.items(), strict=True):
        assert f"{web}/{name}.arrow" in fault and message in fault


@pytest.mark.parametrize("batch_documents", [1, 3, 1000])
@pytest.mark.parametrize("kind", [pa.uint16(), pa.int32(), pa.int64()])
def test_every_row_beyond_the_vocabulary_is_named_with_its_byte(
    tmp_path: Path, batch_documents: int, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "_TOKENS_AT_ONCE", 16)
    documents: list[list[int] | None] = [*random_documents(60, vocab_size=500)]
    documents[0], documents[4], documents[7] = [], None, []
    documents[5] = [1, 600, 2, 601]
    documents[8] = [500]
    documents[59] = [3, 4, 1000]
    path = tmp_path / "web/x.arrow"
    write_documents(path, documents, kind=pa.list_(kind), batch_documents=batch_documents)
    faults = faults_of(VerifyConfig(data_path=str(tmp_path), vocab_size=500))
    found = [re.search(r"row (\d+), byte ([\d,]+): token (\d+) of the document is (\d+)", fault) for fault in faults]
    places = [tuple(int(group.replace(",", "")) for group in match.groups()) for match in found if match]
    assert [(row, position, token) for row, _, position, token in places] == [(5, 1, 600), (8, 0, 500), (59, 2, 1000)]
    assert "(2 such tokens in the row)" in faults[0] and "such tokens" not in faults[1]
    content, width = path.read_bytes(), kind.bit_width // 8
    for _, byte, _, token in places:
        assert int.from_bytes(content[byte : byte + width], "little") == token


@pytest.mark.parametrize("kind", [pa.int16(), pa.int32(), pa.int64()])
@pytest.mark.parametrize("vocab_size", [500, 128_256, None])
def test_a_negative_token_is_a_fault_also_where_no_vocabulary_is_known(
    tmp_path: Path, kind: pa.DataType, vocab_size: int | None
) -> None:
    write_documents(tmp_path / "web/x.arrow", [[1, 499], [1, -100]], kind=pa.list_(kind))
    (fault,) = faults_of(VerifyConfig(data_path=str(tmp_path), vocab_size=vocab_size))
    assert "row 1, " in fault and "token 1 of the document is -100" in fault


def test_many_wrong_rows_are_counted(tmp_path: Path) -> None:
    write_documents(tmp_path / "web/x.arrow", [[900]] * 250, batch_documents=9)
    faults = faults_of(VerifyConfig(data_path=str(tmp_path), vocab_size=500))
    assert len(faults) == verify_module.FAULTS_SHOWN + 1
    assert faults[-1].endswith("x.arrow: 150 more rows have wrong tokens")


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> tuple[str, int]:
        raise OSError(5, "Input/output error")

    make_root(tmp_path, web=9)
    monkeypatch.setattr(verify_module, "file_checksum", failing)
    faults = faults_of(VerifyConfig(data_path=str(tmp_path)))
    assert len(faults) == 2 and faults[0].endswith("web/one.arrow cannot be read: Input/output error")


def test_a_file_that_grows_meanwhile_is_a_fault(tmp_path: Path) -> None:
    write_documents(tmp_path / "x.arrow", [[1]])
    size = (tmp_path / "x.arrow").stat().st_size
    report = verify_module.check_file(str(tmp_path / "x.arrow"), size - 1, ArrowFormat(DataConfig()))
    assert report.faults == [
        f"{tmp_path}/x.arrow has changed since it was listed: it had {size - 1:,} bytes, now {size:,}"
    ]


def test_progress_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    times = iter([0.0, LINE_INTERVAL_SECONDS / 2, LINE_INTERVAL_SECONDS])
    progress = verify_module._Progress(3 * 10**9, clock=lambda: next(times))
    progress.add(verify_module.FileReport(bytes=10**9))
    assert not caplog.messages
    progress.add(verify_module.FileReport(bytes=5 * 10**8))
    assert caplog.messages == ["verifying: 50% of 3.00 GB, 100 MB/s"]


def test_a_folder_without_data_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dataset in"):
        verify(VerifyConfig(data_path=str(tmp_path)))


def test_the_checksum_is_of_the_files_bytes(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, np.dtype(np.uint16), tokens_per_file=5) as writer:
        writer.write(np.arange(7, dtype=np.uint16), np.array([7]))
    (file,) = writer.files
    assert file.crc32 == f"{zlib.crc32((tmp_path / file.name).read_bytes()):08x}"
