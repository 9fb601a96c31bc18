"""Units of the input to token files, over the cores of a machine.

    unit --read--> pieces --encode, on threads--> token ids --in the same order--> documents --> files, record

Threads encode pieces a batch at a time (the tokenizers library works outside Python's lock). Documents are written in
the order they were read, so that the files are a function of the unit and the encoding alone. A Python process hands
tokens over one thread at a time, which about a dozen cores fill: beyond a few threads, units go to processes with
threads of their own.

Whenever a file is complete, the unit's record says so. A unit that was begun is read again from its start, and goes on
behind its last complete file.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, replace
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretraining.data.threads import map_in_order
from pretraining.data.tokenizer import library_threads, load_tokenizer
from pretraining.errors import DataError
from pretraining.files import output_errors
from pretraining.tools.prepare.console import Report
from pretraining.tools.prepare.encoders import Encoder, TextEncoder, text_encoder
from pretraining.tools.prepare.records import Encoding, WorkFolder
from pretraining.tools.prepare.text import Piece
from pretraining.tools.prepare.token_files import LARGEST_DOCUMENT_TOKENS, Counts, TokenRows, TokenWriter
from pretraining.tools.prepare.units import Unit, read_part

THREADS_A_PROCESS = 8
FASTOKENS_THREADS_A_PROCESS = 2
"""They encode more than one thread of Python reads and writes."""
POLL_SECONDS = 0.5
"""Between two looks at what the processes have done."""
BATCH_CHARACTERS = 1 << 19
"""Text that a thread encodes at once: long enough to hand over cheaply, short enough to share a small corpus evenly."""
_CHARACTERS_PER_TOKEN = 4


def encode_units(units: Sequence[Unit], encoding: Encoding, work: WorkFolder, threads: int, report: Report) -> None:
    """Writes the token files of units, as far as they are not there.

    Args:
        work: has the tokenizer of the encoding.
        threads: that encode, over all processes.
        report: is told what was done; what it raises ends the work.

    Raises:
        DataError: the input cannot be read, or holds what cannot be written; or a process was killed.
        OSError: the output cannot be written.
    """
    is_fast = encoding.encoder == "fastokens"
    most = min(THREADS_A_PROCESS, FASTOKENS_THREADS_A_PROCESS) if is_fast else THREADS_A_PROCESS
    processes = min(len(units), -(-threads // most))
    if processes > 1:
        _encode_in_processes(units, encoding, work, processes, -(-threads // processes), report)
        return
    for unit in units:
        encode_unit(unit, encoding, work, threads, report)


def _encode_in_processes(
    units: Sequence[Unit], encoding: Encoding, work: WorkFolder, processes: int, threads: int, report: Report
) -> None:
    context = multiprocessing.get_context("spawn")
    counters = context.Array(ctypes.c_int64, len(astuple(Counts())))
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _begin_process, (counters, theirs))
    pending = {pool.submit(_encode_in_process, unit, encoding, work, threads) for unit in units}
    workers = multiprocessing.active_children()
    shown = Counts()
    try:
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
            so_far = Counts(*counters.get_obj())
            report(so_far - shown)
            shown = so_far
            for future in done:
                future.result()
    except BrokenProcessPool:
        pool.shutdown()
        raise _killed(workers) from None
    finally:
        ours.close()  # ends the processes at once, in the middle of a unit too
        theirs.close()
        pool.shutdown(cancel_futures=True)


def _killed(workers: Sequence[Any]) -> DataError:
    """The error for a process of the pool that ended early; the pool ends the others by SIGTERM."""
    for process in workers:
        if process.exitcode not in (None, 0, -signal.SIGTERM):
            how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"itself with status {process.exitcode}"
            return DataError(
                f"a process that encodes (number {process.pid}) was ended by {how}; where that is signal 9, memory may "
                "have run out: give fewer --num_workers. The same command goes on from the files that are complete"
            )
    return DataError("a process that encodes was ended. The same command goes on from the files that are complete")


_counters: Any
"""In a process of the pool: an array of int64 that all of them share, one a field of `Counts`."""


def _begin_process(counters: Any, parent: Connection) -> None:
    global _counters
    _counters = counters
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its processes
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """Ends this process when the parent closes its end of the connection, or is gone."""
    parent.poll(None)
    os._exit(0)


def _encode_in_process(unit: Unit, encoding: Encoding, work: WorkFolder, threads: int) -> None:
    with output_errors(work.root):
        encode_unit(unit, encoding, work, threads, _add_to_counters)


def _add_to_counters(counts: Counts) -> None:
    with _counters.get_lock():
        for index, count in enumerate(astuple(counts)):
            _counters[index] += count


def encode_unit(unit: Unit, encoding: Encoding, work: WorkFolder, threads: int, report: Report) -> None:
    """Writes the token files of a unit, as far as they are not there, in this process."""
    record = work.read_record(unit, encoding)
    dtype, prefix = np.dtype(encoding.dtype), f"part_{unit.number:06d}_"
    writer = TokenWriter(work.files, dtype, encoding.tokens_per_file, prefix, record.files)
    all_pieces = chain.from_iterable(read_part(part, encoding.text_field) for part in unit.parts)
    pieces = _skip_documents(all_pieces, record.counts.documents + record.counts.empty_documents)
    joiner = _Joiner()
    # A thread a batch, not the library's own threads: then the number of threads means what it says.
    with writer, library_threads(False):
        for batch, rows in map_in_order(_encoder(unit, encoding, work), _batches(pieces), threads):
            documents = left = joiner.add(batch.pieces, rows)
            while len(left):
                some, left = left.split(writer.documents_to_end(left.lengths))
                record.count(some)
                if writer.write(some.tokens, some.lengths[some.lengths > 0]):
                    work.write_record(unit, record)
            whole, read = documents.counts(), rows.counts()
            report(replace(read, documents=whole.documents, tokens=whole.tokens, empty_documents=whole.empty_documents))
    unseen = Counts(input_bytes=unit.size - record.counts.input_bytes)  # by readers, such as a file's end
    record.counts, record.finished = record.counts + unseen, True
    work.write_record(unit, record)
    report(unseen)


class _Joiner:
    """Puts pieces together to whole documents."""

    def __init__(self) -> None:
        self._begun: list[TokenRows] = []  # pieces of the document whose end has not come

    def add(self, pieces: Sequence[Piece], rows: TokenRows) -> TokenRows:
        """Takes the next pieces, and returns the documents that they complete.

        Raises:
            DataError: a document is longer than a row of a token file can be.
        """
        before = sum(map(len, self._begun))
        ends = np.flatnonzero([piece.ends_document for piece in pieces]) + before + 1
        self._begun.append(rows)
        documents, _ = rows.split(0)
        if len(ends):
            complete, rest = TokenRows.concatenate(self._begun).split(int(ends[-1]))
            documents, self._begun = complete.joined(ends), [rest] if len(rest) else []
        for index in np.flatnonzero(documents.lengths > LARGEST_DOCUMENT_TOKENS):
            raise _too_long(pieces[ends[index] - before - 1])
        if sum(len(begun.tokens) for begun in self._begun) > LARGEST_DOCUMENT_TOKENS:
            raise _too_long(pieces[-1])
        return documents


@functools.lru_cache(maxsize=1)
def _text_encoder(folder: Path, sha256: str, encoder: Encoder) -> TextEncoder:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.sha256 == sha256
    return text_encoder(tokenizer, encoder)


def _too_long(piece: Piece) -> DataError:
    return DataError(
        f"{piece.place}: a document has more than {LARGEST_DOCUMENT_TOKENS:,} tokens, too many for a row of a token "
        "file. Split it, for example into a .jsonl with a part a line"
    )


def _skip_documents(pieces: Iterator[Piece], count: int) -> Iterator[Piece]:
    """The pieces behind the first `count` documents."""
    for piece in pieces:
        if count:
            count -= piece.ends_document
            continue
        yield piece


class _Batch(NamedTuple):
    """Pieces, and the number of the first of them, from 0 in the unit or where an interrupted call goes on."""

    number: int
    pieces: list[Piece]


def _batches(pieces: Iterable[Piece]) -> Iterator[_Batch]:
    """Groups pieces to about `BATCH_CHARACTERS` of text."""
    batch: list[Piece] = []
    number = characters = 0
    for piece in pieces:
        batch.append(piece)
        length = len(piece.content)
        # Empty documents must not pile up either.
        characters += 1 + (length if isinstance(piece.content, str) else length * _CHARACTERS_PER_TOKEN)
        if characters >= BATCH_CHARACTERS:
            yield _Batch(number, batch)
            number, batch, characters = number + len(batch), [], 0
    if batch:
        yield _Batch(number, batch)


def _encoder(unit: Unit, encoding: Encoding, work: WorkFolder) -> Callable[[_Batch], tuple[_Batch, TokenRows]]:
    """The function that makes tokens of a batch of pieces."""
    dtype = np.dtype(encoding.dtype)
    if encoding.encoder is None:
        return lambda batch: (batch, _given_rows(batch, encoding))
    assert encoding.tokenizer is not None
    encode_texts = _text_encoder(work.path, encoding.tokenizer, encoding.encoder)

    def encode(batch: _Batch) -> tuple[_Batch, TokenRows]:
        texts = [_text_of(piece, encoding) for piece in batch.pieces]
        tokens, lengths = encode_texts(texts, [piece.place for piece in batch.pieces], unit.number, batch.number)
        sizes = [len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts]
        read = np.array([[len(text) for text in texts], sizes, [piece.bytes_read for piece in batch.pieces]])
        return batch, TokenRows(tokens.astype(dtype), lengths, read.T)

    return encode


def _given_rows(batch: _Batch, encoding: Encoding) -> TokenRows:
    """Token ids that were given; of them there is no text."""
    tokens = [_checked(piece, encoding) for piece in batch.pieces]
    read = np.array([(0, 0, piece.bytes_read) for piece in batch.pieces])
    return TokenRows(np.concatenate(tokens), np.array([len(ids) for ids in tokens]), read)


def _text_of(piece: Piece, encoding: Encoding) -> str:
    if isinstance(piece.content, str):
        return piece.content
    raise _mixed(piece, encoding, "token ids here, but text")


def _mixed(piece: Piece, encoding: Encoding, what: str) -> DataError:
    field = encoding.text_field
    return DataError(f"{piece.place}: {field!r} holds {what} in other inputs: prepare them as two datasets")


def _checked(piece: Piece, encoding: Encoding) -> np.ndarray:
    """Token ids that were given, in the files' type."""
    ids = piece.content
    if isinstance(ids, str):
        if not ids:  # rows of a column without any value have no type
            return np.zeros(0, encoding.dtype)
        raise _mixed(piece, encoding, "text here, but token ids")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= encoding.largest_vocabulary):
        wrong = int(np.argmax((ids < 0) | (ids >= encoding.largest_vocabulary)))
        why = (
            "give the --vocab_size that the ids were made for"
            if encoding.tokenizer is None
            else "they were made by another tokenizer than the one of this root"
        )
        raise DataError(
            f"{piece.place}: token {wrong:,} of the document is {int(ids[wrong])}, but ids go from 0 to "
            f"{encoding.largest_vocabulary - 1}: {why}"
        )
    return ids.astype(encoding.dtype)
