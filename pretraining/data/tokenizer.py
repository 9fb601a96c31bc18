"""Tokenizers: text to token ids and back, with the `tokenizers` library. This module alone reads their files.

    folder, tokenizer.json, their address, Hub name --load_tokenizer--> Tokenizer -> ids, text, special tokens, template
                                                                                  -> save: the same files elsewhere

A tokenizer is a folder in the Hugging Face layout, or the `tokenizer.json` in it. `prepare`, a run, `sample` and
`export` ask a `Tokenizer` for everything they need to know. It keeps all files that AutoTokenizer reads: they travel
whole from an imported model through prepared data to the export. The folder may be a stranger's: sizes are bounded, and
a link that leads out of it is refused.

Encoding adds no special tokens. In data, it finds none either: `<|endoftext|>` in an article about language models is
encoded as its characters. In prompts and chats, names of special tokens become their ids. The same text always gives
the same ids: dropout of a BPE is off.

`train_tokenizer` makes a byte-level BPE as GPT-2's, which encodes any text and decodes it exactly. Its end-of-text
token has id 0.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pretraining.errors import DataError
from pretraining.files import (
    Location,
    check_inside,
    entries_of,
    from_hub,
    is_file,
    is_folder,
    lfs_pointer_hint,
    parse_json,
    read_file,
    write_atomic,
)
from pretraining.object_store import location
from pretraining.text import count_of

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_TEMPLATE_FILE, _TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_KEPT_FILES = (
    *(SPECIAL_TOKENS_FILE, "added_tokens.json", _TEMPLATE_FILE),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)
"""Other files than tokenizer.json and tokenizer_config.json that transformers reads for a class of tokenizers."""
TOKENIZER_FILES = ("tokenizer*.json", *_KEPT_FILES, f"{_TEMPLATE_FOLDER}/*.jinja")
"""Files of a tokenizer to download from the Hub."""
_LARGEST_FILE_BYTES, _LARGEST_TEMPLATE_BYTES, _MOST_TEMPLATES = 2**26, 2**20, 64
_USUAL_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-text token to try if no file names the token."""
_SPACE = "\u2581"
"""Mark of a space in SentencePiece's form."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens with a name in transformers, which a chat template sees."""
IMPLIED = {
    **dict.fromkeys(("GPT2", "CodeGen"), f"{END_OF_TEXT} {END_OF_TEXT} {END_OF_TEXT}"),
    "GPTNeoX": f"{END_OF_TEXT} {END_OF_TEXT} {END_OF_TEXT} - <|padding|>",
    **dict.fromkeys(("Qwen2", "Qwen3_5"), f"- {END_OF_TEXT} {END_OF_TEXT} - {END_OF_TEXT}"),
    **dict.fromkeys(("Llama", "CodeLlama"), "<s> </s> <unk>"),
    "Gemma": "<bos> <eos> <unk> - <pad> - <mask>",
    "Cohere": "<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <UNK> <SEP> <PAD> <CLS> <MASK_TOKEN>",
    **dict.fromkeys(("Roberta", "XLMRoberta", "Nllb"), "<s> </s> <unk> </s> <pad> <s> <mask>"),
    "Bert": "- - [UNK] [SEP] [PAD] [CLS] [MASK]",
    "T5": "- </s> <unk> - <pad>",
    "XGLM": "<s> </s> <unk> </s> <pad> <s>",
}
"""Special tokens of a class of tokenizers in transformers if its files name none, in the order of `SPECIAL_NAMES`."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that encodes and decodes text.

    Attributes:
        definition, config: contents of tokenizer.json and tokenizer_config.json.
        files: contents of its other files, by name.
        path: tokenizer.json that was read; None for a tokenizer that was trained.
        end_of_text: id of the token that ends a document.
        pad_token: id of the padding token.
    """

    library: tokenizers.Tokenizer
    definition: bytes
    config: bytes
    end_of_text: int | None
    pad_token: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    path: Location | None = None

    @functools.cached_property
    def vocab_size(self) -> int:
        """Largest id plus one, the rows that an embedding needs; not the number of entries, since ids may have gaps."""
        return max(self._ids().values(), default=-1) + 1

    def fits(self, rows: int) -> bool:
        """Return whether a model with this many rows can have been trained with this tokenizer.

        Tokens that were added to its vocabulary, such as one for padding, may lie beyond the rows: they count only
        where they occur.
        """
        added = self.added_tokens
        return all(number < rows or token in added for token, number in self._ids().items())

    def encode(self, text: str, *, special_tokens: bool = False, around: bool = False) -> list[int]:
        """Return the token ids of a text; raise a DataError if the tokenizer fails.

        Args:
            special_tokens: whether names of special tokens in the text become their ids.
            around: whether to add the tokens that the tokenizer puts around a text.
        """
        return self.encode_batch([text], special_tokens=special_tokens, around=around)[0]

    def encode_batch(
        self, texts: Sequence[str], *, special_tokens: bool = False, around: bool = False
    ) -> list[list[int]]:
        """Return the token ids of several texts, encoded on all cores (see `library_threads`), as `encode` does."""
        # How the library treats special tokens is an attribute of an instance.
        library = _parse(self.definition, special_tokens=True) if special_tokens else self.library
        with _panics_as_errors():
            return [encoding.ids for encoding in library.encode_batch_fast(list(texts), add_special_tokens=around)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included. Invalid UTF-8 becomes U+FFFD."""
        return self.library.decode(list(ids), skip_special_tokens=False)

    def difference(self, other: Tokenizer) -> str | None:
        """Return how the ids of two tokenizers differ; None if they are equal, or one vocabulary extends the other.

        How a file writes a vocabulary does not count, nor do added tokens, padding and truncation.
        """
        if self.sha256 == other.sha256:
            return None
        kinds = [type(tokenizer.library.model).__name__ for tokenizer in (self, other)]
        if kinds[0] != kinds[1]:
            return f"one is a {kinds[0]}, the other a {kinds[1]}"
        added = self.added_tokens | other.added_tokens
        vocabularies = (self._ids(), other._ids())
        ours, theirs = ({token: n for token, n in ids.items() if token not in added} for ids in vocabularies)
        fewer, more = (ours, theirs) if len(ours) <= len(theirs) else (theirs, ours)
        if wrong := sorted(number for token, number in fewer.items() if more.get(token) != number):
            tokens = " and ".join(repr(tokenizer.library.id_to_token(wrong[0])) for tokenizer in (self, other))
            return f"{count_of(len(wrong), 'token')} differ, the first is {wrong[0]}: {tokens}"
        merges = sorted((self._merges(), other._merges()), key=len)
        if merges[0] != merges[1][: None if len(fewer) == len(more) else len(merges[0])]:
            return "their merges differ"
        return None

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the vocabulary, special ones among them."""
        return {token.content: number for number, token in self.library.get_added_tokens_decoder().items()}

    def _ids(self) -> dict[str, int]:
        return self.library.get_vocab(with_added_tokens=True)

    def _merges(self) -> list[tuple[str, ...]]:
        merges = json.loads(self.definition)["model"].get("merges") or []
        return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]

    @functools.cached_property
    def _sample(self) -> str:
        """A text that has tokens: a vocabulary of words or of DNA may have no letter."""
        for text in ("a", *self.library.get_vocab(with_added_tokens=False)):
            with suppress(Exception):
                if self.library.encode(text, add_special_tokens=False).ids:
                    return text
        return ""

    def check_added_around(self) -> None:
        """Raise a DataError if a token that the tokenizer puts around a text is not in its vocabulary under this id."""
        around = self.library.encode(self._sample, add_special_tokens=True)
        for text, number, is_special in zip(around.tokens, around.ids, around.special_tokens_mask, strict=True):
            if is_special and self.library.id_to_token(number) != text:
                raise DataError(
                    f"its post_processor puts {text!r} around texts with the id {number}, which its vocabulary of "
                    f"{self.vocab_size} entries has as {self.library.id_to_token(number)!r}: correct or remove it",
                    path=self.path,
                )

    def byte_lengths(self) -> list[int] | None:
        """Return the UTF-8 bytes of text per id: 0 for special tokens and unused ids.

        Supports byte-level BPE, and BPE and Unigram in SentencePiece's form; returns None for others, and for those
        without a token for the mark of a space, whose three bytes then stand for one.
        """
        document = json.loads(self.definition)
        decoder = json.dumps(document.get("decoder"))
        if '"ByteLevel"' in decoder:
            of_token: Callable[[str], int] = len  # each character stands for a byte (Radford et al. 2019, GPT-2)
        elif '"Metaspace"' in decoder or '"ByteFallback"' in decoder:
            splitting = json.dumps([document.get("normalizer"), document.get("pre_tokenizer")], ensure_ascii=False)
            if _SPACE in splitting and self.library.token_to_id(_SPACE) is None:
                return None
            of_token = _sentencepiece_bytes
        else:
            return None
        added = self.library.get_added_tokens_decoder()
        lengths = [0] * self.vocab_size
        for text, number in self._ids().items():
            if number not in added:
                lengths[number] = of_token(text)
            elif not added[number].special:
                lengths[number] = len(text.encode())
        return lengths

    def named(self, token: int) -> str:
        """Return a token as text with its id: '<|im_end|>' (151645)."""
        return f"{self.library.id_to_token(token)!r} ({token})"

    @property
    def begin_of_text(self) -> int | None:
        """Id of the special token that this tokenizer puts before a text; None if there is none."""
        return next(iter(self.around[0]), None)

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """Ids of the special tokens that this tokenizer puts before and after a text."""
        encoded = self.library.encode(self._sample, add_special_tokens=True)
        own = [index for index, is_added in enumerate(encoded.special_tokens_mask) if not is_added]
        return (encoded.ids[: own[0]], encoded.ids[own[-1] + 1 :]) if own else ([], [])

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens by name (`SPECIAL_NAMES`), as transformers knows them."""
        special_tokens = parse_json(self.files.get(SPECIAL_TOKENS_FILE, b"{}"))
        return _named_tokens(json.loads(self.config), special_tokens, self.library)

    @property
    def special_names(self) -> list[str]:
        """Texts of all special tokens, which become ids in prompts and chats."""
        return [token.content for token in self.library.get_added_tokens_decoder().values() if token.special]

    @property
    def unknown_token(self) -> int | None:
        """Id of the token for what is not in the vocabulary; None = it is dropped, or an error of the library."""
        model = json.loads(self.definition)["model"]
        unknown = model.get("unk_id")
        return self.library.token_to_id(model.get("unk_token") or "") if unknown is None else unknown

    @property
    def encodes_all(self) -> bool:
        """Whether the tokenizer encodes any text, if needed byte by byte."""
        document = json.loads(self.definition)
        is_of_bytes = '"ByteLevel"' in json.dumps([document.get("normalizer"), document.get("pre_tokenizer")])
        is_of_parts = document["model"].get("type", "BPE") in ("BPE", "Unigram")
        needed = pre_tokenizers.ByteLevel.alphabet() if is_of_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
        has_all = all(self.library.token_to_id(token) is not None for token in needed)
        return has_all and is_of_parts and (is_of_bytes or bool(document["model"].get("byte_fallback")))

    def drops(self, character: str) -> bool:
        """Return whether the model has no tokens for a character, or for a part of it."""
        library = self.library
        text = character if library.normalizer is None else library.normalizer.normalize_str(character)
        words = [(text, (0, 1))] if library.pre_tokenizer is None else library.pre_tokenizer.pre_tokenize_str(text)
        offsets = [token.offsets for word, _ in words for token in library.model.tokenize(word)]
        covered = sum(int(end - begin) for begin, end in offsets)
        return covered < sum(len(word.encode()) for word, _ in words)

    @property
    def chat_template(self) -> str | None:
        """The template that `apply_chat_template` of transformers uses by default; None if there is none."""
        named = {
            "default" if name == _TEMPLATE_FILE else Path(name).stem: io.StringIO(content.decode(), newline=None).read()
            for name, content in self.files.items()
            if name == _TEMPLATE_FILE or name.startswith(_TEMPLATE_FOLDER)
        }
        templates = named or json.loads(self.config).get("chat_template")
        if isinstance(templates, list):
            templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        template = templates.get("default") if isinstance(templates, dict) else templates
        return template if isinstance(template, str) else None

    @property
    def definition_without_dropout(self) -> bytes:
        """Content of a tokenizer.json that always gives the same ids, as this tokenizer does."""
        if not re.search(rb'"dropout"\s*:\s*[0-9]', self.definition):
            return self.definition
        document = json.loads(self.definition)
        document["model"]["dropout"] = None
        return json.dumps(document, ensure_ascii=False).encode("utf-8")

    @property
    def sha256(self) -> str:
        """Hash of tokenizer.json; tokenizers with equal hashes encode alike."""
        return hashlib.sha256(self.definition).hexdigest()

    def with_settings(self, context: int, pad_token: int | None) -> Tokenizer:
        """Return a copy for an export, with a model's context length and padding token, and without dropout."""
        settings, files = {**json.loads(self.config), "model_max_length": context}, dict(self.files)
        if pad_token not in (None, self.pad_token):
            settings["pad_token"] = self.library.id_to_token(pad_token)
            special_tokens = parse_json(files.get(SPECIAL_TOKENS_FILE, b"{}"))
            if "pad_token" in special_tokens:
                files[SPECIAL_TOKENS_FILE] = _as_json({**special_tokens, "pad_token": settings["pad_token"]})
        definition = self.definition_without_dropout
        return replace(self, definition=definition, config=_as_json(settings), pad_token=pad_token, files=files)

    def contents(self) -> dict[str, bytes]:
        """Return the contents of all files by name; tokenizer.json, the last one, completes the others."""
        return {**self.files, TOKENIZER_CONFIG_FILE: self.config, TOKENIZER_FILE: self.definition}

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` and AutoTokenizer read."""
        for name, content in self.contents().items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_atomic(folder / name, content)


def load_tokenizer(path: str | Location) -> Tokenizer:
    """Read a tokenizer from a tokenizer.json, its folder, on a disk or in a store, or the Hugging Face Hub by name.

    The end-of-text token is `eos_token` in tokenizer_config.json or special_tokens_map.json, else a special token with
    a usual name.

    Raises:
        DataError: the tokenizer is missing or unreadable, a link leads out of its folder, or its end-of-text token is
            not in its vocabulary.
    """
    file = location(path) if isinstance(path, str) else path
    if isinstance(file, Path):
        file = from_hub(path if isinstance(path, str) else file, TOKENIZER_FILES, DataError)
    if is_folder(file):
        check_inside(file, TOKENIZER_FILE, DataError)
        file = file / TOKENIZER_FILE
    try:
        definition = read_file(file)
        library = _parse(definition, special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            lfs_pointer_hint(file)
            or f"tokenizers {tokenizers.__version__} cannot read a tokenizer here "
            f"({getattr(error, 'strerror', None) or error}). Give the folder or the tokenizer.json of a Hugging Face "
            "fast tokenizer (transformers converts a tokenizer.model), or let `pretrain prepare` train one",
            path=file,
        ) from error
    files = _read_files(file.parent)
    config = _object_in(files.pop(TOKENIZER_CONFIG_FILE, b"{}"), file.parent / TOKENIZER_CONFIG_FILE)
    special_tokens = _object_in(files.get(SPECIAL_TOKENS_FILE, b"{}"), file.parent / SPECIAL_TOKENS_FILE)
    named = _named_tokens(config, special_tokens, library)
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    name = named.get("eos_token") or next((usual for usual in _USUAL_END_OF_TEXT if usual in special), None)
    if name is not None and library.token_to_id(name) is None:
        raise DataError(
            f"eos_token {name!r} is not in the vocabulary of {file.name}: the files belong to different tokenizers. "
            "Download the tokenizer again",
            path=file.parent,
        )
    padding = library.token_to_id(named["pad_token"]) if "pad_token" in named else None
    return replace(_make_tokenizer(library, definition, config, name), pad_token=padding, files=files, path=file)


def _read_files(folder: Location) -> dict[str, bytes]:
    """Return the contents of the other files in the folder of a tokenizer.json, by name."""
    templates, names = folder / _TEMPLATE_FOLDER, [TOKENIZER_CONFIG_FILE, *_KEPT_FILES]
    if is_folder(templates):
        check_inside(folder, _TEMPLATE_FOLDER, DataError)
        named = sorted(entry.name for entry in entries_of(templates) if entry.name.endswith(".jinja"))
        if len(named) > _MOST_TEMPLATES:
            raise DataError(f"has more than {_MOST_TEMPLATES} chat templates: remove some", path=templates)
        names += [f"{_TEMPLATE_FOLDER}/{name}" for name in named]
    contents = {}
    for name in names:
        if not is_file(folder / name):
            continue
        check_inside(folder, name, DataError)
        try:
            is_template = name.endswith(".jinja")
            contents[name] = read_file(folder / name, _LARGEST_TEMPLATE_BYTES if is_template else _LARGEST_FILE_BYTES)
            if is_template:
                contents[name].decode()
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {error}. Fix or remove the file", path=folder / name) from error
    return contents


@functools.lru_cache(maxsize=2)
def _parse(definition: bytes, *, special_tokens: bool) -> tokenizers.Tokenizer:
    """Return the library's tokenizer; cached, because commands load it several times.

    Args:
        special_tokens: whether names of special tokens in a text become their ids.
    """
    library = tokenizers.Tokenizer.from_str(definition.decode("utf-8"))
    library.encode_special_tokens = not special_tokens  # the library means: as text
    library.no_truncation()  # whatever the file says
    library.no_padding()
    if isinstance(library.model, models.BPE):
        library.model.dropout = None
    return library


def _sentencepiece_bytes(token: str) -> int:
    """Count the bytes of a SentencePiece token: `\u2581` is a space, `<0x0A>` one byte."""
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return 1 if is_byte else len(token.replace(_SPACE, " ").encode())


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
    library.encode_special_tokens = True
    return _make_tokenizer(library, library.to_str(pretty=True).encode("utf-8"), {}, END_OF_TEXT)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turn a failure of the library at a text into a DataError: a panic, or an error of the vocabulary."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class cannot be imported
        if type(error) is not Exception and type(error).__name__ != "PanicException":
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
    library: tokenizers.Tokenizer, definition: bytes, config: dict[str, Any], end_of_text: str | None
) -> Tokenizer:
    """Complete the config."""
    if "tokenizer_class" not in config:
        config = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if end_of_text is not None and "eos_token" not in config:
        config = {**config, "eos_token": end_of_text}
    number = None if end_of_text is None else library.token_to_id(end_of_text)
    return Tokenizer(library, definition, _as_json(config), end_of_text=number)


def _as_json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _object_in(content: bytes, path: Location) -> dict[str, Any]:
    """Return the JSON object in the content of a file."""
    try:
        document = parse_json(content)
        if not isinstance(document, dict):
            raise ValueError("it has no object")
    except ValueError as error:
        problem = lfs_pointer_hint(path) or f"is not valid JSON ({error}): fix or remove the file"
        raise DataError(problem, path=path) from error
    return document


def _named_tokens(
    config: Mapping[str, Any], special_tokens: Mapping[str, Any], library: tokenizers.Tokenizer
) -> dict[str, str]:
    """Return the special tokens by name: those that the files give, else those of the class in the vocabulary.

    A null gives no token. special_tokens_map.json counts less if the config lists its added tokens.
    """
    first, second = (special_tokens, config) if "added_tokens_decoder" in config else (config, special_tokens)
    kind = str(config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    implied = zip(SPECIAL_NAMES, IMPLIED.get(kind, "").split(), strict=False)
    known = {name: token for name, token in implied if token != "-" and library.token_to_id(token) is not None}
    found = {**known, **first, **second}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if name in SPECIAL_NAMES and isinstance(text, str)}
