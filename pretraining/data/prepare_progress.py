"""What `pretrain prepare` shows while it encodes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LINE_INTERVAL_SECONDS = 15.0


@dataclass
class Encoded:
    """How far the encoding is.

    Attributes:
        documents, tokens: written so far.
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


@contextmanager
def encoding_progress(
    total_bytes: int,
    show: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    terminal: bool | None = None,
) -> Iterator[Callable[[Encoded], None]]:
    """Show progress while the body runs.

    Args:
        total_bytes: size of the input on disk.
        show: prints a line, where there is no terminal.
        clock: seconds, rising.
        terminal: whether to draw a bar; none = where the standard error stream is a terminal.

    Yields:
        a function to call with the state after every step; it draws a few times a second at most.
    """
    began = clock()

    def rates(encoded: Encoded) -> str:
        seconds = max(clock() - began, 1e-9)
        return (
            f"{encoded.documents:,} documents ({encoded.documents / seconds:,.0f}/s), "
            f"{encoded.tokens:,} tokens ({encoded.tokens / seconds:,.0f}/s)"
        )

    if sys.stderr.isatty() if terminal is None else terminal:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("encoding"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("encoding", total=max(total_bytes, 1), rates="")
            yield lambda encoded: bar.update(task, completed=encoded.input_bytes, rates=rates(encoded))
        return

    shown_at = began

    def line(encoded: Encoded) -> None:
        nonlocal shown_at
        if clock() - shown_at >= LINE_INTERVAL_SECONDS:
            shown_at = clock()
            show(f"encoding: {encoded.input_bytes / max(total_bytes, 1):.0%} of the input, {rates(encoded)}")

    yield line
