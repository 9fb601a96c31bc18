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
    """A line a report.

    Args:
        cpu_processes: of a job on CPUs, whose tokens/s are those of all together; 0 on GPUs.
    """

    def __init__(self, total_steps: int, peak_tflops: float | None, cpu_processes: int = 0) -> None:
        self._total_steps = total_steps
        self._peak_tflops = peak_tflops
        self._cpu_processes = cpu_processes

    def show(self, report: Report) -> None:
        """Prints the report."""
        line = summary(report, self._peak_tflops, verbose=True, cpu_processes=self._cpu_processes)
        self._print(f"step {report.step}/{self._total_steps}  {line}")

    def _print(self, text: str) -> None:
        print(text, flush=True)


class LiveLine(PlainLines):
    """The same, and below them a bar with the newest numbers in one line that is redrawn; messages scroll above it."""

    def __init__(
        self,
        total_steps: int,
        peak_tflops: float | None,
        console: Console | None = None,
        cpu_processes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console  # here, since only a live line needs them
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(total_steps, peak_tflops, cpu_processes)
        self._clock = clock
        self._drawn = -REDRAW_SECONDS
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
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
        numbers = summary(report, self._peak_tflops, verbose=False, cpu_processes=self._cpu_processes)
        self._progress.update(self._task, completed=report.step, numbers=numbers)
        super().show(report)
        self._redraw()

    def _redraw(self) -> None:
        self._drawn = self._clock()
        self._progress.refresh()

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def choose_display(choice: str, total_steps: int, peak_tflops: float | None, cpu_processes: int = 0) -> Display:
    """Returns the display of rank 0 for `--progress`; "auto" is live where standard output is a terminal."""
    kind = LiveLine if choice == "live" or (choice == "auto" and is_watched()) else PlainLines
    return kind(total_steps, peak_tflops, cpu_processes=cpu_processes)


def summary(report: Report, peak_tflops: float | None, verbose: bool, cpu_processes: int = 0) -> str:
    """Puts a report into one line.

    Args:
        verbose: adds the gradient norm, what MFU is relative to, and the user's metrics.
        cpu_processes: of a job on CPUs, whose tokens/s are those of all together; 0 on GPUs.
    """
    parts = [f"loss {report.loss:.4f}"]
    if report.z_loss > 0:
        parts.append(f"z-loss {report.z_loss:.1e}")
    if verbose:
        parts += [f"{name} {value:.4g}" for name, value in report.custom.items()]
    parts.append(f"lr {report.learning_rate:.2e}")
    if verbose:
        parts.append(f"grad {report.grad_norm:.3f}")
    rate = report.tokens_per_second_per_gpu * (cpu_processes or 1)
    parts.append(f"{rate:,.0f} tokens/s" if cpu_processes else f"{rate:,.0f} tokens/s/GPU")
    if report.mfu is not None and peak_tflops is not None:
        peak = f" of {peak_tflops:g} TFLOP/s" if verbose else ""
        hfu = f" HFU {report.hfu:.1%}" if report.hfu is not None and report.hfu != report.mfu else ""
        parts.append(f"MFU {report.mfu:.1%}{hfu}{peak}")
    parts.append(f"{report.memory_gib:.1f} GiB")
    if report.skipped_updates:
        parts.append(f"{count_of(report.skipped_updates, 'update')} skipped")
    parts.append(f"{format_seconds(report.time_left_seconds)} left")
    return "  ".join(parts)


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
