"""prepare.json, and datasets that have changed since it was written."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import UnitRecord, median_length, read_finished, read_summaries, read_summary
from pretraining.tools.prepare.token_files import TokenRows

TEXT = "Some text, long enough for a vocabulary of more than bytes. " * 9


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    (tmp_path / "texts.txt").write_text(TEXT)
    return PrepareConfig(input_path=(str(tmp_path / "texts.txt"),), output_path=str(tmp_path / "out"))


def damage_manifest(folder: Path) -> None:
    (folder / "prepare.json").write_text("{")


def outdate_manifest(folder: Path) -> None:
    content = json.loads((folder / "prepare.json").read_text())
    (folder / "prepare.json").write_text(json.dumps({**content, "format_version": 0}))


def empty_manifest(folder: Path) -> None:
    (folder / "prepare.json").write_text('{"format_version": 1}')


def exchange_types(folder: Path) -> None:
    content = json.loads((folder / "prepare.json").read_text())
    (folder / "prepare.json").write_text(json.dumps({**content, "tokens": {}}))


def shorten_file(folder: Path) -> None:
    (folder / "part_000000_000000.arrow").write_bytes(b"short")


def remove_file(folder: Path) -> None:
    (folder / "part_000000_000000.arrow").unlink()


def remove_tokenizer(folder: Path) -> None:
    (folder.parent / "tokenizer.json").unlink()


def exchange_tokenizer(folder: Path) -> None:
    train_tokenizer(["other"], 300).save(folder.parent)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_manifest, r"prepare\.json cannot be read \(JSONDecodeError.*delete"),
        (outdate_manifest, "has format 0, this version reads format 1"),
        (empty_manifest, r"prepare\.json cannot be read \(KeyError"),
        (exchange_types, r"prepare\.json cannot be read \(ValueError: a value is of another type"),
        (shorten_file, r"part_000000_000000\.arrow has 5 bytes, [\d,]+ bytes were written"),
        (remove_file, r"part_000000_000000\.arrow is gone"),
        (remove_tokenizer, r"tokenizer\.json, with which .* was encoded, is gone"),
        (exchange_tokenizer, "tokenizer: it has"),
    ],
)
def test_a_finished_dataset_that_has_changed_is_refused(
    config: PrepareConfig, damage: Callable[[Path], None], message: str
) -> None:
    damage(prepare(config).folder)
    with pytest.raises(DataError, match=message):
        prepare(config)


def test_a_dataset_of_an_older_release_is_read(config: PrepareConfig, capsys: pytest.CaptureFixture[str]) -> None:
    summary = prepare(config)
    file = summary.folder / "prepare.json"
    content = json.loads(file.read_text())
    del content["median_document_tokens"]
    for entry in content["files"]:
        del entry["crc32"]
    file.write_text(json.dumps(content))
    assert read_summary(summary.folder).median_document_tokens is None
    capsys.readouterr()
    assert prepare(config).tokens == summary.tokens
    assert "median" not in capsys.readouterr().out


def test_all_datasets_of_a_root_are_found_but_not_hidden_ones(config: PrepareConfig) -> None:
    summary = prepare(config)
    root = summary.folder.parent
    for name in (".hidden", "b", "a"):
        (root / name).mkdir()
        (root / name / "prepare.json").write_bytes((summary.folder / "prepare.json").read_bytes())
    assert [found.folder.name for found in read_summaries(root)] == ["a", "b", "texts"]
    assert read_summaries(root / "nowhere") == []


def test_where_there_is_nothing_nothing_is_finished(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert read_finished(tmp_path / "none", {}, None) is None
    assert read_finished(tmp_path / "empty", {}, None) is None
    assert read_finished(tmp_path / "file/below", {}, None) is None
    with pytest.raises(DataError, match="was not made by"):
        read_finished(tmp_path / "file", {}, None)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=50))
def test_the_median_is_right_within_three_per_cent(lengths: list[int]) -> None:
    record = UnitRecord("key")
    record.count(TokenRows(np.array([7]), np.array(lengths), np.zeros((len(lengths), 3), np.int64)))
    low = statistics.median_low(lengths)
    assert abs(median_length([record]) - low) <= max(low / 32, 0.5)
    assert sum(record.lengths.values()) == len(lengths) and len(record.lengths) < 16 * 24
