"""prepare.json, and datasets that have changed since it was written."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.tools.prepare.prepare_files import contents

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import (
    Counts,
    UnitRecord,
    median_length,
    read_summary,
)

TEXT = "Some text, long enough for a vocabulary of more than bytes. " * 9


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    (tmp_path / "texts.txt").write_text(TEXT)
    return PrepareConfig(input_path=(str(tmp_path / "texts.txt"),), output_path=str(tmp_path / "out"))


def change_manifest(**changes: Any) -> Callable[[Path], object]:
    """Return a function that changes values in a prepare.json."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "prepare.json").read_text())
        (folder / "prepare.json").write_text(json.dumps({**content, **changes}))

    return change


FILE = "part_000000_000000.arrow"
# What is done to a finished dataset, the path that the error names below the root
CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "prepare.json").write_text("{"), "texts/prepare.json"),
    (lambda folder: (folder / "prepare.json").write_text('{"format_version": 1}'), "texts/prepare.json"),
    (change_manifest(format_version=0), "texts/prepare.json"),
    (change_manifest(tokens={}), "texts/prepare.json"),
    (lambda folder: (folder / FILE).write_bytes(b"short"), f"texts/{FILE}"),
    (lambda folder: (folder / FILE).unlink(), f"texts/{FILE}"),
    (lambda folder: (folder.parent / "tokenizer.json").unlink(), "texts"),
    (lambda folder: train_tokenizer(["other"], 300).save(folder.parent), "texts"),
]


@pytest.mark.parametrize(("change", "path"), CHANGES, ids=range(len(CHANGES)))
def test_a_finished_dataset_that_has_changed_is_refused(
    config: PrepareConfig, change: Callable[[Path], object], path: str
) -> None:
    change(prepare(config).folder)
    before = contents(Path(config.output_path))
    with pytest.raises(DataError) as error:
        prepare(config)
    assert error.value.path == Path(config.output_path) / path
    assert set(error.value.settings) == {"dataset", "output_path"}
    assert contents(Path(config.output_path)) == before


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


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=50))
def test_the_median_is_right_within_three_per_cent(lengths: list[int]) -> None:
    record = UnitRecord("key")
    record.add(Counts(), np.array([7]), np.array(lengths))
    low = statistics.median_low(lengths)
    assert abs(median_length([record]) - low) <= max(low / 32, 0.5)
    assert sum(record.lengths.values()) == len(lengths) and len(record.lengths) < 16 * 24
