"""What `pretrain prepare` shows at its end: the dataset, all datasets of its root, and the flags that train on them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pretraining.tools.prepare.encoding_progress import Counts
from pretraining.tools.prepare.records import PrepareSummary


def describe(summary: PrepareSummary, done: Counts | None = None, seconds: float = 0.0) -> str:
    """A dataset in a few lines.

    Args:
        summary: of the dataset.
        done: of it, what this call encoded; None where it was there already.
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
    lines.append(f"  written    {summary.token_bytes / 1e6:,.1f} MB in {summary.files:,} files below {summary.folder}")
    if done is not None:
        seconds = max(seconds, 1e-9)
        lines.append(
            f"  time       {seconds:,.1f} s ({done.documents / seconds:,.0f} documents/s, "
            f"{done.tokens / seconds:,.0f} tokens/s)"
        )
    return "\n".join(lines)


def describe_all(summaries: Sequence[PrepareSummary]) -> str:
    """Several datasets of a root as a table, with the proportions in which training mixes them by default."""
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
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (header, *rows)
    ]
    root = summaries[0].folder.parent
    return "\n".join(
        [f"All datasets in {root}; share is that of the tokens, and of the samples without --weights:", *lines]
    )


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
    lines = []
    if summary.end_of_text is None:
        reason = "There is no tokenizer here to name an" if summary.tokenizer is None else "The tokenizer names no"
        lines.append(
            f"  {reason} end-of-text token: choose a --sep_token, or documents follow each other without a mark."
        )
    lines.append("Train on it with:")
    lines.append("  " + " ".join(shlex.quote(flag) for flag in training_flags(summary)))
    return "\n".join(lines)
