"""The tokenizer of a root folder: found, or trained on the input.

All datasets of a root share it; once it is there it is used and never replaced.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from pretraining.config.commands import SMALLEST_VOCABULARY, PrepareConfig
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, library_threads, load_tokenizer, train_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.files import exists, write_atomic
from pretraining.tools.prepare.records import WorkFolder, read_object, read_summaries
from pretraining.tools.prepare.text import PIECE_CHARACTERS
from pretraining.tools.prepare.units import Input, read_part

log = logging.getLogger(__name__)

DEFAULT_VOCABULARY = 32_000
LARGEST_TRAINED_VOCABULARY = 2**22
"""Many times that of any tokenizer in use: the library makes room for all of it, and panics where it cannot."""
TRAINING_SAMPLE_CHARACTERS = 256 * 10**6
"""Text that a tokenizer is trained on at most: more changes little, and a minute is enough for it."""


def find_tokenizer(config: PrepareConfig, root: Path) -> Tokenizer | None:
    """The tokenizer given, or the one in the root; None where there is neither.

    Raises:
        DataError: it cannot be read, or the root has another one.
    """
    given = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
    if not exists(root / TOKENIZER_FILE):
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


def trained_tokenizer(config: PrepareConfig, found: Input, work: WorkFolder) -> Tokenizer:
    """Trains a tokenizer on the input, or on a sample where it is long; takes the one that an interrupted call trained.

    Raises:
        ConfigError: the vocabulary asked for is too small for any text, or larger than any tokenizer has.
        DataError: it is too large for this text, or the root holds token ids of another tokenizer.
    """
    wanted = config.vocab_size or DEFAULT_VOCABULARY
    if wanted < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"--vocab_size={wanted}: a tokenizer for any text has at least {SMALLEST_VOCABULARY} entries, all bytes "
            "and the end of text"
        )
    if wanted > LARGEST_TRAINED_VOCABULARY:
        raise ConfigError(
            f"--vocab_size={wanted}: give {LARGEST_TRAINED_VOCABULARY:,} or less, a tokenizer trained here has no more"
        )
    foreign = [summary.folder for summary in read_summaries(work.root) if summary.tokenizer is None]
    if foreign:
        raise DataError(
            f"{foreign[0]} holds token ids of a tokenizer that is not in {work.root}, and all datasets of a root share "
            "one: give that by --tokenizer_path, or another --output_path"
        )
    trained_on = {"vocab_size": wanted, **found.settings}
    plan = read_object(work.plan)
    if plan.get("trained_on") == trained_on:
        with suppress(DataError):
            earlier = load_tokenizer(work.path)
            if earlier.sha256 == plan.get("tokenizer"):
                log.info("Going on with the tokenizer that an interrupted call trained.")
                return earlier
    log.info("Training a tokenizer of %s entries (byte-level BPE) on the text.", f"{wanted:,}")
    with library_threads(config.num_workers != 1):
        tokenizer = train_tokenizer(training_sample(found, config.text_field), wanted)
    if tokenizer.vocab_size < wanted and config.vocab_size is not None:
        raise DataError(
            f"--vocab_size={wanted}: the text has only enough different words for {tokenizer.vocab_size} entries. "
            f"Give --vocab_size={tokenizer.vocab_size} or less, or more text"
        )
    work.create()
    tokenizer.save(work.path)
    write_atomic(work.plan, json.dumps({"trained_on": trained_on, "tokenizer": tokenizer.sha256}))
    return tokenizer


def keep_tokenizer(root: Path, tokenizer: Tokenizer) -> None:
    """Puts a tokenizer into a root, unless another one has come there: that is a DataError."""
    if not exists(root / TOKENIZER_FILE):
        tokenizer.save(root)
    elif load_tokenizer(root).sha256 != tokenizer.sha256:
        raise DataError(
            f"another tokenizer has come to {root} in the meantime, and all datasets of a root share one. Start the "
            "same command again to encode with that one, or give another --output_path"
        )


def training_sample(found: Input, text_field: str, characters: int = TRAINING_SAMPLE_CHARACTERS) -> Iterator[str]:
    """Text to train on: all of it where that fits, else the beginning of each part, parts in the order of a hash."""
    parts = [part for unit in found.units for part in unit.parts]
    everything_fits = found.size <= characters and all(part.is_plain for part in parts)
    share = characters if everything_fits else max(characters // len(parts), PIECE_CHARACTERS)
    left = characters
    for part in sorted(parts, key=lambda part: sha256(part.name.encode("utf-8", "surrogateescape")).digest()):
        part_left = share
        for piece in read_part(part, text_field):
            if not isinstance(piece.content, str):
                break  # encoding will say what is wrong with it
            text = piece.content[: min(part_left, left)]
            part_left -= len(text)
            left -= len(text)
            yield text
            if not left:
                return
            if not part_left:
                break
