"""Encoding of units into token files, on the cores of a machine.

    unit --read--> documents --cut--> pieces --encode on threads--> token ids --join--> documents --> files, done file

Threads encode batches of pieces; both libraries release Python's lock. Documents are written in the order of the input,
so the files depend on the unit and the encoding only. Python's lock limits a process to about a dozen cores, so units
are spread over processes with a few threads each.

fastokens (extra `fast`) reads the same tokenizer.json as the reference, the tokenizers library, and gives the same ids
many times as fast. Its output is checked: both encode the first texts of every unit, and a keyed sample of one in
`CHECKED_ONE_IN` of the others. A difference is an error that names the document.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
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
from pretraining.tools.prepare.chats import ChatRenderer, Marks
from pretraining.tools.prepare.documents import PIECE_CHARACTERS, Document, end_of_piece
from pretraining.tools.prepare.records import Encoder, Encoding, PrepareCounts, UnitRecord, WorkFolder, read_content
from pretraining.tools.prepare.token_files import LARGEST_DOCUMENT_TOKENS, TokenWriter
from pretraining.tools.prepare.units import Part, Render, Unit, read_part

if TYPE_CHECKING:
    import fastokens

log = logging.getLogger(__name__)

THREADS_PER_PROCESS: dict[Encoder | None, int] = {"fastokens": 2, "tokenizers": 8, None: 8}
"""Two threads of fastokens encode faster than one Python thread can read and write."""
BATCH_CHARACTERS = 1 << 19
"""Text of a batch: large enough for a small overhead, small enough to spread a small corpus over threads."""
_CHARACTERS_PER_TOKEN = 4
CHECKED_ONE_IN = 1000
CHECKED_FIRST_CHARACTERS = 1 << 17
"""Text at the beginning of a unit that is checked; the reference takes about 60 ms for it."""
_WITHOUT_FASTOKENS = "Run the command again with --encoder=tokenizers, which is slower"

Report = Callable[[PrepareCounts], None]
"""Receives the counts since its last call."""
TextEncoder = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]
"""Takes N texts; returns their concatenated ids [T], and the number of ids of each text [N]."""
LossCounter = Callable[[Sequence[str], np.ndarray, np.ndarray], np.ndarray]
"""Takes N texts, their ids [T], and the numbers of their ids [N]; returns the losses of each text [N]."""


def choose_encoder(tokenizer: Tokenizer, wanted: Literal["auto"] | Encoder) -> Encoder:
    """Return the encoder to use; "auto" is fastokens if it is installed and supports the tokenizer.

    Raises:
        DataError: fastokens is requested, but it is not installed or does not support the tokenizer.
    """
    if wanted == "tokenizers":
        return wanted
    try:
        _load_fastokens(tokenizer.definition_without_dropout)
        return "fastokens"
    except (ImportError, ValueError) as error:
        reason = f"does not support this tokenizer ({error})"
        if isinstance(error, ImportError):
            reason = f"is not installed ({error}; pip install 'pretraining[fast]')"
        if wanted == "fastokens":
            raise DataError(f"--encoder=fastokens: it {reason}. Drop the flag to encode with tokenizers") from error
        log.info("fastokens %s: the tokenizers library encodes, many times slower.", reason)
        return "tokenizers"


def text_encoder(tokenizer: Tokenizer, encoder: Encoder, *, special_tokens: bool = False) -> TextEncoder:
    """Return a function that encodes texts on the calling thread; fastokens may raise a ValueError.

    Args:
        special_tokens: whether names of special tokens in the texts become their ids.
    """

    def by_library(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [np.array(one, np.uint32) for one in tokenizer.encode_batch(texts, special_tokens=special_tokens)]
        return np.concatenate(ids), np.array([len(one) for one in ids])

    def by_fastokens(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, ends = fast.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=not special_tokens)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(ends, "<u8").astype(np.int64))

    if encoder == "tokenizers":
        return by_library
    fast = _load_fastokens(tokenizer.definition_without_dropout)
    return by_fastokens


@functools.lru_cache(maxsize=1)
def _load_fastokens(definition: bytes) -> fastokens.Tokenizer:
    """Load a tokenizer.json; raise a ValueError if fastokens does not support it, an ImportError without fastokens."""
    import fastokens

    # Keeps fastokens from starting its own threads; it reads the variable at its first encoding.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    library = fastokens.Tokenizer.from_json_str(definition.decode("utf-8"))
    library.no_truncation()
    library.no_padding()
    return library


# Processes


def encode_units(units: Sequence[Unit], encoding: Encoding, work: WorkFolder, threads: int, report: Report) -> None:
    """Write the token files of units.

    Args:
        work: folder with the tokenizer of the encoding.
        threads: encoding threads, over all processes.
        report: called with counts as units progress.

    Raises:
        DataError: unreadable or unsuitable input, or a killed process.
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
            "an encoding process was killed. Run the command again to continue; if memory ran out, lower --num_workers"
        ) from None
    finally:
        ours.close()  # stops the processes at once, even within a unit
        theirs.close()
        pool.shutdown(cancel_futures=True)


def _begin_process(parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and stops its processes
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: Connection) -> None:
    """Exit when the parent closes its end of the connection or dies."""
    parent.poll(None)
    os._exit(0)


def _encode_in_process(unit: Unit, encoding: Encoding, work: WorkFolder, threads: int) -> PrepareCounts:
    with output_errors(work.root, name_flag="--dataset or --output_path"):
        return encode_unit(unit, encoding, work, threads, lambda counts: None)


# One unit


def encode_unit(unit: Unit, encoding: Encoding, work: WorkFolder, threads: int, report: Report) -> PrepareCounts:
    """Write the token files of a unit, then its done file; return the counts."""
    work.clear(unit)
    record = UnitRecord(encoding.key(unit))
    writer = TokenWriter(work.files, encoding.dtype, encoding.tokens_per_file, f"part_{unit.number:06d}_")
    begun: list[np.ndarray] = []  # tokens of the document that is not complete yet
    is_marked = False  # whether this document holds the name of a special token
    # One thread per batch, without the library's own threads, keeps the number of threads exact.
    with writer, library_threads(False), closing(_read_pieces(unit, encoding, work, record)) as pieces:
        for batch, tokens, lengths, counts, marked, lost in map_in_order(
            _encoder(unit, encoding, work), _batches(pieces), threads
        ):
            is_last = np.array([piece.is_last_part for piece in batch.pieces])
            ends = np.cumsum(lengths)[is_last] + sum(map(len, begun))
            begun.append(tokens)
            held = sum(map(len, begun))
            lengths = np.diff(ends, prepend=0)
            end = int(ends[-1]) if len(ends) else 0
            if max(lengths.max(initial=0), held - end) > LARGEST_DOCUMENT_TOKENS:
                raise batch.pieces[-1].error(
                    f"a document here, or shortly before, has more than {LARGEST_DOCUMENT_TOKENS:,} tokens: split it"
                )
            if len(ends):  # a long document is concatenated once, at its end
                tokens = np.concatenate(begun) if len(begun) > 1 else tokens
                begun = [tokens[end:]] if end < held else []
            complete = tokens[:end]
            is_marked, marks = _mark_documents(is_last, marked, is_marked)
            if faults := [piece.fault for piece in batch.pieces if piece.fault]:
                is_good = np.array([not piece.fault for piece in batch.pieces if piece.is_last_part])
                complete, lengths, marks = complete[np.repeat(is_good, lengths)], lengths[is_good], marks[is_good]
                record.add_bad_records(faults)
            written = lengths[lengths > 0]
            writer.write(complete, written)
            counts += PrepareCounts(len(written), len(complete), len(lengths) - len(written))
            counts.marked_documents = int(marks.sum())
            record.counts += counts
            record.largest_token = max(record.largest_token, int(complete.max(initial=0)) if len(complete) else -1)
            if lost is not None and not record.first_loss:
                record.first_loss = lost.place
            report(counts)
    record.files = writer.files
    work.write_record(unit, record)
    return record.counts


def _mark_documents(is_last: np.ndarray, marked: list[int], begun: bool) -> tuple[bool, np.ndarray]:
    """Return whether the document that the last piece does not end is marked, and which of the complete ones are.

    Args:
        is_last: whether each piece ends its document.
        marked: indices of marked pieces.
        begun: whether the first document is marked in an earlier batch.
    """
    marks = np.zeros(int(is_last.sum()) + 1, bool)
    marks[(np.cumsum(is_last) - is_last)[marked]] = True
    marks[0] |= begun
    return bool(marks[-1]), marks[:-1]


def _read_pieces(
    unit: Unit, encoding: Encoding, work: WorkFolder, record: UnitRecord
) -> Generator[Document, None, None]:
    """Yield the pieces of a unit's documents, with chats rendered, and with names of special tokens whole."""
    render = ChatRenderer(load_tokenizer(work.path), encoding.now).render if encoding.chat_template else None
    documents = chain.from_iterable(_read_recorded(part, encoding, record, render) for part in unit.parts)
    pieces = chain.from_iterable(map(cut, documents))
    are_ids = encoding.special_tokens == "ids"
    yield from Marks(load_tokenizer(work.path)).keep_whole(pieces) if are_ids else pieces


def _read_recorded(part: Part, encoding: Encoding, record: UnitRecord, render: Render | None) -> Iterator[Document]:
    """Record the content of a part, and yield its documents."""
    record.contents.append(read_content(part))
    yield from read_part(part, encoding.text_field, skip_bad=encoding.skip_bad, render=render)


class _Batch(NamedTuple):
    """Pieces of documents, each at most `PIECE_CHARACTERS`; `number` is the index of the first piece in the unit."""

    number: int
    pieces: list[Document]


class _Encoded(NamedTuple):
    """A batch and its tokens.

    Attributes:
        tokens: of all pieces [T].
        lengths: number of tokens of each piece [P].
        marked: indices of the pieces that hold the name of a special token; of chats, in their messages.
        lost: first piece that the tokenizer cannot encode without a loss.
    """

    batch: _Batch
    tokens: np.ndarray
    lengths: np.ndarray
    counts: PrepareCounts
    marked: list[int]
    lost: Document | None = None


def _batches(pieces: Iterable[Document]) -> Iterator[_Batch]:
    """Group pieces into batches of about `BATCH_CHARACTERS`."""
    batch: list[Document] = []
    number = characters = 0
    for piece in pieces:
        batch.append(piece)
        # 1 per document, so that empty documents fill a batch, too.
        characters += 1 + len(piece.content) * (1 if isinstance(piece.content, str) else _CHARACTERS_PER_TOKEN)
        if characters >= BATCH_CHARACTERS:
            yield _Batch(number, batch)
            number, batch, characters = number + len(batch), [], 0
    if batch:
        yield _Batch(number, batch)


def cut(document: Document) -> Iterator[Document]:
    """Yield the parts of a document, cut between words; most documents are one part."""
    text, begin = document.content, 0
    while isinstance(text, str) and len(text) - begin > PIECE_CHARACTERS:
        end = end_of_piece(text, begin, PIECE_CHARACTERS)
        yield document._replace(content=text[begin:end], bytes_read=0, is_last_part=False)
        begin = end
    yield document._replace(content=text[begin:]) if begin else document


def _encoder(unit: Unit, encoding: Encoding, work: WorkFolder) -> Callable[[_Batch], _Encoded]:
    if encoding.encoder is None:
        return functools.partial(_convert_ids, encoding)
    assert encoding.tokenizer is not None
    by_library, encode, count_losses, marks = _text_encoders(
        work.path, encoding.tokenizer, encoding.encoder, encoding.special_tokens == "ids"
    )

    def encode_batch(batch: _Batch) -> _Encoded:
        texts = [_content_as(piece, str, encoding) for piece in batch.pieces]
        if encoding.chat_template:
            marked = [index for index, piece in enumerate(batch.pieces) if piece.is_marked]
        else:
            marked = marks.find(texts)
        try:
            ids, lengths = encode(texts)
        except ValueError as error:
            raise batch.pieces[0].error(
                f"fastokens cannot encode one of the {len(texts)} documents from here ({error}). {_WITHOUT_FASTOKENS}"
            ) from error
        ends = np.cumsum(lengths)
        for index in _texts_to_check(texts, unit.number, batch.number) if encode is not by_library else ():
            if not np.array_equal(ids[ends[index] - lengths[index] : ends[index]], by_library([texts[index]])[0]):
                raise batch.pieces[index].error(
                    f"fastokens {version('fastokens')} encodes this document differently from the reference, "
                    f"tokenizers {version('tokenizers')}. {_WITHOUT_FASTOKENS}"
                )
        text_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
        counts = PrepareCounts(characters=sum(map(len, texts)), text_bytes=text_bytes, input_bytes=_bytes_read(batch))
        lost = None
        if count_losses is not None and (losses := count_losses(texts, ids, lengths)).any():
            counts.lost, lost = int(losses.sum()), batch.pieces[np.flatnonzero(losses)[0]]
        return _Encoded(batch, ids.astype(encoding.dtype), lengths, counts, marked, lost)

    return encode_batch


@functools.lru_cache(maxsize=1)
def _text_encoders(
    folder: Path, sha256: str, encoder: Encoder, special_tokens: bool
) -> tuple[TextEncoder, TextEncoder, LossCounter | None, Marks]:
    """Return the reference encoder, the chosen encoder, the counter of losses, and the names of special tokens."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.sha256 == sha256
    reference = chosen = text_encoder(tokenizer, "tokenizers", special_tokens=special_tokens)
    if encoder != "tokenizers":
        chosen = text_encoder(tokenizer, encoder, special_tokens=special_tokens)
    return reference, chosen, loss_counter(tokenizer), Marks(tokenizer)


def _texts_to_check(texts: Sequence[str], unit: int, number: int) -> list[int]:
    """Return the indices of texts to check: the beginning of the unit, and a keyed sample."""
    hashes = hash64(derive_key(Purpose.CHECKED_TEXTS, unit), np.arange(number, number + len(texts)))
    is_checked = hashes % np.uint64(CHECKED_ONE_IN) == 0
    if number == 0:
        characters = np.cumsum([len(text) for text in texts])
        is_checked[: np.searchsorted(characters, CHECKED_FIRST_CHARACTERS) + 1] = True
    return [int(index) for index in np.flatnonzero(is_checked)]


def _convert_ids(encoding: Encoding, batch: _Batch) -> _Encoded:
    """Return the token ids of a batch in the type of the files; raise a DataError for ids out of range."""
    tokens = []
    for piece in batch.pieces:
        # A column without values has no type.
        ids = _content_as(piece, np.ndarray, encoding) if len(piece.content) else np.zeros(0, encoding.dtype)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= encoding.largest_vocabulary):
            wrong = int(np.argmax((ids < 0) | (ids >= encoding.largest_vocabulary)))
            raise piece.error(
                f"token {wrong:,} of the document is {int(ids[wrong])}, but ids go from 0 to "
                f"{encoding.largest_vocabulary - 1}: write the file again, or give --tokenizer_path or --vocab_size of "
                "the tokenizer of these ids"
            )
        tokens.append(ids.astype(encoding.dtype))
    lengths = np.array([len(ids) for ids in tokens])
    return _Encoded(batch, np.concatenate(tokens), lengths, PrepareCounts(input_bytes=_bytes_read(batch)), [])


def _content_as(piece: Document, kind: type, encoding: Encoding) -> Any:
    """Return the content of a piece; raise a DataError for text instead of ids, or ids instead of text."""
    if isinstance(piece.content, kind):
        return piece.content
    raise piece.error(
        f"{encoding.text_field!r} holds text in some inputs, and chats or token ids in others: prepare two datasets"
    )


def _bytes_read(batch: _Batch) -> int:
    return sum(piece.bytes_read for piece in batch.pieces)


# Text that the tokenizer cannot encode


def loss_counter(tokenizer: Tokenizer) -> LossCounter | None:
    """Return a counter of unknown tokens, or of characters without a token; None if any text is encoded."""
    if tokenizer.encodes_all:
        return None
    unknown = tokenizer.unknown_token
    is_dropped: dict[str, bool] = {}

    def count_unknown(texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        totals, ends = np.cumsum(np.append(0, ids == unknown)), np.cumsum(lengths)
        return np.asarray(totals[ends] - totals[ends - lengths])

    def count_dropped(texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        losses = np.zeros(len(texts), np.int64)
        for index, text in enumerate(texts):
            characters = set(text)
            for character in characters.difference(is_dropped):
                is_dropped[character] = tokenizer.drops(character)
            if any(map(is_dropped.__getitem__, characters)):
                losses[index] = sum(map(is_dropped.__getitem__, text))
        return losses

    return count_dropped if unknown is None else count_unknown
