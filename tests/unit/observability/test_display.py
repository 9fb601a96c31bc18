from __future__ import annotations

import io
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console

from pretraining.launch.terminal import log_to_terminal
from pretraining.observability import display as display_module
from pretraining.observability.display import LiveLine, PlainLines, choose_display, summary

log = logging.getLogger("pretraining.somewhere")

REPORT = {
    "loss": 3.25,
    "z_loss": 0.0,
    "learning_rate": 3e-4,
    "grad_norm": 0.5,
    "skipped_updates": 0,
    "step_seconds": 0.5,
    "tokens_per_second_per_gpu": 12345.6,
    "mfu": 0.456,
    "time_left_seconds": 3700.0,
}


def test_problems_and_user_defined_metrics_come_first_and_rates_are_of_all_devices() -> None:
    own = {"skipped_updates": 2, "custom/mine": 0.25}
    assert summary(REPORT | own, 80, devices=8).startswith("loss 3.2500  2 updates skipped  mine 0.25  98,765 tok/s  ")
    more = summary(REPORT | {"mfu": None, "z_loss": 0.0123}, 80, devices=1, shows_step_time=True)
    assert "0.500 s/step" in more and "z-loss 1.2e-02" in more and "MFU" not in more


@pytest.mark.parametrize(
    "name", ["mine", "entropy_of_the_next_token", "a_name_that_fills_half_of_a_terminal_with_words"]
)
def test_the_learning_rate_stays_in_the_line_whatever_else_is_in_it(name: str) -> None:
    for width in (80, 66, 37):
        for change in ({}, {"mfu": None}, {"skipped_updates": 2, "z_loss": 0.1}):
            line = summary(REPORT | change | {f"custom/{name}": 0.25}, width, devices=8)
            assert line.startswith("loss 3.2500  ") and line.endswith("  lr 3.0e-04") and len(line) <= width
    line = summary(REPORT | {"custom/mine": 0.25}, 69, devices=8)
    assert line == "loss 3.2500  mine 0.25  98,765 tok/s  grad 0.500  lr 3.0e-04"  # no MFU, no time left


@pytest.mark.parametrize(
    "custom", [{}, {"custom/mine": 0.25}, {"custom/a_name_that_fills_half_of_a_terminal_with_words": 1.0}]
)
def test_a_line_fits_80_columns(custom: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    month = REPORT | {"time_left_seconds": 28.5 * 86400, "grad_norm": 1.2e9, "z_loss": 0.1} | custom
    for change in ({}, {"skipped_updates": 20}, {"tokens_per_second_per_gpu": 1.2e6}):
        PlainLines(2000000, 1024, shows_step_time=True).show(1234567, month | change)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 and line.startswith("step 1234567/2000000  loss 3.2500  ") for line in lines)


def test_the_live_line_is_redrawn_and_messages_stay_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    log_to_terminal()
    with LiveLine(100, 1, console=Console(file=screen, force_terminal=True, width=80)) as display:
        for step in (50, 60):
            display.show(step, REPORT)
        log.info("evaluation [1] done")
    text = screen.getvalue()
    assert "step 50/100" in text and "loss 3.2500" in text and "evaluation [1] done" in text
    log.info("after it")
    assert capsys.readouterr().out == "after it\n"
    plain = PlainLines(100, 1)
    for step in (50, 60):
        plain.show(step, REPORT)
    assert all(text.count(f"{line}\n") == 1 for line in capsys.readouterr().out.splitlines())  # they stay above it


def test_the_live_line_advances_with_each_step_at_ten_frames_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, now = io.StringIO(), [0.0]
    monkeypatch.setattr(display_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    console = Console(file=screen, force_terminal=True, width=120)
    with LiveLine(1000, 1, console=console) as display:
        for step in range(1, 101):  # 50 steps a second
            now[0] += 0.02
            display.advance(step)
        drawn = [step for step in range(1, 101) if f"step {step}/1000" in screen.getvalue()]
    assert 15 <= len(drawn) <= 20
    assert "step 100/1000" in screen.getvalue()  # the end of the bar


@pytest.mark.parametrize("name", [None, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_auto_is_live_on_a_terminal_but_not_of_open_mpi(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_display("auto", 10, 1), PlainLines)  # without a terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    if name is not None:
        monkeypatch.setenv(name, "0")
    assert isinstance(choose_display("auto", 10, 1), LiveLine) == (name is None)
    assert isinstance(choose_display("live", 10, 1), LiveLine)
    assert isinstance(choose_display("plain", 10, 1), PlainLines)
    monkeypatch.setattr("sys.stdout", None)  # closed
    assert not isinstance(choose_display("auto", 10, 1), LiveLine)
