"""Inputs that hold the same text twice."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.tools.prepare.prepare_files import json_lines, packed

from pretraining.cli import main
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare.inputs import Selection, list_files, warn_of_copies

ANY = Selection(PrepareConfig().extensions)


def warned(caplog: pytest.LogCaptureFixture, *inputs: Path, selection: Selection = ANY) -> list[str]:
    caplog.clear()
    warn_of_copies(list_files([str(each) for each in inputs], selection))
    return caplog.messages


def records(path: Path, seed: int = 0) -> None:
    """Write 200 records in the format that the name says."""
    texts = [random.Random(seed + n).randbytes(300).hex() for n in range(200)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    elif ".csv" in path.name:
        path.write_bytes(packed(path.name, "\n".join(["text", *texts]).encode()))
    else:
        path.write_bytes(packed(path.name, json_lines(texts)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.jsonl", "a.jsonl.gz"),
        ("train.jsonl", "train.parquet"),
        ("train-0.csv.xz", "train-0.ndjson"),
        ("web.parquet", "web.txt"),
    ],
)
def test_one_name_with_two_known_endings_in_a_folder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, second: str
) -> None:
    records(tmp_path / "in" / first)
    records(tmp_path / "in" / second)
    records(tmp_path / "in/other.jsonl", 999)
    message = (
        f"1 file probably read twice, the first is {tmp_path}/in/{second}: {tmp_path}/in/{first} has the same name"
    )
    assert warned(caplog, tmp_path / "in") == [f"{message} before their endings. Leave one out."]
    assert len(warned(caplog, tmp_path / "in" / first, tmp_path / "in" / second)) == 1


def test_copies_under_other_names_and_in_other_folders_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.jsonl", "b.jsonl", "deeper/c.jsonl"):
        records(tmp_path / "in" / name)
    records(tmp_path / "in/d.jsonl", 999)
    names = f"{tmp_path}/in/b.jsonl: {tmp_path}/in/a.jsonl has the same size and content. Leave one out."
    assert warned(caplog, tmp_path / "in") == [f"2 files probably read twice, the first is {names}"]


def test_files_that_only_look_alike_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["part-0001.jsonl.gz", "part-0002.jsonl.gz", "v1.0.jsonl", "v1.1.jsonl", "x/part-0001.jsonl.gz"]
    for seed, name in enumerate(names):
        records(tmp_path / "in" / name, seed * 999)
    texts = {name: f"This is the text of {name:9}" for name in ("a.py", "a.pyi", "README.md", "one.txt", "two.txt")}
    texts |= {"__init__.py": "", "x/__init__.py": "", "large.txt": "a" * 10**6, "like.txt": "a" * (10**6 - 1) + "b"}
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    assert not warned(caplog, tmp_path / "in")
    assert not warned(caplog, tmp_path / "in", selection=Selection(("py", "pyi", "txt", "md", "jsonl")))


def test_prepare_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records(tmp_path / "in/a.jsonl")
    records(tmp_path / "in/a.jsonl.gz")
    main(["prepare", f"--input_path={tmp_path}/in", f"--output_path={tmp_path}/out", "--vocab_size=300"])
    assert sum("probably read twice" in message for message in caplog.messages) == 1
