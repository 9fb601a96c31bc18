"""What is shown while it encodes."""

from __future__ import annotations

import io

import pytest

from pretraining.tools.prepare.encoding_progress import LINE_INTERVAL_SECONDS, Counts, encoding_progress


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    lines: list[str] = []
    now = 0.0
    with encoding_progress(2000, 1000, lines.append, clock=lambda: now, terminal=False) as progress:
        for step in range(1, 5):
            now = step * LINE_INTERVAL_SECONDS / 2
            progress(Counts(documents=15, tokens=3000, text_bytes=30_000_000, input_bytes=100))
    assert lines == [
        "encoding: 60% of the input, 30 documents (2/s), 6,000 tokens (400/s), 4.0 MB/s, 1m 00s left",
        "encoding: 70% of the input, 60 documents (2/s), 12,000 tokens (400/s), 4.0 MB/s, 45s left",
    ]


@pytest.mark.parametrize(("left_bytes", "left"), [(100, "15s"), (4_000, "10m 00s"), (60_000, "2h 30m")])
def test_the_time_left_is_said_as_people_say_it(left_bytes: int, left: str) -> None:
    lines: list[str] = []
    times = iter([0.0, *[LINE_INTERVAL_SECONDS] * 9])
    with encoding_progress(100 + left_bytes, 0, lines.append, clock=lambda: next(times), terminal=False) as progress:
        progress(Counts(input_bytes=100))
    assert lines[0].endswith(f", {left} left")


def test_of_an_input_of_unknown_size_no_share_is_shown() -> None:
    lines: list[str] = []
    times = iter([0.0, *[LINE_INTERVAL_SECONDS] * 9])
    with encoding_progress(0, 0, lines.append, " (rank 0 of 2)", lambda: next(times), terminal=False) as progress:
        progress(Counts(documents=30, tokens=150))
    assert lines == ["encoding (rank 0 of 2): 30 documents (2/s), 150 tokens (10/s)"]


def test_on_a_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with encoding_progress(1000, 250, pytest.fail, terminal=True) as progress:
        progress(Counts(documents=7, tokens=3000, input_bytes=250))
    assert "7 documents" in screen.getvalue() and "50%" in screen.getvalue()
