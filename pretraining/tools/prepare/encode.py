"""Units of the input to token files, over the cores of a machine.

    unit --read--> documents --cut--> pieces --encode, on threads--> token ids --join--> documents --> files, done file

Threads encode pieces a batch at a time (both libraries work outside Python's lock). Documents are written in the order
they were read, so that the files are a function of the unit and the encoding alone. A Python process hands tokens over
one thread at a time, which about a dozen cores fill: beyond a few threads, units go to processes with threads of their
own.

fastokens (extra `fast`) reads the same tokenizer.json as the tokenizers library, which is the reference, and gives the
same ids, many times as fast. Nothing is taken on trust: the first texts of every unit, and a keyed sample of one in
`CHECKED_ONE_IN` of all others, are encoded by both, and a difference is an error that names the document.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64
from pretraining.data.threads import map_in_order
from pretraining.data.tokenizer import Tokenizer, library_threads, load_tokenizer
from pretraining.errors import DataError
from pretraining.files import output_errors
from pretraining.tools.prepare.documents import PIECE_CHARACTERS, Document, end_of_piece
from pretraining.tools.prepare.records import Counts, Encoder, Encoding, UnitRecord, WorkFolder
from pretraining.tools.prepare.token_files import LARGEST_DOCUMENT_TOKENS, TokenWriter
from pretraining.tools.prepare.units import Unit, read_part

if TYPE_CHECKING:
    import fastokens

log = logging.getLogger(__name__)

THREADS_PER_PROCESS: dict[Encoder | None, int] = {"fastokens": 2, "tokenizers": 8, None: 8}
"""Two threads of fastokens encode more than one thread of Python reads and writes."""
BATCH_CHARACTERS = 1 << 19
"""Text that a thread encodes at once: long enough to hand over cheaply, short enough to share a small corpus evenly."""
_CHARACTERS_PER_TOKEN = 4
CHECKED_ONE_IN = 1000
CHECKED_FIRST_CHARACTERS = 1 << 17
"""How much of the beginning of a unit is checked: the library takes some 60 ms for it."""
_WITHOUT_FASTOKENS = "Start the command again with --encoder=tokenizers, which is slower"

Report = Callable[[Counts], None]
"""Takes what was done since it was last called."""
TextEncoder = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]
"""Takes N texts; gives the ids of all, one text after the other, [T], and how many each has, [N]."""


def choose_encoder(tokenizer: Tokenizer, wanted: Literal["auto"] | Encoder) -> Encoder:
    """Return fastokens if it is installed and takes the tokenizer, unless the user wants the library; log if not.

    Raises:
        DataError: fastokens is wanted, and is not installed or does not take the tokenizer.
    """
    if wanted == "tokenizers":
        return wanted
    try:
        _load_fastokens(tokenizer.definition)
        return "fastokens"
    except (ImportError, ValueError) as error:
        reason = f"does not take this tokenizer ({error})"
        if isinstance(error, ImportError):
            reason = f"is not installed ({error}; pip install 'pretraining[fast]')"
        if wanted == "fastokens":
            raise DataError(f"--encoder=fastokens: it {reason}. Drop the flag, and tokenizers encodes") from error
        log.info("fastokens %s: the tokenizers library encodes, many times slower.", reason)
        return "tokenizers"


def text_encoder(tokenizer: Tokenizer, encoder: Encoder) -> TextEncoder:
    """Return a function that encodes texts, on the thread that calls it; fastokens raises a ValueError at times."""

    def by_library(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [np.array(one, np.uint32) for one in tokenizer.encode_batch(texts)]
        return np.concatenate(ids), np.array([len(one) for one in ids])

    def by_fastokens(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, ends = fast.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(ends, "<u8").astype(np.int64))

    if encoder == "tokenizers":
        return by_library
    fast = _load_fastokens(tokenizer.definition)
    return by_fastokens


@functools.lru_cache(maxsize=1)
def _load_fastokens(definition: bytes) -> fastokens.Tokenizer:
    """Read a tokenizer.json with fastokens; a ValueError says why it does not take it, an ImportError that it lacks."""
    import fastokens

    # It starts threads of its own otherwise. It reads the variable when it first encodes.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    library = fastokens.Tokenizer.from_json_str(definition.decode("utf-8"))
    library.no_truncation()
    library.no_padding()
    return library


# Over processes


def encode_units(units: Sequence[Unit], encoding: Encoding, work: WorkFolder, threads: int, report: Report) -> None:
    """Write the token files of units.

    Args:
        work: has the tokenizer of the encoding.
        threads: that encode, over all processes.
        report: is told what was done.

    Raises:
        DataError: the input cannot be read, or holds what cannot be written; or a process was killed.
        OSError: the output cannot be written.
    """
    processes = min(len(units), -(-threads // THREADS_PER_PROCESS[encoding.encoder]))
    if processes <= 1:
        for unit in units:
            encode_unit(unit, encoding, work, threads, report)
        return
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _begin_process, (theirs,))
    each = -(-threads // processes)
    try:
        for done in as_completed([pool.submit(_encode_in_process, unit, encoding, work, each) for unit in units]):
            report(done.result())
    except BrokenProcessPool:
        raise DataError(
            "a process that encodes was killed. The same command goes on; if memory ran out, give fewer --num_workers"
        ) from None
    finally:
        ours.close()  # ends the processes at once, in the middle of a unit too
        theirs.close()
        pool.shutdown(cancel_futures=True)


def _begin_process(parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its processes
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """End this process when the parent closes its end of the connection, or is gone."""
    parent.poll(None)
    os._exit(0)


def _encode_in_process(unit: Unit, encoding: Encoding, work: WorkFolder, threads: int) -> Counts:
    with output_errors(work.root):
        return encode_unit(unit, encoding, work, threads, lambda counts: None)


# One unit


def encode_unit(unit: Unit, encoding: Encoding, work: WorkFolder, threads: int, report: Report) -> Counts:
    """Write the token files of a unit, and last its done file; return what was done."""
    work.clear(unit)
    record = UnitRecord(encoding.key(unit))
    documents = chain.from_iterable(read_part(part, encoding.text_field) for part in unit.parts)
    writer = TokenWriter(work.files, encoding.dtype, encoding.tokens_per_file, f"part_{unit.number:06d}_")
    begun: list[np.ndarray] = []  # tokens of the document whose end has not come
    # A thread per batch, not the library's own threads: then the number of threads means what it says.
    with writer, library_threads(False):
        for batch, tokens, lengths, counts in map_in_order(
            _encoder(unit, encoding, work), _batches(documents), threads
        ):
            ends = np.cumsum(lengths)[[piece.is_last_part for piece in batch.pieces]] + sum(map(len, begun))
            begun.append(tokens)
            held = sum(map(len, begun))
            lengths = np.diff(ends, prepend=0)
            end = int(ends[-1]) if len(ends) else 0
            if max(lengths.max(initial=0), held - end) > LARGEST_DOCUMENT_TOKENS:
                raise batch.pieces[-1].error(
                    f"a document here, or shortly before, has more than {LARGEST_DOCUMENT_TOKENS:,} tokens: split it"
                )
            if len(ends):  # a long document is put together once, at its end
                tokens = np.concatenate(begun) if len(begun) > 1 else tokens
                begun = [tokens[end:]] if end < held else []
            written = lengths[lengths > 0]
            writer.write(tokens[:end], written)
            counts += Counts(len(written), end, len(lengths) - len(written))
            record.counts += counts
            record.largest_token = max(record.largest_token, int(tokens[:end].max(initial=0)) if end else -1)
            report(counts)
    record.files = writer.files
    work.write_record(unit, record)
    return record.counts


class _Batch(NamedTuple):
    """Pieces of documents, each at most `PIECE_CHARACTERS`, and the number of the first of them in the unit."""

    number: int
    pieces: list[Document]


_Encoded = tuple[_Batch, np.ndarray, np.ndarray, Counts]
"""A batch, its tokens, [T], the tokens of each piece, [P], and what was read."""


def _batches(documents: Iterable[Document]) -> Iterator[_Batch]:
    """Group pieces to about `BATCH_CHARACTERS` of text."""
    batch: list[Document] = []
    number = characters = 0
    for document in documents:
        is_text = isinstance(document.content, str)
        for piece in cut(document):
            batch.append(piece)
            # Empty documents must not pile up either.
            characters += 1 + len(piece.content) * (1 if is_text else _CHARACTERS_PER_TOKEN)
            if characters >= BATCH_CHARACTERS:
                yield _Batch(number, batch)
                number, batch, characters = number + len(batch), [], 0
    if batch:
        yield _Batch(number, batch)


def cut(document: Document) -> Iterator[Document]:
    """Cut a document into parts that end where no word goes across; one is the rule."""
    text, begin = document.content, 0
    while isinstance(text, str) and len(text) - begin > PIECE_CHARACTERS:
        end = end_of_piece(text, begin, PIECE_CHARACTERS)
        yield document._replace(content=text[begin:end], bytes_read=0, is_last_part=False)
        begin = end
    yield document._replace(content=text[begin:]) if begin else document


def _encoder(unit: Unit, encoding: Encoding, work: WorkFolder) -> Callable[[_Batch], _Encoded]:
    """Return the function that makes tokens of a batch of pieces."""
    if encoding.encoder is None:
        return functools.partial(_take_ids, encoding)
    assert encoding.tokenizer is not None
    by_library, encode = _text_encoders(work.path, encoding.tokenizer, encoding.encoder)

    def encode_batch(batch: _Batch) -> _Encoded:
        texts = [_checked_kind(piece, str, encoding) for piece in batch.pieces]
        try:
            ids, lengths = encode(texts)
        except ValueError as error:
            raise batch.pieces[0].error(
                f"fastokens cannot encode one of {len(texts)} documents from here on ({error}). {_WITHOUT_FASTOKENS}"
            ) from error
        ends = np.cumsum(lengths)
        for index in _checked(texts, unit.number, batch.number) if encode is not by_library else ():
            if not np.array_equal(ids[ends[index] - lengths[index] : ends[index]], by_library([texts[index]])[0]):
                raise batch.pieces[index].error(
                    f"fastokens {version('fastokens')} encodes this document differently from tokenizers "
                    f"{version('tokenizers')}, which is right by definition. {_WITHOUT_FASTOKENS}"
                )
        text_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
        counts = Counts(characters=sum(map(len, texts)), text_bytes=text_bytes, input_bytes=_bytes_read(batch))
        return batch, ids.astype(encoding.dtype), lengths, counts

    return encode_batch


@functools.lru_cache(maxsize=1)
def _text_encoders(folder: Path, sha256: str, encoder: Encoder) -> tuple[TextEncoder, TextEncoder]:
    """Return the reference and the function that encodes."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.sha256 == sha256
    reference = text_encoder(tokenizer, "tokenizers")
    return reference, reference if encoder == "tokenizers" else text_encoder(tokenizer, encoder)


def _checked(texts: Sequence[str], unit: int, number: int) -> list[int]:
    """Choose the texts that are encoded by both: those at the beginning of the unit, and of all the keyed sample."""
    hashes = hash64(derive_key(Purpose.CHECKED_TEXTS, unit), np.arange(number, number + len(texts)))
    is_checked = hashes % np.uint64(CHECKED_ONE_IN) == 0
    if number == 0:
        characters = np.cumsum([len(text) for text in texts])
        is_checked[: np.searchsorted(characters, CHECKED_FIRST_CHARACTERS) + 1] = True
    return [int(index) for index in np.flatnonzero(is_checked)]


def _take_ids(encoding: Encoding, batch: _Batch) -> _Encoded:
    """Take token ids that were given, in the files' type; of them there is no text."""
    tokens = []
    for piece in batch.pieces:
        # Rows of a column without any value have no type.
        ids = _checked_kind(piece, np.ndarray, encoding) if len(piece.content) else np.zeros(0, encoding.dtype)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= encoding.largest_vocabulary):
            wrong = int(np.argmax((ids < 0) | (ids >= encoding.largest_vocabulary)))
            raise piece.error(
                f"token {wrong:,} of the document is {int(ids[wrong])}, but ids go from 0 to "
                f"{encoding.largest_vocabulary - 1}: give the right --vocab_size or --tokenizer_path"
            )
        tokens.append(ids.astype(encoding.dtype))
    lengths = np.array([len(ids) for ids in tokens])
    return batch, np.concatenate(tokens), lengths, Counts(input_bytes=_bytes_read(batch))


def _checked_kind(piece: Document, kind: type, encoding: Encoding) -> Any:
    """Return the content of a piece; a DataError if it is text where ids are expected, or the other way round."""
    if isinstance(piece.content, kind):
        return piece.content
    raise piece.error(
        f"{encoding.text_field!r} holds text in some inputs, token ids in others: prepare them as two datasets"
    )


def _bytes_read(batch: _Batch) -> int:
    return sum(piece.bytes_read for piece in batch.pieces)
