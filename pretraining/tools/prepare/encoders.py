"""Text to token ids: by fastokens (extra `fast`), or by the tokenizers library, which is the reference.

    texts --one call--> the ids of all texts in one array, and the length of each

fastokens reads the same tokenizer.json and gives the same ids, many times as fast. Nothing is taken on trust: the first
texts of every unit, and a keyed sample of one in `CHECKED_ONE_IN` of all others, are encoded by both, and a difference
is an error that names the document.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

import numpy as np

from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64
from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import DataError

if TYPE_CHECKING:
    import fastokens

log = logging.getLogger(__name__)

CHECKED_ONE_IN = 1000
CHECKED_FIRST_CHARACTERS = 1 << 17
"""How much of the beginning of a unit is checked: the library takes some 60 ms for it."""

Encoder = Literal["fastokens", "tokenizers"]
Encoded = tuple[np.ndarray, np.ndarray]
"""The ids of N texts, one text after the other, [T] uint32, and how many each has, [N] int64."""
TextEncoder = Callable[[list[str], Sequence[str], int, int], Encoded]
"""Takes N texts, their places for messages, the number of their unit, and that of the first text in it."""

_WAY_OUT = "Start the command again with --encoder=tokenizers: it encodes everything by the library, and takes longer"


def choose_encoder(tokenizer: Tokenizer, wanted: Literal["auto"] | Encoder) -> Encoder:
    """Return fastokens if it is installed and takes the tokenizer, unless the user wants the library; log if not.

    Raises:
        DataError: fastokens is wanted, and is not installed or does not take the tokenizer.
    """
    if wanted == "tokenizers":
        return wanted
    try:
        _load_fastokens(tokenizer.definition)
    except (ImportError, ValueError) as error:
        reason = f"does not take this tokenizer ({error})"
        if isinstance(error, ImportError):
            reason = f"is not installed ({error}; pip install 'pretraining[fast]')"
        if wanted == "fastokens":
            raise DataError(
                f"--encoder=fastokens: it {reason}. Drop the flag, and the tokenizers library encodes"
            ) from error
        log.info("fastokens %s: the tokenizers library encodes, many times slower.", reason)
        return "tokenizers"
    return "fastokens"


def text_encoder(tokenizer: Tokenizer, encoder: Encoder) -> TextEncoder:
    """Returns a function that encodes, on the thread that calls it.

    Raises:
        DataError: from the function, where fastokens gives other ids than the library, or an error.
    """
    if encoder == "tokenizers":
        return lambda texts, places, unit, number: _library_ids(tokenizer, texts)
    fast = _load_fastokens(tokenizer.definition)

    def encode(texts: list[str], places: Sequence[str], unit: int, number: int) -> Encoded:
        try:
            ids_bytes, ends_bytes = fast.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=True)
        except ValueError as error:
            raise DataError(
                f"{places[0]} to {places[-1]}: fastokens cannot encode one of these documents ({error}). {_WAY_OUT}"
            ) from error
        ids, ends = np.frombuffer(ids_bytes, "<u4"), np.frombuffer(ends_bytes, "<u8").astype(np.int64)
        for index in _checked(texts, unit, number):
            expected, _ = _library_ids(tokenizer, [texts[index]])
            if not np.array_equal(ids[ends[index] : ends[index + 1]], expected):
                raise DataError(
                    f"{places[index]}: fastokens {version('fastokens')} encodes this document differently from "
                    f"tokenizers {version('tokenizers')}, which is right by definition. {_WAY_OUT}"
                )
        return ids, np.diff(ends)

    return encode


def _checked(texts: Sequence[str], unit: int, number: int) -> list[int]:
    """Which of some texts are encoded by both: those at the beginning of the unit, and of all the keyed sample."""
    hashes = hash64(derive_key(Purpose.CHECKED_TEXTS, unit), np.arange(number, number + len(texts)))
    is_checked = hashes % np.uint64(CHECKED_ONE_IN) == 0
    if number == 0:
        characters = np.cumsum([len(text) for text in texts])
        is_checked[: np.searchsorted(characters, CHECKED_FIRST_CHARACTERS) + 1] = True
    return [int(index) for index in np.flatnonzero(is_checked)]


def _library_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    ids = [np.array(one, np.uint32) for one in tokenizer.encode_batch(texts)]
    return np.concatenate(ids), np.array([len(one) for one in ids])


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
