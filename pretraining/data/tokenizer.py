"""Text to token ids and back, over the `tokenizers` library.

A tokenizer is a folder (or the `tokenizer.json` in it) as Hugging Face tools write and read them; `train_tokenizer`
makes one from text: byte-level BPE, as GPT-2's, so that any text can be encoded and decoding gives it back exactly. The
end-of-text token of a trained tokenizer has id 0.

Text is only ever text here: where a document spells a special token (`<|endoftext|>` in an article about language
models), it is encoded as the characters that it is made of, and nothing (no beginning-of-text token) is added to it.
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
from pretraining.files import from_hub, is_folder, read_file, read_json, write_atomic

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json")
"""What is fetched of a tokenizer on the Hub."""
_USUAL_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""What the end of a document is called where a lone tokenizer.json comes without the files that say so."""


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text.

    Attributes:
        definition, config: content of its tokenizer.json and tokenizer_config.json.
        end_of_text: id of the token that ends a document.
        pad_token: id of the token that fills up rows of a batch, where the tokenizer has one.
        vocab_size: largest id plus one: the rows that an embedding needs.
    """

    library: tokenizers.Tokenizer
    definition: bytes
    config: bytes
    end_of_text: int | None
    vocab_size: int
    pad_token: int | None = None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens; a DataError where it cannot be encoded."""
        with _panics_refused():
            return self.library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, on all cores (see `library_threads`); a DataError where one cannot be encoded."""
        with _panics_refused():
            return [encoding.ids for encoding in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens included. Byte sequences that are not UTF-8 show as U+FFFD."""
        return self.library.decode(list(ids), skip_special_tokens=False)

    def byte_lengths(self) -> list[int] | None:
        """Bytes of text that each id stands for, in UTF-8: 0 for special tokens and for ids that are none.

        Of byte-level BPE and of BPE and Unigram in SentencePiece's form; None for others, whose tokens do not say.
        """
        decoder = json.dumps(json.loads(self.definition).get("decoder"))
        if '"ByteLevel"' in decoder:
            of_token: Callable[[str], int] = len  # each character stands for a byte (Radford et al. 2019, GPT-2)
        elif '"Metaspace"' in decoder or '"ByteFallback"' in decoder:
            of_token = _bytes_of_sentencepiece
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

    @property
    def begin_of_text(self) -> int | None:
        """Id of the token that this tokenizer puts before a text where special tokens are asked for, if it does."""
        text = "a"
        with_special = self.library.encode(text, add_special_tokens=True).ids
        own = self.encode(text)
        return with_special[0] if own and with_special[0] != own[0] else None

    @property
    def sha256(self) -> str:
        """Hash of tokenizer.json: two tokenizers with the same one encode alike."""
        return hashlib.sha256(self.definition).hexdigest()

    def with_settings(self, context: int, pad_token: int | None) -> Tokenizer:
        """Return the same tokenizer for a model: how many tokens it takes at once, and which one fills up rows."""
        settings = {**json.loads(self.config), "model_max_length": context}
        if pad_token is not None:
            settings["pad_token"] = self.library.id_to_token(pad_token)
        return replace(self, config=_as_json(settings), pad_token=pad_token)

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` and AutoTokenizer read into a folder."""
        for name, content in ((TOKENIZER_CONFIG_FILE, self.config), (TOKENIZER_FILE, self.definition)):
            write_atomic(folder / name, content)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a tokenizer.json, the folder that holds it, or the Hugging Face Hub by name.

    The end-of-text token is the `eos_token` of the tokenizer_config.json or special_tokens_map.json beside it, else a
    special token with a usual name.

    Raises:
        DataError: there is no tokenizer, it cannot be read, or its end-of-text token is not in its vocabulary.
    """
    file = from_hub(path, TOKENIZER_FILES, DataError)
    try:
        file = file / TOKENIZER_FILE if is_folder(file) else file
        definition = read_file(file)
        library, vocab_size = _parse(definition)
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"there is no tokenizer that the tokenizers library {tokenizers.__version__} can read "
            f"({getattr(error, 'strerror', None) or error}). Give the folder or the tokenizer.json of a Hugging Face "
            "fast tokenizer (transformers saves one of a tokenizer.model), or let `pretrain prepare` train one",
            path=file,
        ) from error
    config = _read_object(file.parent / TOKENIZER_CONFIG_FILE)
    special_tokens = _read_object(file.parent / "special_tokens_map.json")
    name = _token_name(config, "eos_token") or _token_name(special_tokens, "eos_token")
    if name is None:
        special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
        name = next((usual for usual in _USUAL_END_OF_TEXT if usual in special), None)
    if name is not None and library.token_to_id(name) is None:
        raise DataError(
            f"eos_token {name!r} is not in the vocabulary of {file.name}. The two files are not of one tokenizer: "
            "fetch it again",
            path=file.parent,
        )
    padding = _token_name(config, "pad_token") or _token_name(special_tokens, "pad_token")
    tokenizer = _wrap(library, vocab_size, definition, config, name)
    return tokenizer if padding is None else replace(tokenizer, pad_token=library.token_to_id(padding))


@functools.lru_cache(maxsize=1)
def _parse(definition: bytes) -> tuple[tokenizers.Tokenizer, int]:
    """Return what a tokenizer.json says, and its `vocab_size`; kept, since a command loads it from several places."""
    library = tokenizers.Tokenizer.from_str(definition.decode("utf-8"))
    return library, _vocab_size(library)


def _vocab_size(library: tokenizers.Tokenizer) -> int:
    """Return the largest id plus one, not the number of entries: ids may have gaps."""
    return max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def load_fitting_tokenizer(path: str | Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer as `load_tokenizer`; a ConfigError where it has more entries than the model's vocabulary."""
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"--tokenizer_path={path} has {tokenizer.vocab_size} entries, more than the model's {vocab_size}: give "
            f"--vocab_size={tokenizer.vocab_size} or more, or the tokenizer that made the data."
        )
    return tokenizer


def _bytes_of_sentencepiece(token: str) -> int:
    """Count the bytes of a token in which `\u2581` stands for a space, `<0x0A>` for the byte of this value."""
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return 1 if is_byte else len(token.replace("\u2581", " ").encode())


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. The same texts give the same tokenizer, on any number of threads.

    `vocab_size` counts the end-of-text token and 256 bytes; a small text gives fewer entries.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(iter(texts), trainer)
    return _wrap(library, _vocab_size(library), library.to_str(pretty=True).encode("utf-8"), {}, END_OF_TEXT)


@contextmanager
def _panics_refused() -> Iterator[None]:
    """Turn a panic of the library into an error; a regular expression of tokenizer.json may give up on a text."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"the tokenizer fails on a text ({error}): take another tokenizer, or leave the text out"
        ) from None


@contextmanager
def library_threads(enabled: bool) -> Iterator[None]:
    """Let the library use all cores inside one call, or only the calling thread, by its environment variable."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if enabled else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _wrap(
    library: tokenizers.Tokenizer, vocab_size: int, definition: bytes, config: dict[str, Any], end_of_text: str | None
) -> Tokenizer:
    """Put the library's tokenizer into the state that this module promises, whatever its file says."""
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
    """Return a JSON object from a file; empty where there is no file."""
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read as JSON ({error}). Mend it, or remove it to go without", path=path) from error
    return content


def _token_name(config: dict[str, Any], name: str) -> str | None:
    """Return a special token in a Hugging Face file, which is a string or an object with the string in it."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
