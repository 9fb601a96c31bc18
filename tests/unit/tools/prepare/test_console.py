"""What is shown while it encodes."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from pretraining.tools.prepare import console
from pretraining.tools.prepare.console import LINE_INTERVAL_SECONDS, Progress
from pretraining.tools.prepare.records import Counts


@pytest.mark.parametrize(("total", "done", "shares"), [(2000, 1000, ("60%", "70%")), (0, 0, ("", ""))])
def test_progress_is_a_line_now_and_then(
    total: int,
    done: int,
    shares: tuple[str, str],
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
    assert len(caplog.messages) == 2 and "6,000 tokens (400/s)" in caplog.messages[0]
    assert all(
        share in line and ("left" in line) == bool(total) for share, line in zip(shares, caplog.messages, strict=True)
    )
