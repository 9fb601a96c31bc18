"""What is shown while it encodes."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from pretraining.tools.prepare import console
from pretraining.tools.prepare.console import LINE_INTERVAL_SECONDS, Progress
from pretraining.tools.prepare.records import Counts


def test_progress_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    for total, share in ((2000, "60%"), (0, "")):
        now = 0.0
        monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))  # noqa: B023
        progress = Progress("encoding", total, total // 2)
        caplog.clear()
        for step in (1, 2, 3):
            now = step * LINE_INTERVAL_SECONDS / 2
            progress.add(Counts(documents=15, tokens=3000, text_bytes=30_000_000, input_bytes=100))
        (line,) = caplog.messages
        assert "6,000 tokens (400/s)" in line and share in line and ("left" in line) == bool(total)
