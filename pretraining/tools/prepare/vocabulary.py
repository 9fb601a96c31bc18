"""The tokenizer of a root folder: corpus, or trained on the input.

All datasets of a root share one tokenizer, which is never replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path

from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, library_threads, load_tokenizer, train_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.files import exists
from pretraining.tools.command_settings import SMALLEST_VOCABULARY, PrepareConfig
from pretraining.tools.prepare.documents import PIECE_CHARACTERS
from pretraining.tools.prepare.encode import cut
from pretraining.tools.prepare.records import read_summary
from pretraining.tools.prepare.units import Input, read_part

log = logging.getLogger(__name__)

DEFAULT_VOCABULARY = 32_000
LARGEST_TRAINED_VOCABULARY = 2**22
"""Far above any tokenizer in use: the library allocates memory for all entries, and panics if it cannot."""
TRAINING_SAMPLE_CHARACTERS = 256 * 10**6
"""Largest sample that a tokenizer is trained on, in about a minute; more text changes little."""


def find_tokenizer(config: PrepareConfig, root: Path) -> Tokenizer | None:
    """Return the tokenizer of `config`, or the one in the root; None if there is neither.

    Raises:
        DataError: the tokenizer cannot be read, puts a wrong token around texts, or differs from the one in the root.
    """
    given = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
    if given is not None:
        given.check_added_around()
    if not exists(root / TOKENIZER_FILE):
        return given
    present = load_tokenizer(root)
    present.check_added_around()
    wrong = ""
    if given is not None and given.sha256 != present.sha256:
        wrong = f"--tokenizer_path={config.tokenizer_path} is another tokenizer"
    elif given is not None and len({given.chat_template, present.chat_template, None}) > 2:
        wrong = f"--tokenizer_path={config.tokenizer_path} has another chat template"
    elif config.vocab_size not in (None, present.vocab_size):
        wrong = f"it has {present.vocab_size} entries, not --vocab_size={config.vocab_size}"
    if wrong:
        remedy = "All datasets of a root share one tokenizer: drop the flag, or set another --output_path"
        raise DataError(f"{wrong}. {remedy}", path=root / TOKENIZER_FILE)
    # The root may have another tool's tokenizer.json alone, while the given folder has a template, too.
    return present if given is None or given.chat_template is None else given


def trained_tokenizer(config: PrepareConfig, corpus: Input, root: Path) -> Tokenizer:
    """Train a tokenizer on the input, or on a sample of a large input.

    Raises:
        ConfigError: --vocab_size is out of range.
        DataError: --vocab_size is too large for this text, or the root holds token ids of an unknown tokenizer.
    """
    wanted = config.vocab_size or DEFAULT_VOCABULARY
    if not SMALLEST_VOCABULARY <= wanted <= LARGEST_TRAINED_VOCABULARY:
        limits = f"{SMALLEST_VOCABULARY} to {LARGEST_TRAINED_VOCABULARY}"
        raise ConfigError(f"--vocab_size={wanted}: a tokenizer trained here has {limits} entries")
    for path in sorted(root.glob(f"*/{MANIFEST_FILE}")):
        if read_summary(path.parent).tokenizer is None:
            raise DataError(
                "it holds token ids of an unknown tokenizer: set --tokenizer_path to it, or another --output_path",
                path=path.parent,
            )
    log.info("Training a tokenizer of %s entries (byte-level BPE) on the text.", f"{wanted:,}")
    with library_threads(config.num_workers != 1):
        sample = training_sample(corpus, config.text_field or "", skip_bad=config.bad_records == "skip")
        tokenizer = train_tokenizer(sample, wanted)
    if tokenizer.vocab_size < wanted and config.vocab_size is not None:
        raise DataError(
            f"--vocab_size={wanted}: the text yields only {tokenizer.vocab_size} entries. Set at most that many"
        )
    return tokenizer


def training_sample(
    corpus: Input, text_field: str, characters: int = TRAINING_SAMPLE_CHARACTERS, *, skip_bad: bool = False
) -> Iterator[str]:
    """Yield text to train on: all if it fits, else the beginning of each part, with parts in the order of a hash.

    Texts are cut into pieces as for encoding.
    """
    parts = corpus.parts
    everything_fits = corpus.size <= characters and all(part.is_plain for part in parts)
    share = characters if everything_fits else max(characters // len(parts), PIECE_CHARACTERS)
    left = characters
    for part in sorted(parts, key=lambda part: sha256(part.name.encode("utf-8", "surrogateescape")).digest()):
        part_left = share
        for piece in chain.from_iterable(map(cut, read_part(part, text_field, skip_bad=skip_bad))):
            if not isinstance(piece.content, str):
                break  # encoding reports the error
            text = piece.content[: min(part_left, left)]
            part_left -= len(text)
            left -= len(text)
            yield text
            if not left:
                return
            if not part_left:
                break
