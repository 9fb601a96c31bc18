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

from pretraining.config.training import ModelConfig, TrainConfig
from pretraining.config.variants import parameter_count, resolve_shape
from pretraining.data.tokenizer import load_tokenizer
from pretraining.estimate.memory import estimate_memory
from pretraining.launch.machine import has_gpu, machine_memory
from pretraining.launch.terminal import print_text
from pretraining.observability.display import format_seconds
from pretraining.text import count_of
from pretraining.tools.prepare.records import PrepareSummary, read_summaries
from pretraining.tools.prepare.token_files import Counts

log = logging.getLogger(__name__)

LINE_INTERVAL_SECONDS = 15.0
SUGGESTED_VARIANTS = ("1b", "760m", "350m", "125m", "tiny")
TOKENS_PER_PARAMETER = 20

Report = Callable[[Counts], None]
"""Takes what was done since it was last called."""


@contextmanager
def encoding_progress(total_bytes: int, done_bytes: int, who: str = "") -> Iterator[Report]:
    """Shows progress while the body runs.

    Args:
        total_bytes: size of the input on disk; 0 = unknown.
        done_bytes: of it, done by an earlier call.
        who: whose progress this is, where that is one process of several.

    Yields:
        a function to call with what was done, after every step.
    """
    meter = _Meter(f"encoding{who}", total_bytes, done_bytes)
    if sys.stderr.isatty():
        with _bar(meter) as draw:
            yield draw
    else:
        yield meter.log_now_and_then


class _Meter:
    """What was done since it began, and how fast."""

    def __init__(self, title: str, total_bytes: int, done_bytes: int) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self.read_bytes = done_bytes
        self._began = self._shown_at = time.monotonic()
        self._done = Counts()

    def add(self, more: Counts) -> None:
        self._done += more
        self.read_bytes += more.input_bytes

    def rates(self) -> str:
        done, seconds = self._done, max(time.monotonic() - self._began, 1e-9)
        speed = f", {done.text_bytes / seconds / 1e6:,.1f} MB/s" if done.text_bytes else ""  # token ids are no text
        return (
            f"{count_of(done.documents, 'document')} ({done.documents / seconds:,.0f}/s), "
            f"{done.tokens:,} tokens ({done.tokens / seconds:,.0f}/s){speed}"
        )

    def log_now_and_then(self, more: Counts) -> None:
        self.add(more)
        if time.monotonic() - self._shown_at < LINE_INTERVAL_SECONDS:
            return
        self._shown_at = time.monotonic()
        share, left = "", ""
        if self.total_bytes:
            share = f"{self.read_bytes / self.total_bytes:.0%} of the input, "
            bytes_a_second = max(self._done.input_bytes, 1) / (self._shown_at - self._began)
            left = f", {format_seconds((self.total_bytes - self.read_bytes) / bytes_a_second)} left"
        log.info("%s: %s%s%s", self.title, share, self.rates(), left)


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
        task = bar.add_task("", total=meter.total_bytes or None, completed=meter.read_bytes, rates="")

        def draw(more: Counts) -> None:
            meter.add(more)
            bar.update(task, completed=meter.read_bytes, rates=meter.rates())

        yield draw


def print_summary(summary: PrepareSummary, done: Counts | None = None, seconds: float = 0.0) -> None:
    """Prints a dataset, with what this call did of it, the other datasets of its root, and how to train on it."""
    print_text(describe(summary, done, seconds))
    summaries = read_summaries(summary.folder.parent)
    if len(summaries) > 1:
        print_text(describe_all(summaries))
    begin = None if summary.tokenizer is None else load_tokenizer(summary.folder.parent).begin_of_text
    print_text(describe_training(summary, begin), flush=True)


def describe(summary: PrepareSummary, done: Counts | None = None, seconds: float = 0.0) -> str:
    """A dataset in a few lines.

    Args:
        done: what this call encoded of it; None where it was there already.
        seconds: that this took.
    """
    empty = f" ({summary.empty_documents:,} empty ones left out)" if summary.empty_documents else ""
    lengths = f"{summary.tokens / max(summary.documents, 1):,.0f} a document"
    if summary.median_document_tokens is not None:
        lengths += f", median about {summary.median_document_tokens:,}"
    lines = [f"  documents  {summary.documents:,}{empty}", f"  tokens     {summary.tokens:,} ({lengths})"]
    if summary.characters:
        rate = f"{summary.characters / summary.tokens:.2f} characters a token"
        lines.append(f"  text       {summary.text_bytes / 1e6:,.1f} MB ({rate})")
    lines.append(
        f"  written    {summary.token_bytes / 1e6:,.1f} MB in {count_of(summary.files, 'file')} below {summary.folder}"
    )
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


def suggested_variant(tokens: int, vocab_size: int) -> str:
    """The largest model for which the tokens are enough and, where there is no GPU, the memory: `tiny` at least.

    Enough are 20 tokens a parameter (Hoffmann et al. 2022, Training Compute-Optimal Large Language Models, table 3).
    """
    here = None if has_gpu() else machine_memory().total
    for name in SUGGESTED_VARIANTS:
        config = TrainConfig(model=ModelConfig(model_variant=name, vocab_size=vocab_size))
        shape = resolve_shape(config.model)
        needed = estimate_memory(config, shape, shard_size=1, compute_bytes=4, device_type="cpu").total
        if parameter_count(shape) * TOKENS_PER_PARAMETER <= tokens and (here is None or needed <= here / 2):
            return name
    return SUGGESTED_VARIANTS[-1]


def training_flags(summary: PrepareSummary, begin_of_text: int | None = None) -> list[str]:
    """The flags that train on a dataset, a model that suits it and this machine.

    Args:
        begin_of_text: the token that its tokenizer begins texts with, if any.
    """
    root = summary.folder.parent
    flags = [f"--data_path={root}", f"--datasets={summary.folder.name}"]
    if summary.end_of_text is not None:
        flags.append(f"--sep_token={summary.end_of_text}")
    if summary.tokenizer is not None:
        flags.append(f"--tokenizer_path={root}")
    if begin_of_text is not None:
        flags.append(f"--bos_token={begin_of_text}")
    variant = suggested_variant(summary.tokens, summary.vocab_size)
    return [*flags, f"--model_variant={variant}", f"--vocab_size={summary.vocab_size}"]


def describe_training(summary: PrepareSummary, begin_of_text: int | None = None) -> str:
    """How to train on a dataset, in a few lines; arguments as for `training_flags`."""
    lines = ["Train on it with:", "  pretrain train " + shlex.join(training_flags(summary, begin_of_text))]
    if summary.end_of_text is None:
        reason = "There is no tokenizer here to name an" if summary.tokenizer is None else "The tokenizer names no"
        mark = "choose a --sep_token, or documents follow each other without a mark."
        lines.insert(0, f"  {reason} end-of-text token: {mark}")
    return "\n".join(lines)
