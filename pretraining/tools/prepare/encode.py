"""One unit of the input to token files.

    pieces, read in order --encode, on threads--> token ids --in the same order--> documents --> files, records

Pieces are encoded a batch at a time by threads (the tokenizers library works outside Python's lock) and written in the
order they were read, so that the files are a function of the unit and the encoding alone. Whenever a file is whole, the
unit's record says so; a unit that was begun is read again from its start, and goes on behind its last whole file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from pretraining.data.threads import map_in_order
from pretraining.data.tokenizer import Tokenizer, library_threads
from pretraining.errors import DataError
from pretraining.tools.prepare.encoding_progress import Counts, Report
from pretraining.tools.prepare.pieces import Piece
from pretraining.tools.prepare.units import Unit, read_part
from pretraining.tools.prepare.work import Encoding, UnitRecord, WorkFolder
from pretraining.tools.prepare.writer import LARGEST_DOCUMENT_TOKENS, TokenWriter

BATCH_CHARACTERS = 1 << 19
"""Text that a thread encodes at once: long enough to hand over cheaply, short enough to share a small corpus evenly."""
_CHARACTERS_PER_TOKEN = 4


class _Encoded(NamedTuple):
    """A piece as tokens, and how long its text was."""

    tokens: np.ndarray
    piece: Piece
    characters: int
    text_bytes: int


def encode_unit(
    unit: Unit, encoding: Encoding, tokenizer: Tokenizer | None, work: WorkFolder, threads: int, report: Report
) -> None:
    """Write the token files of a unit, as far as they are not there.

    Args:
        unit: to be read.
        encoding: how.
        tokenizer: of the encoding; None where the input holds token ids.
        work: where to write.
        threads: that encode.
        report: is told what was done, a batch at a time.

    Raises:
        DataError: the input cannot be read, or holds what cannot be written.
        OSError: the output cannot be written.
    """
    record = work.read_record(unit, encoding.key(unit))
    done = replace(record.counts)
    writer = TokenWriter(
        work.files, np.dtype(encoding.dtype), encoding.tokens_per_file, f"part_{unit.number:06d}_", record.files
    )
    all_pieces = chain.from_iterable(read_part(part, encoding.text_field) for part in unit.parts)
    pieces = _skip_documents(all_pieces, done.documents + done.empty_documents)
    parts: list[np.ndarray] = []
    document_tokens = 0
    # A thread a batch, not the library's own threads: then the number of threads means what it says.
    with writer, library_threads(False):
        for batch in map_in_order(_encoder(encoding, tokenizer), _batches(pieces), threads):
            before = replace(done)
            for tokens, piece, characters, text_bytes in batch:
                done.characters += characters
                done.text_bytes += text_bytes
                done.input_bytes += piece.bytes_read
                parts.append(tokens)
                document_tokens += len(tokens)
                if document_tokens > LARGEST_DOCUMENT_TOKENS:
                    raise DataError(
                        f"{piece.place}: a document has more than {LARGEST_DOCUMENT_TOKENS:,} tokens, too many for a "
                        "row of a token file. Split it, for example into a .jsonl with a part a line"
                    )
                if not piece.ends_document:
                    continue
                document = parts[0] if len(parts) == 1 else np.concatenate(parts)
                parts, document_tokens = [], 0
                if not len(document):
                    done.empty_documents += 1
                    continue
                done.documents += 1
                done.tokens += len(document)
                record.count(len(document))
                record.largest_token = max(record.largest_token, int(document.max()))
                if writer.write(document):
                    _note(record, writer, done)
                    work.write_record(unit, record)
            report(done - before)
    rest = Counts(input_bytes=unit.size - done.input_bytes)  # what readers did not see pass by, such as a file's end
    _note(record, writer, done + rest)
    record.finished = True
    work.write_record(unit, record)
    report(rest)


def _note(record: UnitRecord, writer: TokenWriter, counts: Counts) -> None:
    record.files = list(writer.files)
    record.counts = replace(counts)


def _skip_documents(pieces: Iterator[Piece], count: int) -> Iterator[Piece]:
    """The pieces behind so many documents."""
    for piece in pieces:
        if count:
            count -= piece.ends_document
            continue
        yield piece


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces to about `BATCH_CHARACTERS` of text."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        length = len(piece.content)
        # Empty documents must not pile up either.
        characters += 1 + (length if isinstance(piece.content, str) else length * _CHARACTERS_PER_TOKEN)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoder(encoding: Encoding, tokenizer: Tokenizer | None) -> Callable[[list[Piece]], list[_Encoded]]:
    """The function that makes tokens of a batch of pieces."""
    dtype = np.dtype(encoding.dtype)
    if not encoding.encodes_text:
        return lambda batch: [_Encoded(_checked(piece, encoding, dtype), piece, 0, 0) for piece in batch]
    assert tokenizer is not None and tokenizer.sha256 == encoding.tokenizer

    def encode(batch: list[Piece]) -> list[_Encoded]:
        texts = [_text_of(piece, encoding) for piece in batch]
        return [
            _Encoded(
                np.array(ids, dtype=dtype), piece, len(text), len(text) if text.isascii() else len(text.encode("utf-8"))
            )
            for piece, text, ids in zip(batch, texts, tokenizer.encode_batch(texts), strict=True)
        ]

    return encode


def _text_of(piece: Piece, encoding: Encoding) -> str:
    if isinstance(piece.content, str):
        return piece.content
    raise DataError(
        f"{piece.place}: {encoding.text_field!r} holds token ids here, but text in other inputs: prepare them as two "
        "datasets"
    )


def _checked(piece: Piece, encoding: Encoding, dtype: np.dtype) -> np.ndarray:
    """Token ids that were given, in the files' type."""
    ids = piece.content
    if isinstance(ids, str):
        if not ids:  # rows of a column without any value have no type
            return np.zeros(0, dtype)
        raise DataError(
            f"{piece.place}: {encoding.text_field!r} holds text here, but token ids in other inputs: prepare them as "
            "two datasets"
        )
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= encoding.largest_vocabulary):
        wrong = int(np.flatnonzero((ids < 0) | (ids >= encoding.largest_vocabulary))[0])
        why = (
            "give the --vocab_size that the ids were made for"
            if encoding.tokenizer is None
            else "they were made by another tokenizer than the one of this root"
        )
        raise DataError(
            f"{piece.place}: token {wrong:,} of the document is {int(ids[wrong])}, but ids go from 0 to "
            f"{encoding.largest_vocabulary - 1}: {why}"
        )
    return ids.astype(dtype)
