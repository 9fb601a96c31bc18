"""Text to token files: what `pretrain prepare` does.

    input --list_files--> files --read_pieces--> pieces --encode, on threads--> tokens --in the same order--> *.arrow

Pieces of text are read in order, encoded a batch at a time by a pool of threads (the tokenizers library works outside
Python's lock), and written in the order they were read, so that the output is a function of the input and the settings
alone. Everything is written into a hidden folder `<output_path>/.<dataset>.preparing`, prepare.json last, and that
folder is renamed into place: a dataset folder is there whole or not at all, and no file that was not made here is ever
changed or removed.

The tokenizer of a root folder is that of all its datasets; once it is there it is used and never replaced.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from pretraining.config.prepare import PrepareConfig, check_prepare_config
from pretraining.data.corpus import standard_library_files
from pretraining.data.manifest import PrepareSummary, read_finished, write_manifest
from pretraining.data.prepare_progress import Encoded, encoding_progress
from pretraining.data.sources import PIECE_CHARACTERS, Piece, TextFile, fingerprint, list_files, read_pieces
from pretraining.data.token_writer import LARGEST_DOCUMENT_TOKENS, TokenWriter
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, library_threads, load_tokenizer, train_tokenizer
from pretraining.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_VOCABULARY = 32_000
TRAINING_SAMPLE_CHARACTERS = 256 * 10**6
"""Text that a tokenizer is trained on at most: more changes little, and a minute is enough for it."""
BATCH_CHARACTERS = 1 << 19
"""Text that a thread encodes at once: long enough to hand over cheaply, short enough to share a small corpus evenly."""


def prepare(config: PrepareConfig, show: Callable[[str], None] = print) -> PrepareSummary:
    """Make a dataset of token files, and a tokenizer where there is none.

    An identical call on a finished dataset finds it and returns at once.

    Args:
        config: what to read and where to write.
        show: prints a line for the user.

    Returns:
        what is in the dataset.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: the input or the tokenizer cannot be read, the output cannot be written, or the dataset is there
            already with other settings.
    """
    check_prepare_config(config)
    began = time.monotonic()
    files = standard_library_files() if config.source == "stdlib" else list_files(config.input_path, config.extensions)
    root = Path(config.output_path).expanduser()
    folder = root / config.dataset_name
    input_bytes = sum(file.size for file in files)
    settings = {
        "input_files": len(files),
        "input_bytes": input_bytes,
        "input_fingerprint": fingerprint(files),
        "text_field": config.text_field if any(file.has_document_per_line for file in files) else None,
        "tokens_per_file": config.tokens_per_file,
    }
    with _output_errors(root):
        tokenizer = _find_tokenizer(config, root)
        finished = read_finished(folder, settings, tokenizer)
        if finished is not None:
            show(f"{folder} is prepared already: nothing to do.\n{finished.describe()}")
            return finished

        with _work_folder(root, config.dataset_name) as work:
            if tokenizer is None:
                tokenizer = _train(config, files, show)
            show(
                f"Encoding {len(files):,} files ({input_bytes / 1e6:,.1f} MB) into {folder} with a tokenizer of "
                f"{tokenizer.vocab_size:,} entries."
            )
            writer = TokenWriter(work, tokenizer.vocab_size, config.tokens_per_file)
            with writer, encoding_progress(input_bytes, show) as progress:
                counts = _encode(files, config, tokenizer, writer, progress)
            if not counts.documents:
                raise DataError(
                    f"{', '.join(config.input_path)}: no document has any text, there is nothing to train on"
                )
            write_manifest(work, settings, tokenizer, counts, writer.files, writer.dtype.name)
            if not (root / TOKENIZER_FILE).exists():
                tokenizer.save(root)
            work.rename(folder)
    summary = read_finished(folder, settings, tokenizer, seconds=time.monotonic() - began)
    assert summary is not None
    show(summary.describe())
    return summary


def _find_tokenizer(config: PrepareConfig, root: Path) -> Tokenizer | None:
    """The tokenizer given, or the one in the root; None where one must be trained."""
    given = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
    if not (root / TOKENIZER_FILE).exists():
        return given
    present = load_tokenizer(root)
    way_out = "All datasets of a root share one tokenizer: drop the flag to use it, or give another --output_path"
    if given is not None and given.sha256 != present.sha256:
        raise DataError(
            f"--tokenizer_path={config.tokenizer_path} is another tokenizer than {root / TOKENIZER_FILE}. {way_out}"
        )
    if config.vocab_size is not None and config.vocab_size != present.vocab_size:
        raise DataError(
            f"--vocab_size={config.vocab_size}, but {root / TOKENIZER_FILE} has {present.vocab_size} entries. {way_out}"
        )
    return present


def _train(config: PrepareConfig, files: list[TextFile], show: Callable[[str], None]) -> Tokenizer:
    """Train a tokenizer on the input, or on a sample where it is long."""
    wanted = config.vocab_size or DEFAULT_VOCABULARY
    show(f"Training a tokenizer of {wanted:,} entries (byte-level BPE) on the text.")
    with library_threads(config.num_workers != 1):
        tokenizer = train_tokenizer(_training_sample(files, config.text_field), wanted)
    if tokenizer.vocab_size < wanted and config.vocab_size is not None:
        raise DataError(
            f"--vocab_size={wanted}: the text has only enough different words for {tokenizer.vocab_size} entries. "
            f"Give --vocab_size={tokenizer.vocab_size} or less, or more text"
        )
    return tokenizer


def _training_sample(
    files: list[TextFile], text_field: str, characters: int = TRAINING_SAMPLE_CHARACTERS
) -> Iterator[str]:
    """Text to train on: all where that is known to fit, else the beginnings of files, shuffled by their names' hash."""
    everything_fits = sum(file.size for file in files) <= characters and not any(file.compressed for file in files)
    share = characters if everything_fits else max(characters // len(files), PIECE_CHARACTERS)
    left = characters
    for file in sorted(files, key=lambda file: hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).digest()):
        file_left = share
        for piece in read_pieces(file, text_field):
            text = piece.text[: min(file_left, left)]
            file_left -= len(text)
            left -= len(text)
            yield text
            if not left:
                return
            if not file_left:
                break


@contextmanager
def _output_errors(root: Path) -> Iterator[None]:
    """Turn what the file system says about the output into an error for users; the input's errors say their own."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or root} cannot be written: {error.strerror or error}. Make room, give write permission "
            "or give another --output_path"
        ) from error


@contextmanager
def _work_folder(root: Path, dataset: str) -> Iterator[Path]:
    """An empty hidden folder to write the dataset in; what an interrupted call or a failing body leaves in it goes."""
    work = root / f".{dataset}.preparing"
    try:
        if work.exists():
            shutil.rmtree(work)
        work.mkdir(parents=True)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)  # after a success it has been renamed


def _encode(
    files: list[TextFile],
    config: PrepareConfig,
    tokenizer: Tokenizer,
    writer: TokenWriter,
    progress: Callable[[Encoded], None],
) -> Encoded:
    """Encode all files into the writer."""

    def encode(batch: list[Piece]) -> list[tuple[Piece, np.ndarray, int]]:
        ids = tokenizer.encode_batch([piece.text for piece in batch])
        return [
            (
                piece,
                np.array(tokens, dtype=writer.dtype),
                len(piece.text) if piece.text.isascii() else len(piece.text.encode("utf-8")),
            )
            for piece, tokens in zip(batch, ids, strict=True)
        ]

    counts = Encoded()
    parts: list[np.ndarray] = []
    document_tokens = 0
    workers = config.num_workers or _usable_cores()
    pieces = (piece for file in files for piece in read_pieces(file, config.text_field))
    with library_threads(False):  # a thread a batch: then num_workers means what it says
        for batch in map_in_order(encode, _batches(pieces), workers):
            for piece, tokens, text_bytes in batch:
                counts.characters += len(piece.text)
                counts.text_bytes += text_bytes
                counts.input_bytes += piece.bytes_read
                counts.tokens += len(tokens)
                parts.append(tokens)
                document_tokens += len(tokens)
                if document_tokens > LARGEST_DOCUMENT_TOKENS:
                    raise DataError(
                        f"{piece.file.path}: a document has more than {LARGEST_DOCUMENT_TOKENS:,} tokens, too many for "
                        "a row of a token file. Split it, for example into a .jsonl with a part a line"
                    )
                if not piece.ends_document:
                    continue
                document = parts[0] if len(parts) == 1 else np.concatenate(parts)
                parts, document_tokens = [], 0
                if len(document):
                    writer.write(document)
                    counts.documents += 1
                else:
                    counts.empty_documents += 1
            progress(counts)
    return counts


def _usable_cores() -> int:
    """Cores that this process may run on, where the system tells, else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces to about `BATCH_CHARACTERS` of text."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 1  # empty documents must not pile up either
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Like `map`, on threads, never more than a few items ahead of what is taken."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
