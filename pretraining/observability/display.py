"""The progress display: one line per report and, on a terminal, a live line with the current step below."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pretraining.launch.terminal import is_watched, showing_through
from pretraining.text import count_of, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_SECONDS = 0.1
COLUMNS, BAR_COLUMNS = 80, 20
CUSTOM = "custom/"
TASK = "task/"
"""Prefix of the names of user-defined metrics and scores."""


Report = Mapping[str, Any]
"""Values of a report by their names in metrics.jsonl; None = unknown."""


class Display:
    """A display of reports, as a context around the loop. This base class shows nothing, for ranks other than 0."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *raised: object) -> None:
        """Restore the terminal."""

    def advance(self, step: int) -> None:
        """Show the number of finished steps."""

    def show(self, step: int, report: Report) -> None:
        """Show a report."""


class PlainLines(Display):
    """A display that prints one line per report, with at most 80 columns.

    Args:
        devices: number of devices of the job.
        shows_step_time: whether lines have the seconds per step.
    """

    def __init__(self, total_steps: int, devices: int, shows_step_time: bool = False) -> None:
        self._total_steps = total_steps
        self._summary = partial(summary, devices=devices, shows_step_time=shows_step_time)

    def show(self, step: int, report: Report) -> None:
        """Print the report."""
        head = f"step {step}/{self._total_steps}  "
        self._print(head + self._summary(report, COLUMNS - len(head)))

    def _print(self, text: str) -> None:
        print(text, flush=True)


class LiveLine(PlainLines):
    """A display with a progress bar and the newest numbers below the lines of reports; log messages scroll above."""

    def __init__(
        self, total_steps: int, devices: int, shows_step_time: bool = False, console: Console | None = None
    ) -> None:
        from rich.console import Console  # here: only a live line needs rich
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(total_steps, devices, shows_step_time)
        self._drawn = -math.inf
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(BAR_COLUMNS),
            TextColumn("{task.fields[numbers]}"),
            console=console or Console(highlight=False),
            auto_refresh=False,  # a redrawing thread would slow down training
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("training", total=total_steps, numbers="starting")
        self._messages = ExitStack()

    def __enter__(self) -> LiveLine:
        self._progress.start()
        self._messages.enter_context(showing_through(self._print))
        return self

    def __exit__(self, *raised: object) -> None:
        self._messages.close()
        self._progress.stop()

    def advance(self, step: int) -> None:
        """Update the line, at most every `REDRAW_SECONDS`."""
        self._progress.update(self._task, completed=step)
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._progress.refresh()

    def show(self, step: int, report: Report) -> None:
        """Print the report above the line, and redraw the line."""
        before = len(f"step {self._total_steps}/{self._total_steps} ") + BAR_COLUMNS + 1
        super().show(step, report)
        self._progress.update(self._task, numbers=self._summary(report, COLUMNS - before))
        self._drawn = -math.inf
        self.advance(step)

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def choose_display(choice: str, total_steps: int, devices: int, shows_step_time: bool = False) -> Display:
    """Return the display of rank 0 for `--progress`; "auto" is live if standard output is a terminal."""
    kind = LiveLine if choice == "live" or (choice == "auto" and is_watched()) else PlainLines
    return kind(total_steps, devices, shows_step_time)


def summary(report: Report, width: int, *, devices: int, shows_step_time: bool = False) -> str:
    """Return one line for a report: skipped updates first, then as many numbers as fit.

    Loss and learning rate always fit; MFU and the time left give way to all other numbers.

    Args:
        width: columns of the line.
        devices: number of devices of the job; the line has their total tokens/s.
        shows_step_time: whether the line has the seconds per step.
    """
    rate, skipped = report["tokens_per_second_per_gpu"] * devices, report["skipped_updates"]
    head = [f"{count_of(skipped, 'update')} skipped"] if skipped else []
    head += [f"{name[len(CUSTOM) :]} {value:.4g}" for name, value in report.items() if name.startswith(CUSTOM)]
    head += [f"{report['step_seconds']:#.3g} s/step"] if shows_step_time else []
    head.append(f"{rate:,.0f} tok/s" if rate < 1e5 else f"{rate / 1e3:,.0f}k tok/s")
    others = [f"MFU {report['mfu']:.1%}"] if report["mfu"] is not None else []
    others.append(f"{format_seconds(report['time_left_seconds'])} left")
    loss, learning_rate = f"loss {report['loss']:.4f}", f"lr {report['learning_rate']:.1e}"
    end = [f"grad {report['grad_norm']:#.3g}", *([f"z-loss {report['z_loss']:.1e}"] if report["z_loss"] > 0 else [])]
    kept: list[str] = []
    for part in (loss, learning_rate, *head, *end, *others):
        if len("  ".join((*kept, part))) <= width:
            kept.append(part)
    return "  ".join(part for part in (loss, *head, *others, *end, learning_rate) if part in kept)
