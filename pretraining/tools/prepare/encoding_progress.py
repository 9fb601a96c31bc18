"""What `pretrain prepare` counts and shows while it encodes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

LINE_INTERVAL_SECONDS = 15.0


@dataclass
class Counts:
    """How much was read and written.

    Attributes:
        documents, tokens: written.
        empty_documents: without any text; they are not written.
        characters, text_bytes: of the text encoded; the bytes in UTF-8.
        input_bytes: of the input on disk, read for it.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    characters: int = 0
    text_bytes: int = 0
    input_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


Report = Callable[[Counts], None]
"""Takes what was done since it was last called."""


@contextmanager
def encoding_progress(
    total_bytes: int,
    done_bytes: int,
    show: Callable[[str], None],
    who: str = "",
    clock: Callable[[], float] = time.monotonic,
    terminal: bool | None = None,
) -> Iterator[Report]:
    """Show progress while the body runs.

    Args:
        total_bytes: size of the input on disk; 0 = unknown.
        done_bytes: of it, done by an earlier call.
        show: prints a line, where there is no terminal.
        who: of whom this is the progress, where that is one process of several.
        clock: seconds, rising.
        terminal: whether to draw a bar; none = where the standard error stream is a terminal.

    Yields:
        a function to call with what was done, after every step; it draws a few times a second at most.
    """
    meter = _Meter(f"encoding{who}", total_bytes, done_bytes, clock, clock())
    if sys.stderr.isatty() if terminal is None else terminal:
        with _bar(meter) as draw:
            yield draw
    else:
        yield _lines(meter, show)


@dataclass
class _Meter:
    """What was done, and how fast.

    Attributes:
        title: of what is shown.
        total_bytes, done_bytes: of the input, as `encoding_progress` has them.
        clock: seconds, rising.
        began: by that clock.
        done: since then.
    """

    title: str
    total_bytes: int
    done_bytes: int
    clock: Callable[[], float]
    began: float
    done: Counts = field(default_factory=Counts)

    def rates(self) -> str:
        done, seconds = self.done, max(self.clock() - self.began, 1e-9)
        speed = f", {done.text_bytes / seconds / 1e6:,.1f} MB/s" if done.text_bytes else ""  # token ids are no text
        return (
            f"{done.documents:,} documents ({done.documents / seconds:,.0f}/s), "
            f"{done.tokens:,} tokens ({done.tokens / seconds:,.0f}/s){speed}"
        )


@contextmanager
def _bar(meter: _Meter) -> Iterator[Report]:
    """A bar on the terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(meter.title),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(meter.title, total=meter.total_bytes or None, completed=meter.done_bytes, rates="")

        def draw(more: Counts) -> None:
            meter.done += more
            bar.update(task, completed=meter.done_bytes + meter.done.input_bytes, rates=meter.rates())

        yield draw


def _lines(meter: _Meter, show: Callable[[str], None]) -> Report:
    """A line now and then."""
    shown_at = meter.began

    def line(more: Counts) -> None:
        nonlocal shown_at
        meter.done += more
        if meter.clock() - shown_at < LINE_INTERVAL_SECONDS:
            return
        shown_at = meter.clock()
        left_bytes = meter.total_bytes - meter.done_bytes - meter.done.input_bytes
        share, left = "", ""
        if meter.total_bytes:
            share = f"{1 - left_bytes / meter.total_bytes:.0%} of the input, "
            seconds = (shown_at - meter.began) * left_bytes / max(meter.done.input_bytes, 1)
            left = f", {_duration(seconds)} left"
        show(f"{meter.title}: {share}{meter.rates()}{left}")

    return line


def _duration(seconds: float) -> str:
    """As a person says it: 45s, 3m 20s, 5h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
