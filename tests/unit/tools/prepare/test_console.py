"""What is shown while it encodes, of a dataset, and of several."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretraining.launch.machine import MachineMemory
from pretraining.tools.prepare import console
from pretraining.tools.prepare.console import (
    LINE_INTERVAL_SECONDS,
    describe,
    describe_all,
    describe_training,
    encoding_progress,
    suggested_variant,
)
from pretraining.tools.prepare.records import PrepareSummary
from pretraining.tools.prepare.token_files import Counts

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


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=clock))


def test_without_a_terminal_progress_is_a_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    now = 0.0
    set_clock(monkeypatch, lambda: now)
    with encoding_progress(2000, 1000) as progress:
        for step in range(1, 5):
            now = step * LINE_INTERVAL_SECONDS / 2
            progress(Counts(documents=15, tokens=3000, text_bytes=30_000_000, input_bytes=100))
    assert caplog.messages == [
        "encoding: 60% of the input, 30 documents (2/s), 6,000 tokens (400/s), 4.0 MB/s, 1m 00s left",
        "encoding: 70% of the input, 60 documents (2/s), 12,000 tokens (400/s), 4.0 MB/s, 45s left",
    ]


@pytest.mark.parametrize(("left_bytes", "left"), [(100, "15s"), (4_000, "10m 00s"), (60_000, "2h 30m")])
def test_the_time_left_is_said_as_people_say_it(
    left_bytes: int, left: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    set_clock(monkeypatch, iter([0.0, *[LINE_INTERVAL_SECONDS] * 9]).__next__)
    with encoding_progress(100 + left_bytes, 0) as progress:
        progress(Counts(input_bytes=100))
    assert caplog.messages[0].endswith(f", {left} left")


def test_of_an_input_of_unknown_size_no_share_is_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    set_clock(monkeypatch, iter([0.0, *[LINE_INTERVAL_SECONDS] * 9]).__next__)
    with encoding_progress(0, 0, " (rank 0 of 2)") as progress:
        progress(Counts(documents=30, tokens=150))
    assert caplog.messages == ["encoding (rank 0 of 2): 30 documents (2/s), 150 tokens (10/s)"]


def test_on_a_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with encoding_progress(1000, 250) as progress:
        progress(Counts(documents=7, tokens=3000, input_bytes=250))
    assert "7 documents" in screen.getvalue() and "50%" in screen.getvalue()


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
    flags = "--data_path=data --datasets=web --sep_token=0 --tokenizer_path=data --model_variant=tiny --vocab_size=4096"
    assert describe_training(WEB).splitlines() == ["Train on it with:", f"  pretrain train {flags}"]
    assert "--tokenizer_path=data --bos_token=7 --model" in describe_training(WEB, begin_of_text=7)


@pytest.mark.parametrize(
    ("tokens", "gpu", "gib", "variant"),
    [
        (400_000, True, 64, "tiny"),  # 20 tokens a parameter are not there for any
        (3_000_000_000, True, 64, "125m"),
        (10**12, True, 64, "1b"),
        (10**12, False, 64, "350m"),  # half of the memory is for others
        (10**12, False, 2, "tiny"),
    ],
)
def test_the_suggested_model_suits_the_tokens_and_the_machine(
    tokens: int, gpu: bool, gib: int, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "has_gpu", lambda: gpu)
    memory = MachineMemory(gib * 2**30, gib * 2**30, "this machine")
    monkeypatch.setattr(console, "machine_memory", lambda: memory)
    assert suggested_variant(tokens, 32000) == variant


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [("abc", "The tokenizer names no end-of-text token"), (None, "There is no tokenizer here to name an end-of-text")],
)
def test_without_an_end_of_text_a_separator_is_to_be_chosen(tokenizer: str | None, reason: str) -> None:
    said = describe_training(replace(IDS, tokenizer=tokenizer))
    assert reason in said and "choose a --sep_token" in said
    assert ("--tokenizer_path" in said) == (tokenizer is not None)
