"""What a person sees while a run trains: a line a report, and below them on a terminal one that shows each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from pretraining.launch.terminal import is_watched, showing_through
from pretraining.text import count_of

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_SECONDS = 0.1
COLUMNS, BAR_COLUMNS = 80, 20


@dataclass(frozen=True)
class Report:
    """The numbers of one report; units stand in the names, None is unknown.

    `loss` and `z_loss` are means over all valid tokens of the interval, the second no part of the first; `losses` are
    those of each dataset, `perplexity` is exp(loss), `token_accuracy` the share of tokens than which none was likelier.
    `grad_norm` is that of the last step, before clipping, `param_norm` that of all parameters after it.
    `group_learning_rates` are those of the optimizer's parameter groups. Rates and shares are those of the interval
    unless they say `overall`; samples are sequences, of all devices together. `custom` are the user's own metrics.
    """

    step: int
    tokens_seen: int
    loss: float
    perplexity: float
    z_loss: float
    token_accuracy: float
    losses: dict[str, float]
    learning_rate: float
    group_learning_rates: tuple[float, ...]
    grad_norm: float
    param_norm: float
    skipped_updates: int
    step_seconds: float
    samples_per_second: float
    tokens_per_second_per_gpu: float
    tokens_per_second_per_gpu_overall: float
    tokens_per_day: float
    mfu: float | None
    hfu: float | None
    data_share: float
    memory_gib: float
    memory_allocated_gib: float | None
    memory_reserved_gib: float | None
    time_left_seconds: float
    custom: dict[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float | None]:
        """Returns a number for each name but `step`, for each group's rate, dataset's loss and metric of the user's."""
        values = asdict(self)
        del values["step"]
        for index, rate in enumerate(values.pop("group_learning_rates")):
            values[f"learning_rate_group_{index}"] = rate
        for dataset, loss in values.pop("losses").items():
            values[f"loss/{dataset}"] = loss
        for metric, value in values.pop("custom").items():
            values[f"custom/{metric}"] = value
        return values


class Display:
    """Shows reports to a person, as a context around the loop; this one shows nothing, for all ranks but one."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *raised: object) -> None:
        """Leaves the terminal in order."""

    def advance(self, step: int) -> None:
        """Shows that a step is done, of which nothing else is known yet."""

    def show(self, report: Report) -> None:
        """Shows the newest report."""


class PlainLines(Display):
    """A line a report, of 80 columns at most.

    Args:
        devices: of the job.
        shows_step_time: whether lines say how long a step takes.
    """

    def __init__(self, total_steps: int, devices: int, shows_step_time: bool = False) -> None:
        self._total_steps = total_steps
        self._devices = devices
        self._shows_step_time = shows_step_time

    def show(self, report: Report) -> None:
        """Prints the report."""
        head = f"step {report.step}/{self._total_steps}  "
        self._print(head + self._numbers(report, COLUMNS - len(head)))

    def _numbers(self, report: Report, width: int) -> str:
        return summary(report, self._devices, width, self._shows_step_time)

    def _print(self, text: str) -> None:
        print(text, flush=True)


class LiveLine(PlainLines):
    """The same, and below them a bar with the newest numbers in one line that is redrawn; messages scroll above it."""

    def __init__(
        self,
        total_steps: int,
        devices: int,
        shows_step_time: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console  # here, since only a live line needs them
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(total_steps, devices, shows_step_time)
        self._clock = clock
        self._drawn = -REDRAW_SECONDS
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(BAR_COLUMNS),
            TextColumn("{task.fields[numbers]}"),
            console=console or Console(highlight=False),
            auto_refresh=False,  # a thread that redraws would take the time of the one that trains
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
        """Redraws the line, unless that was just done."""
        self._progress.update(self._task, completed=step)
        if self._clock() - self._drawn >= REDRAW_SECONDS:
            self._redraw()

    def show(self, report: Report) -> None:
        """Prints the report above the line, and redraws that."""
        before = len(f"step {self._total_steps}/{self._total_steps} ") + BAR_COLUMNS + 1
        numbers = self._numbers(report, COLUMNS - before)
        self._progress.update(self._task, completed=report.step, numbers=numbers)
        super().show(report)
        self._redraw()

    def _redraw(self) -> None:
        self._drawn = self._clock()
        self._progress.refresh()

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def choose_display(choice: str, total_steps: int, devices: int, shows_step_time: bool = False) -> Display:
    """Returns the display of rank 0 for `--progress`; "auto" is live where standard output is a terminal."""
    kind = LiveLine if choice == "live" or (choice == "auto" and is_watched()) else PlainLines
    return kind(total_steps, devices, shows_step_time)


def summary(report: Report, devices: int, width: int, shows_step_time: bool = False) -> str:
    """Put a report into one line: what is wrong first, then what fits; metrics.jsonl has all of it.

    Args:
        devices: of the job, whose tokens/s are those of all together.
        width: columns of the line.
        shows_step_time: whether the time of a step is among the numbers.
    """
    rate = report.tokens_per_second_per_gpu * devices
    parts = [f"{count_of(report.skipped_updates, 'update')} skipped"] if report.skipped_updates else []
    parts += [f"{name} {value:.4g}" for name, value in report.custom.items()]
    if shows_step_time:
        parts.append(f"{report.step_seconds:#.3g} s/step")
    parts.append(f"{rate:,.0f} tok/s" if rate < 1e5 else f"{rate / 1e3:,.0f}k tok/s")
    if report.mfu is not None:
        parts.append(f"MFU {report.mfu:.1%}")
    parts.append(f"{format_seconds(report.time_left_seconds)} left")
    parts.append(f"grad {report.grad_norm:#.3g}")
    if report.z_loss > 0:
        parts.append(f"z-loss {report.z_loss:.1e}")
    parts.append(f"lr {report.learning_rate:.1e}")
    line = f"loss {report.loss:.4f}"
    for part in parts:
        if len(line) + 2 + len(part) <= width:
            line += f"  {part}"
    return line


def format_seconds(seconds: float) -> str:
    """Writes a duration as a person says it: 45s, 3m 20s, 5h 07m, 12d 4h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"
