"""What is shown while it encodes, of a dataset, and of several."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretraining.tools.prepare import console
from pretraining.tools.prepare.console import (
    LINE_INTERVAL_SECONDS,
    Progress,
    describe_training,
    suggested_variant,
)
from pretraining.tools.prepare.records import Counts, PrepareSummary
from pretraining.tools.prepare.token_files import TokenFile

WEB = PrepareSummary(
    folder=Path("data/web"),
    settings={},
    documents=1_000,
    empty_documents=12,
    tokens=400_000,
    characters=1_600_000,
    text_bytes=1_700_000,
    median_document_tokens=350,
    files=(TokenFile("a", 1, 1, 300_000), TokenFile("b", 1, 1, 500_000)),
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


@pytest.mark.parametrize(
    ("total", "done", "share", "left"),
    [(2000, 1000, ("60% of the input", "70% of the input"), (" 1m 00s left", " 45s left")), (0, 0, ("", ""), ("", ""))],
    ids=["known size", "unknown size"],
)
def test_progress_is_a_line_now_and_then(
    total: int,
    done: int,
    share: tuple[str, str],
    left: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    now = 0.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    progress = Progress("encoding", total, done)
    for step in range(1, 5):
        now = step * LINE_INTERVAL_SECONDS / 2
        progress.add(Counts(documents=15, tokens=3000, text_bytes=30_000_000, input_bytes=100))
    first, second = caplog.messages
    assert "30 documents (2/s), 6,000 tokens (400/s), 4.0 MB/s" in first
    assert share[0] in first and share[1] in second and first.endswith(left[0]) and second.endswith(left[1])


def test_the_flags_to_train_with() -> None:
    flags = "--data_path=data --datasets=web --sep_token=0 --tokenizer_path=data --model_variant=tiny --vocab_size=4096"
    assert describe_training(WEB).splitlines() == ["Train on it with:", f"  pretrain train {flags}"]
    assert "--tokenizer_path=data --bos_token=7 --model" in describe_training(WEB, begin_of_text=7)


@pytest.mark.parametrize(
    ("tokens", "variant"),
    [(400_000, "tiny"), (3_000_000_000, "125m"), (10**12, "1b")],  # of 400,000, none has 20 per parameter
)
def test_the_suggested_model_suits_the_tokens(tokens: int, variant: str) -> None:
    assert suggested_variant(tokens, 32000) == variant


def test_without_an_end_of_text_a_separator_is_to_be_chosen() -> None:
    described = describe_training(IDS)
    assert "choose a --sep_token" in described and "--tokenizer_path" not in described
