"""Tokenizers: text to token ids and back, with the `tokenizers` library.

A tokenizer is a folder in the Hugging Face layout, or the `tokenizer.json` in it. `train_tokenizer` makes a byte-level
BPE as GPT-2's, which encodes any text and decodes it exactly. Its end-of-text token has id 0.

Encoding adds no special tokens and finds none: `<|endoftext|>` in an article about language models is encoded as its
characters.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pretraining.errors import ConfigError, DataError
from pretraining.files import from_hub, is_folder, lfs_pointer_hint, read_file, read_json, write_atomic

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json")
"""Files of a tokenizer to download from the Hub."""
_USUAL_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-text token to try if no file beside tokenizer.json names it."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that encodes and decodes text.

    Attributes:
        definition, config: contents of tokenizer.json and tokenizer_config.json.
        end_of_text: id of the token that ends a document.
        vocab_size: largest id plus one, the rows that an embedding needs.
        pad_token: id of the padding token.
    """

    library: tokenizers.Tokenizer
    definition: bytes
    config: bytes
    end_of_text: int | None
    vocab_size: int
    pad_token: int | None = None

    def fits(self, rows: int) -> bool:
        """Return whether a model with this many rows can have been trained with this tokenizer.

        Tokens that were added to its vocabulary, such as one for padding, may lie beyond the rows: they count only
        where they occur.
        """
        added = self.library.get_added_tokens_decoder()
        numbers = self.library.get_vocab(with_added_tokens=True).values()
        return all(number < rows or number in added for number in numbers)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens; raise a DataError if the tokenizer fails."""
        with _panics_as_errors():
            return self.library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts, encoded on all cores (see `library_threads`), as `encode` does."""
        with _panics_as_errors():
            return [encoding.ids for encoding in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included. Invalid UTF-8 becomes U+FFFD."""
        return self.library.decode(list(ids), skip_special_tokens=False)

    def byte_lengths(self) -> list[int] | None:
        """Return the UTF-8 bytes of text per id: 0 for special tokens and unused ids.

        Supports byte-level BPE, and BPE and Unigram in SentencePiece's form; returns None for others.
        """
        decoder = json.dumps(json.loads(self.definition).get("decoder"))
        if '"ByteLevel"' in decoder:
            of_token: Callable[[str], int] = len  # each character stands for a byte (Radford et al. 2019, GPT-2)
        elif '"Metaspace"' in decoder or '"ByteFallback"' in decoder:
            of_token = _sentencepiece_bytes
        else:
            return None
        added = self.library.get_added_tokens_decoder()
        lengths = [0] * self.vocab_size
        for text, number in self.library.get_vocab(with_added_tokens=True).items():
            if number not in added:
                lengths[number] = of_token(text)
            elif not added[number].special:
                lengths[number] = len(text.encode())
        return lengths

    def named(self, token: int) -> str:
        """Return a token as text with its id: '<|im_end|>' (151645)."""
        return f"{self.library.id_to_token(token)!r} ({token})"

    @property
    def usual_end_of_text(self) -> int | None:
        """Id of the first special token with a usual name for the end of a text; None if there is none."""
        return next(map(self.library.token_to_id, _usual_ends(self.library)), None)

    @property
    def begin_of_text(self) -> int | None:
        """Id of the special token that this tokenizer puts before a text; None if there is none."""
        text = "a"
        with_special = self.library.encode(text, add_special_tokens=True).ids
        own = self.encode(text)
        return with_special[0] if own and with_special[0] != own[0] else None

    @property
    def sha256(self) -> str:
        """Hash of tokenizer.json; tokenizers with equal hashes encode alike."""
        return hashlib.sha256(self.definition).hexdigest()

    def with_settings(self, context: int, pad_token: int | None) -> Tokenizer:
        """Return a copy with a model's context length and padding token."""
        settings = {**json.loads(self.config), "model_max_length": context}
        if pad_token is not None:
            settings["pad_token"] = self.library.id_to_token(pad_token)
        return replace(self, config=_as_json(settings), pad_token=pad_token)

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` and AutoTokenizer read."""
        for name, content in ((TOKENIZER_CONFIG_FILE, self.config), (TOKENIZER_FILE, self.definition)):
            write_atomic(folder / name, content)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a tokenizer.json, its folder, or the Hugging Face Hub by name.

    The end-of-text token is `eos_token` in tokenizer_config.json or special_tokens_map.json, else a special token with
    a usual name.

    Raises:
        DataError: the tokenizer is missing or unreadable, or its end-of-text token is not in its vocabulary.
    """
    file = from_hub(path, TOKENIZER_FILES, DataError)
    try:
        file = file / TOKENIZER_FILE if is_folder(file) else file
        definition = read_file(file)
        library, vocab_size = _parse(definition)
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            lfs_pointer_hint(file)
            or f"tokenizers {tokenizers.__version__} cannot read a tokenizer here "
            f"({getattr(error, 'strerror', None) or error}). Give the folder or the tokenizer.json of a Hugging Face "
            "fast tokenizer (transformers converts a tokenizer.model), or let `pretrain prepare` train one",
            path=file,
        ) from error
    config = _read_object(file.parent / TOKENIZER_CONFIG_FILE)
    special_tokens = _read_object(file.parent / "special_tokens_map.json")
    name = _token_name(config, "eos_token") or _token_name(special_tokens, "eos_token")
    if name is None:
        name = next(iter(_usual_ends(library)), None)
    if name is not None and library.token_to_id(name) is None:
        raise DataError(
            f"eos_token {name!r} is not in the vocabulary of {file.name}: the files belong to different tokenizers. "
            "Download the tokenizer again",
            path=file.parent,
        )
    padding = _token_name(config, "pad_token") or _token_name(special_tokens, "pad_token")
    tokenizer = _make_tokenizer(library, vocab_size, definition, config, name)
    return tokenizer if padding is None else replace(tokenizer, pad_token=library.token_to_id(padding))


def _usual_ends(library: tokenizers.Tokenizer) -> list[str]:
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    return [usual for usual in _USUAL_END_OF_TEXT if usual in special]


@functools.lru_cache(maxsize=1)
def _parse(definition: bytes) -> tuple[tokenizers.Tokenizer, int]:
    """Return the library's tokenizer and its `vocab_size`; cached, because commands load it several times."""
    library = tokenizers.Tokenizer.from_str(definition.decode("utf-8"))
    return library, _vocab_size(library)


def _vocab_size(library: tokenizers.Tokenizer) -> int:
    """Return the largest id plus one, not the number of entries: ids may have gaps."""
    return max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def load_fitting_tokenizer(path: str | Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer as `load_tokenizer` does; raise a ConfigError if it does not fit the model's vocabulary."""
    tokenizer = load_tokenizer(path)
    if not tokenizer.fits(vocab_size):
        raise ConfigError(
            f"--tokenizer_path={path} has {tokenizer.vocab_size} entries, but the model has {vocab_size}: give the "
            f"tokenizer that encoded the data, or train with --vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def _sentencepiece_bytes(token: str) -> int:
    """Count the bytes of a SentencePiece token: `\u2581` is a space, `<0x0A>` one byte."""
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return 1 if is_byte else len(token.replace("\u2581", " ").encode())


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. The same texts give the same tokenizer on any number of threads.

    `vocab_size` includes the end-of-text token and 256 bytes; a small text gives fewer entries.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(iter(texts), trainer)
    return _make_tokenizer(library, _vocab_size(library), library.to_str(pretty=True).encode("utf-8"), {}, END_OF_TEXT)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turn a panic of the library into a DataError. A regular expression in tokenizer.json may fail on a text."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the tokenizer fails on a text ({error}): use another tokenizer, or remove the text") from None


@contextmanager
def library_threads(enabled: bool) -> Iterator[None]:
    """Let the library use all cores, or only the calling thread, through its environment variable."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if enabled else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _make_tokenizer(
    library: tokenizers.Tokenizer, vocab_size: int, definition: bytes, config: dict[str, Any], end_of_text: str | None
) -> Tokenizer:
    """Disable truncation, padding and special tokens, whatever the file says, and complete the config."""
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    if "tokenizer_class" not in config:
        config = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if end_of_text is not None and "eos_token" not in config:
        config = {**config, "eos_token": end_of_text}
    return Tokenizer(
        library=library,
        definition=definition,
        config=_as_json(config),
        end_of_text=None if end_of_text is None else library.token_to_id(end_of_text),
        vocab_size=vocab_size,
    )


def _as_json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; {} if there is no file."""
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it has no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problem = lfs_pointer_hint(path) or f"is not valid JSON ({error}): fix or remove the file"
        raise DataError(problem, path=path) from error
    return content


def _token_name(config: dict[str, Any], name: str) -> str | None:
    """Return a special token of a Hugging Face file: a string, or the `content` of an object."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
