"""`pretrain verify --data_path`: every fault of token files is named with its file and its row."""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from unit.data.token_files import make_root, random_documents, write_documents

from pretraining.errors import DataError
from pretraining.files import file_checksum
from pretraining.tools import verify as verify_module
from pretraining.tools.command_settings import PrepareConfig, VerifyConfig
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.verify import verify

FIRST, SECOND = "part_000000_000000.arrow", "part_000000_000001.arrow"


class Fault(NamedTuple):
    """A printed line: `path: text` or `path, row N: text`."""

    path: Path
    row: int | None
    text: str


def faults_of(root: Path, **settings: Any) -> list[Fault]:
    with redirect_stdout(StringIO()) as out, pytest.raises(DataError, match=r"\d+ faults? in \d+ files?"):
        verify(VerifyConfig(data_path=str(root), **settings))
    faults = []
    for line in out.getvalue().splitlines():
        if line.startswith("dataset '"):  # has none
            continue
        match = re.fullmatch(r"(/[^:]+?)(?:, row (\d+))?: (.+)", line)
        assert match is not None, line
        faults.append(Fault(Path(match[1]), int(match[2]) if match[2] else None, match[3]))
    return faults


def summary_of(root: Path, **settings: Any) -> list[str]:
    with redirect_stdout(StringIO()) as out:
        verify(VerifyConfig(data_path=str(root), **settings))
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    (root / "texts").mkdir()
    for number in range(6):
        (root / f"texts/{number}.txt").write_text(f"Document {number}. " * (20 + number))
    texts, output = str(root / "texts"), str(root / "out")
    return prepare(PrepareConfig(input_path=(texts,), output_path=output, tokens_per_file=100)).folder


@pytest.fixture
def prepared(prepared_once: Path, tmp_path: Path) -> Path:
    """A dataset folder as `prepare` makes it, of several files; it may be spoilt."""
    return shutil.copytree(prepared_once, tmp_path / "out" / prepared_once.name)


def test_files_without_faults_are_summed_up(tmp_path: Path, prepared: Path) -> None:
    root = make_root(tmp_path / "plain", web=60, code=30)
    lines = summary_of(root, vocab_size=1000)
    assert lines[0].startswith("dataset 'code': 2 files, 30 documents, ") and "all below 1,000; no chec" in lines[0]
    assert lines[-1].startswith("4 files, ") and lines[-1].endswith("no faults")
    assert "vocabulary not checked" in summary_of(root, datasets=("web",))[0]
    record = json.loads((prepared / "prepare.json").read_text())
    (line, _) = summary_of(prepared.parent)
    assert f"all below {record['tokenizer']['vocab_size']:,}; checksums as in prepare.json" in line
    assert f"{record['documents']:,} documents, {record['tokens']:,} tokens" in line
    for entry in record["files"]:
        assert entry["crc32"] == f"{zlib.crc32((prepared / entry['name']).read_bytes()):08x}"
    (prepared / "prepare.json").unlink()
    assert "no checksums" in summary_of(prepared.parent)[0]


def flip_a_token(folder: Path) -> None:
    content = bytearray((folder / SECOND).read_bytes())
    tokens = pa.ipc.open_file(folder / SECOND).read_all()["tokens"][0].as_py()[:4]
    content[content.index(np.array(tokens, "<u2").tobytes())] ^= 1
    (folder / SECOND).write_bytes(content)


def remove_all(folder: Path) -> None:
    write_documents(folder.parent / "web/x.arrow", [[1]])
    for path in folder.glob("*.arrow"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip_a_token, SECOND),
        (lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-100]), SECOND),
        (lambda folder: (folder / SECOND).unlink(), SECOND),
        (remove_all, ""),
        (lambda folder: write_documents(folder / "more.arrow", [[1, 2]]), "more.arrow"),
    ],
)
def test_changes_since_the_preparation_are_named(prepared: Path, damage: Callable[[Path], object], name: str) -> None:
    damage(prepared)
    assert faults_of(prepared.parent)[0].path == prepared / name


def test_a_record_that_holds_nonsense_is_a_fault(prepared: Path) -> None:
    record = json.loads((prepared / "prepare.json").read_text())
    for changes in ({"files": [{"name": None}]}, {"files": 3}, {"tokenizer": {"vocab_size": math.inf}}):
        (prepared / "prepare.json").write_text(json.dumps(record | changes))
        assert [fault.path for fault in faults_of(prepared.parent)] == [prepared / "prepare.json"]


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
    (web / "lfs.arrow").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\n")
    faults = faults_of(tmp_path, num_workers=3)
    assert [fault.path.stem for fault in faults] == ["column", "lfs", "null", "short", "text", "type", "zero"]
    assert "git lfs pull" in faults[1].text


@pytest.mark.parametrize(("batch_documents", "kind"), [(1, pa.uint16()), (3, pa.int64()), (1000, pa.int32())])
def test_the_first_row_beyond_the_vocabulary_is_named(tmp_path: Path, batch_documents: int, kind: pa.DataType) -> None:
    documents: list[list[int] | None] = [*random_documents(60, vocab_size=500)]
    documents[0], documents[4], documents[7] = [], None, []
    path = tmp_path / "web/x.arrow"
    wrong = {59: ([3, 4, 1000], 2, 1000), 8: ([500], 0, 500), 5: ([1, 600, *[2] * 30, 601], 1, 600)}
    for count, (row, (document, place, token)) in enumerate(wrong.items(), start=1):
        documents[row] = document
        write_documents(path, documents, kind=pa.list_(kind), batch_documents=batch_documents)
        (fault,) = faults_of(tmp_path, vocab_size=500)
        assert (fault.path, fault.row) == (path, row) and fault.text.startswith(f"token {place} ")
        assert fault.text.endswith(f"; {count} such rows in this file")
        content, width = path.read_bytes(), kind.bit_width // 8
        byte = int(re.findall(r"at byte ([\d,]+)", fault.text)[0].replace(",", ""))
        assert int.from_bytes(content[byte : byte + width], "little") == token


@pytest.mark.parametrize(("kind", "vocab_size"), [(pa.int16(), 128_256), (pa.int32(), None), (pa.int64(), 500)])
def test_a_negative_token_is_a_fault_in_any_vocabulary(
    tmp_path: Path, kind: pa.DataType, vocab_size: int | None
) -> None:
    write_documents(tmp_path / "web/x.arrow", [[1, 499], [1, -100]], kind=pa.list_(kind))
    assert [fault.row for fault in faults_of(tmp_path, vocab_size=vocab_size)] == [1]
    write_documents(tmp_path / "web/x.arrow", [[-1]] * 250, kind=pa.list_(kind), batch_documents=9)
    (fault,) = faults_of(tmp_path, vocab_size=vocab_size)
    assert fault.row == 0 and fault.text.endswith("; 250 such rows in this file")


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> tuple[str, int]:
        if path.name == "one.arrow":
            raise OSError(5, "Input/output error")
        return file_checksum(path)

    make_root(tmp_path, web=9)
    monkeypatch.setattr(verify_module, "file_checksum", failing)
    (broken,) = faults_of(tmp_path)
    assert broken.path == tmp_path / "web/one.arrow" and "Input/output error" in broken.text


@pytest.mark.parametrize(("stored", "read"), [("uint32", "uint16"), ("uint16", "uint32"), ("uint64", "uint16")])
@pytest.mark.parametrize(("suffix", "sep_token"), [(".npy", 0), (".bin", 2)])
def test_tokens_of_another_width_are_one_fault(
    tmp_path: Path, stored: str, read: str, suffix: str, sep_token: int
) -> None:
    tokens = np.random.default_rng(1).integers(3, 30_000, 4000).astype(stored)
    tokens[::40] = sep_token
    if read == "uint32":
        tokens[2:4] = sep_token, 0  # a 32-bit separator
    (tmp_path / "web").mkdir()
    tokens.tofile(tmp_path / f"web/x{suffix}")
    (fault,) = faults_of(tmp_path, token_dtype=read, sep_token=sep_token)
    assert f"--token_dtype={stored}" in fault.text and fault.path == tmp_path / f"web/x{suffix}"
    assert "no faults" in summary_of(tmp_path, token_dtype=stored, sep_token=sep_token)[-1]


def test_files_of_other_splits_are_named_and_are_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train", "validation"):
        write_documents(tmp_path / f"web/{name}.arrow", [[1, 2], [3]])
    assert "no faults" in summary_of(tmp_path)[-1] and "web/validation.arrow" in caplog.text
