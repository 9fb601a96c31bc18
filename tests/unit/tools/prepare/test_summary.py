"""What is shown of a dataset, and of several."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.tools.prepare.encoding_progress import Counts
from pretraining.tools.prepare.prepare import _median
from pretraining.tools.prepare.records import PrepareSummary
from pretraining.tools.prepare.summary import describe, describe_all, describe_training
from pretraining.tools.prepare.work import UnitRecord

WEB = PrepareSummary(
    folder=Path("data/web"),
    documents=1_000,
    empty_documents=12,
    tokens=400_000,
    characters=1_600_000,
    text_bytes=1_700_000,
    median_document_tokens=350,
    files=3,
    token_bytes=800_000,
    tokenizer="abc",
    vocab_size=4096,
    end_of_text=0,
)
IDS = replace(
    WEB,
    folder=Path("data/ids"),
    empty_documents=0,
    tokens=100_000,
    characters=0,
    text_bytes=0,
    median_document_tokens=None,
    tokenizer=None,
    end_of_text=None,
)


def test_a_dataset_in_a_few_lines() -> None:
    assert describe(WEB, Counts(documents=500, tokens=200_000), seconds=4.0).splitlines() == [
        "  documents  1,000 (12 empty ones left out)",
        "  tokens     400,000 (400 a document, median about 350)",
        "  text       1.7 MB (4.00 characters a token)",
        "  written    0.8 MB in 3 files below data/web",
        "  time       4.0 s (125 documents/s, 50,000 tokens/s)",
    ]
    assert describe(IDS).splitlines() == [
        "  documents  1,000",
        "  tokens     100,000 (100 a document)",
        "  written    0.8 MB in 3 files below data/ids",
    ]


def test_datasets_of_a_root_in_a_table_with_the_shares_that_training_gives_them() -> None:
    title, header, *rows = describe_all([IDS, WEB]).splitlines()
    assert title.startswith("All datasets in data; share is ")
    assert header.split() == (
        "dataset documents empty tokens mean median characters/token MB files share".split()  # noqa: SIM905
    )
    assert [row.split() for row in rows] == [
        ["ids", "1,000", "0", "100,000", "100", "-", "-", "0.8", "3", "20.00%"],
        ["web", "1,000", "12", "400,000", "400", "350", "4.00", "0.8", "3", "80.00%"],
    ]
    assert len({len(line) for line in (header, *rows)}) == 1


def test_the_flags_to_train_with() -> None:
    flags = "--data_path=data --datasets=web --sep_token=0 --tokenizer_path=data --vocab_size=4096"
    assert describe_training(WEB).splitlines() == ["Train on it with:", f"  {flags}"]


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [("abc", "The tokenizer names no end-of-text token"), (None, "There is no tokenizer here to name an end-of-text")],
)
def test_without_an_end_of_text_a_separator_is_to_be_chosen(tokenizer: str | None, reason: str) -> None:
    said = describe_training(replace(IDS, tokenizer=tokenizer))
    assert reason in said and "choose a --sep_token" in said
    assert ("--tokenizer_path" in said) == (tokenizer is not None)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=50))
def test_the_median_is_right_within_three_per_cent(lengths: list[int]) -> None:
    record = UnitRecord("key")
    for length in lengths:
        record.count(length)
    low = statistics.median_low(lengths)
    assert abs(_median(record.lengths) - low) <= max(low / 32, 0.5)
    assert sum(record.lengths.values()) == len(lengths) and len(record.lengths) < 16 * 24
