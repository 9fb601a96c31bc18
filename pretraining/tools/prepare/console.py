"""What `pretrain prepare` shows: progress while it encodes, and at its end the dataset and the flags that train on it.

On a terminal progress is a bar on the standard error stream, elsewhere a line now and then.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pretraining.observability.display import format_seconds
from pretraining.tools.prepare.records import PrepareSummary, read_summaries
from pretraining.tools.prepare.token_files import Counts

log = logging.getLogger(__name__)

LINE_INTERVAL_SECONDS = 15.0

Report = Callable[[Counts], None]
"""Takes what was done since it was last called."""


@contextmanager
def encoding_progress(total_bytes: int, done_bytes: int, who: str = "") -> Iterator[Report]:
    """Shows progress while the body runs.

    Args:
        total_bytes: size of the input on disk; 0 = unknown.
        done_bytes: of it, done by an earlier call.
        who: of whom this is the progress, where that is one process of several.

    Yields:
        a function to call with what was done, after every step; it draws a few times a second at most.
    """
    meter = _Meter(f"encoding{who}", total_bytes, done_bytes, time.monotonic())
    if sys.stderr.isatty():
        with _bar(meter) as draw:
            yield draw
    else:
        yield _lines(meter)


@dataclass
class _Meter:
    """What was done since it began, and how fast."""

    title: str
    total_bytes: int
    done_bytes: int
    began: float
    done: Counts = field(default_factory=Counts)

    def rates(self) -> str:
        done, seconds = self.done, max(time.monotonic() - self.began, 1e-9)
        speed = f", {done.text_bytes / seconds / 1e6:,.1f} MB/s" if done.text_bytes else ""  # token ids are no text
        return (
            f"{done.documents:,} documents ({done.documents / seconds:,.0f}/s), "
            f"{done.tokens:,} tokens ({done.tokens / seconds:,.0f}/s){speed}"
        )


@contextmanager
def _bar(meter: _Meter) -> Iterator[Report]:
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


def _lines(meter: _Meter) -> Report:
    shown_at = meter.began

    def line(more: Counts) -> None:
        nonlocal shown_at
        meter.done += more
        if time.monotonic() - shown_at < LINE_INTERVAL_SECONDS:
            return
        shown_at = time.monotonic()
        left_bytes = meter.total_bytes - meter.done_bytes - meter.done.input_bytes
        share, left = "", ""
        if meter.total_bytes:
            share = f"{1 - left_bytes / meter.total_bytes:.0%} of the input, "
            seconds = (shown_at - meter.began) * left_bytes / max(meter.done.input_bytes, 1)
            left = f", {format_seconds(seconds)} left"
        log.info("%s: %s%s%s", meter.title, share, meter.rates(), left)

    return line


def print_summary(summary: PrepareSummary, done: Counts | None = None, seconds: float = 0.0) -> None:
    """Prints a dataset, the other datasets of its root, and how to train on it.

    Args:
        done: of the dataset, what this call encoded; None where it was there already.
        seconds: that this took.
    """
    print(describe(summary, done, seconds))
    summaries = read_summaries(summary.folder.parent)
    if len(summaries) > 1:
        print(describe_all(summaries))
    print(describe_training(summary), flush=True)


def describe(summary: PrepareSummary, done: Counts | None = None, seconds: float = 0.0) -> str:
    """A dataset in a few lines; arguments as for `print_summary`."""
    empty = f" ({summary.empty_documents:,} empty ones left out)" if summary.empty_documents else ""
    lengths = f"{summary.tokens / max(summary.documents, 1):,.0f} a document"
    if summary.median_document_tokens is not None:
        lengths += f", median about {summary.median_document_tokens:,}"
    lines = [f"  documents  {summary.documents:,}{empty}", f"  tokens     {summary.tokens:,} ({lengths})"]
    if summary.characters:
        rate = f"{summary.characters / summary.tokens:.2f} characters a token"
        lines.append(f"  text       {summary.text_bytes / 1e6:,.1f} MB ({rate})")
    lines.append(f"  written    {summary.token_bytes / 1e6:,.1f} MB in {summary.files:,} files below {summary.folder}")
    if done is not None:
        seconds = max(seconds, 1e-9)
        lines.append(
            f"  time       {seconds:,.1f} s ({done.documents / seconds:,.0f} documents/s, "
            f"{done.tokens / seconds:,.0f} tokens/s)"
        )
    return "\n".join(lines)


def describe_all(summaries: Sequence[PrepareSummary]) -> str:
    """The datasets of a root as a table, with the proportions in which training mixes them by default."""
    tokens = sum(summary.tokens for summary in summaries)
    header = ("dataset", "documents", "empty", "tokens", "mean", "median", "characters/token", "MB", "files", "share")
    rows = [
        (
            summary.folder.name,
            f"{summary.documents:,}",
            f"{summary.empty_documents:,}",
            f"{summary.tokens:,}",
            f"{summary.tokens / max(summary.documents, 1):,.0f}",
            "-" if summary.median_document_tokens is None else f"{summary.median_document_tokens:,}",
            f"{summary.characters / summary.tokens:.2f}" if summary.characters else "-",
            f"{summary.token_bytes / 1e6:,.1f}",
            f"{summary.files:,}",
            f"{summary.tokens / tokens:.2%}",
        )
        for summary in summaries
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    root = summaries[0].folder.parent
    lines = [f"All datasets in {root}; share is that of the tokens, and of the samples without --weights:"]
    for name, *numbers in (header, *rows):
        lines.append("  " + "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]))
    return "\n".join(lines)


def training_flags(summary: PrepareSummary) -> list[str]:
    """The flags that train on a dataset."""
    root = summary.folder.parent
    flags = [f"--data_path={root}", f"--datasets={summary.folder.name}"]
    if summary.end_of_text is not None:
        flags.append(f"--sep_token={summary.end_of_text}")
    if summary.tokenizer is not None:
        flags.append(f"--tokenizer_path={root}")
    return [*flags, f"--vocab_size={summary.vocab_size}"]


def describe_training(summary: PrepareSummary) -> str:
    """How to train on a dataset, in a few lines."""
    lines = ["Train on it with:", "  " + shlex.join(training_flags(summary))]
    if summary.end_of_text is None:
        reason = "There is no tokenizer here to name an" if summary.tokenizer is None else "The tokenizer names no"
        mark = "choose a --sep_token, or documents follow each other without a mark."
        lines.insert(0, f"  {reason} end-of-text token: {mark}")
    return "\n".join(lines)
