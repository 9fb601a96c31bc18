"""Terminal output of `pretrain prepare`: progress lines, and a summary with the command to train on the dataset."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator

from pretraining.config.training import ModelConfig
from pretraining.config.variants import resolve_shape, rounded_vocabulary
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.estimate.costs import parameter_count
from pretraining.launch.terminal import print_text
from pretraining.text import count_of, format_seconds
from pretraining.tools.prepare.records import PrepareCounts, PrepareSummary

log = logging.getLogger(__name__)

LINE_INTERVAL_SECONDS = 15.0
_BAD_RECORDS_SHOWN = 10
SUGGESTED_VARIANTS = ("1b", "760m", "350m", "125m", "tiny")
TOKENS_PER_PARAMETER = 20
LARGEST_LOSS = 0.01
"""Share of the text that a tokenizer may lose without a warning."""


class EncodingProgress:
    """A counter of encoded documents that regularly logs speed and remaining time.

    Args:
        total_bytes: size of the input on disk; 0 = unknown.
        done_bytes: part of the input that an earlier call encoded.
    """

    def __init__(self, title: str, total_bytes: int, done_bytes: int) -> None:
        self.done = PrepareCounts()
        self._title = title
        self._total_bytes, self._done_bytes = total_bytes, done_bytes
        self._began = self._shown_at = time.monotonic()

    def add(self, more: PrepareCounts) -> None:
        """Add the counts since the last call."""
        self.done += more
        now = time.monotonic()
        if now - self._shown_at < LINE_INTERVAL_SECONDS:
            return
        self._shown_at, seconds, done = now, now - self._began, self.done
        share, left = "", ""
        if self._total_bytes:
            read_bytes = self._done_bytes + done.input_bytes
            share = f"{read_bytes / self._total_bytes:.0%} of the input, "
            left_seconds = (self._total_bytes - read_bytes) * seconds / max(done.input_bytes, 1)
            left = f", {format_seconds(max(left_seconds, 0))} left"
        speed = f", {done.text_bytes / seconds / 1e6:,.1f} MB/s" if done.text_bytes else ""  # 0 for token ids
        documents = f"{count_of(done.documents, 'document')} ({done.documents / seconds:,.0f}/s)"
        tokens = f"{done.tokens:,} tokens ({done.tokens / seconds:,.0f}/s)"
        log.info("%s: %s%s, %s%s%s", self._title, share, documents, tokens, speed, left)


def print_summary(summary: PrepareSummary, done: PrepareCounts | None = None, seconds: float = 0.0) -> None:
    """Print a dataset, and the command to train on it.

    Args:
        done: counts of this process; None if the dataset existed before.
        seconds: duration of the call.
    """
    empty = f" ({summary.empty_documents:,} empty ones left out)" if summary.empty_documents else ""
    length = f"{summary.tokens / max(summary.documents, 1):,.0f} per document"
    lines = [f"  documents  {summary.documents:,}{empty}", f"  tokens     {summary.tokens:,} ({length})"]
    if summary.characters:
        rate = f"{summary.characters / summary.tokens:.2f} characters per token"
        lines.append(f"  text       {summary.text_bytes / 1e6:,.1f} MB ({rate})")
    files = count_of(len(summary.files), "file")
    lines.append(f"  written    {summary.token_bytes / 1e6:,.1f} MB in {files} below {summary.folder}")
    if done is not None:
        rates = f"{done.documents / seconds:,.0f} documents/s, {done.tokens / seconds:,.0f} tokens/s"
        lines.append(f"  time       {seconds:,.1f} s ({rates})")
    if summary.bad_records:
        named = "".join(f"\n    {name}" for name in summary.bad_record_names[:_BAD_RECORDS_SHOWN])
        lines.append(f"  left out   {count_of(summary.bad_records, 'record')} that cannot be read, the first:{named}")
    tokenizer = None if summary.tokenizer is None else load_tokenizer(summary.folder.parent)
    lines += [*_describe_marks(summary), *_describe_losses(summary, tokenizer)]
    lines += _describe_ends(tokenizer)
    begin = None if tokenizer is None else tokenizer.begin_of_text
    command = ["pretrain", "train", *training_flags(summary, begin)]
    print_text("\n".join([*lines, "Train on it with:", f"  {shlex.join(command)}"]), flush=True)


def _describe_ends(tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield lines about the tokens that training adds at both ends of documents."""
    if tokenizer is None or tokenizer.end_of_text is None:
        yield "  No end-of-text token is known: without --sep_token, nothing separates documents."
        return
    begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
    yield f"  separator  {tokenizer.named(end)}" + ("" if begin is None else f", and {tokenizer.named(begin)} in front")


def _describe_marks(summary: PrepareSummary) -> Iterator[str]:
    """Yield a line about documents that hold names of special tokens, if any."""
    if not summary.marked_documents:
        return
    share = summary.marked_documents / (summary.documents + summary.empty_documents)
    are_ids = summary.settings.get("special_tokens") == "ids"
    kept = "as ids" if are_ids else "as ordinary characters (--special_tokens=ids)"
    held = "in their messages, " if "chat_template" in summary.settings else ""
    documents = count_of(summary.marked_documents, "document")
    yield f"  marks      {documents} ({share:.1%}) with names of special tokens {held}encoded {kept}"


def _describe_losses(summary: PrepareSummary, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield a line about text that the tokenizer cannot encode, if any; above 1%, also log a warning."""
    if not summary.lost or tokenizer is None:
        return
    unknown = tokenizer.unknown_token
    total = summary.characters if unknown is None else summary.tokens
    what = "characters have no token" if unknown is None else f"tokens are {tokenizer.named(unknown)}"
    losses = f"{summary.lost:,} of {total:,} {what} ({summary.lost / total:.1%}), the first in {summary.first_loss}"
    yield f"  lost       {losses}"
    if summary.lost > LARGEST_LOSS * total:
        log.warning("The tokenizer cannot encode this text: %s. Use one that encodes bytes.", losses)


def suggested_variant(tokens: int, vocab_size: int) -> str:
    """Return the largest variant for which the tokens are enough, or `tiny`.

    Enough is 20 tokens per parameter (Hoffmann et al. 2022, Training Compute-Optimal Large Language Models, table 3).
    """
    for name in SUGGESTED_VARIANTS:
        shape = resolve_shape(ModelConfig(model_variant=name, vocab_size=vocab_size))
        if parameter_count(shape) * TOKENS_PER_PARAMETER <= tokens:
            break
    return name


def training_flags(summary: PrepareSummary, begin_of_text: int | None) -> list[str]:
    """Return the flags to train on a dataset, with a model of suitable size.

    The flags have no vocabulary size if a tokenizer gives it: training rounds it up, which is faster.

    Args:
        begin_of_text: token that the tokenizer puts before a text, if any.
    """
    root = summary.folder.parent
    variant = suggested_variant(summary.tokens, summary.vocab_size)
    flags = {
        "data_path": root,
        "datasets": summary.folder.name,
        "sep_token": summary.end_of_text,
        "tokenizer_path": root if summary.tokenizer is not None else None,
        "bos_token": begin_of_text,
        "model_variant": variant,
        "vocab_size": rounded_vocabulary(summary.vocab_size) if summary.tokenizer is None else None,
    }
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]
