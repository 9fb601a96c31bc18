"""Training, loading and using a tokenizer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from pretraining.data.tokenizer import (
    END_OF_TEXT,
    IMPLIED,
    SPECIAL_NAMES,
    Tokenizer,
    library_threads,
    load_tokenizer,
    train_tokenizer,
)
from pretraining.errors import DataError

TEXTS = ["def add(a, b):\n    return a + b\n" * 20, "The quick brown fox jumps over the lazy dog.\n" * 20]
TRAINED = train_tokenizer(TEXTS, 300)


def write_word_tokenizer(folder: Path, vocabulary: dict[str, int], special: list[str]) -> None:
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(library.to_str())


@given(st.text())
@example(f"a{END_OF_TEXT}b")
def test_decoding_gives_any_text_back_and_a_special_token_spelt_in_it_is_text(text: str) -> None:
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text and 0 not in ids


def test_training_gives_the_same_bytes_on_any_number_of_threads() -> None:
    with library_threads(False):
        alone = train_tokenizer(iter(TEXTS), 300)
    with library_threads(True):
        together = train_tokenizer(iter(TEXTS), 300)
    assert alone.definition == together.definition == TRAINED.definition


def test_saved_and_loaded_it_is_the_same_tokenizer(tmp_path: Path) -> None:
    TRAINED.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        loaded = load_tokenizer(path)
        assert (loaded.sha256, loaded.config) == (TRAINED.sha256, TRAINED.config)
        assert (loaded.end_of_text, loaded.vocab_size) == (0, 300)
        assert loaded.encode(TEXTS[0]) == TRAINED.encode(TEXTS[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "stop"}),
        ("tokenizer_config.json", {"eos_token": {"content": "stop", "lstrip": False}}),
        ("special_tokens_map.json", {"eos_token": "stop"}),
    ],
)
def test_the_end_of_text_is_that_of_the_folder(tmp_path: Path, name: str, content: dict[str, object]) -> None:
    write_word_tokenizer(tmp_path, {"?": 0, "a": 1, "stop": 2, "</s>": 3}, ["</s>"])
    (tmp_path / name).write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    assert loaded.end_of_text == 2
    (tmp_path / "copy").mkdir()
    loaded.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").end_of_text == 2


def test_a_tokenizer_file_alone_gives_its_end_of_text_and_its_vocabulary(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path / "llama", {"?": 0, "a": 1, "</s>": 2}, ["</s>"])
    assert load_tokenizer(tmp_path / "llama").end_of_text == 2
    write_word_tokenizer(tmp_path / "none", {"?": 0, "a": 70_000}, [])
    none = load_tokenizer(tmp_path / "none")
    assert (none.end_of_text, none.vocab_size) == (None, 70_001)


WHOLE = {"tokenizer.json": TRAINED.definition}
OUT = Path("../id_rsa")
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
# contents or links of the folder, the place that the error names, and what it says
REFUSED: list[tuple[Mapping[str, bytes | Path], str, str]] = [
    ({}, "tokenizer.json", ""),
    ({"tokenizer.json": b"{}"}, "tokenizer.json", ""),
    ({"tokenizer.model": b"of SentencePiece"}, "tokenizer.json", ""),
    (WHOLE | {"tokenizer_config.json": b"{"}, "tokenizer_config.json", ""),
    (WHOLE | {"tokenizer_config.json": b'{"eos_token": "x!"}'}, "", ""),
    (WHOLE | {"special_tokens_map.json": b"[]"}, "special_tokens_map.json", ""),
    *((WHOLE | {name: OUT}, name, "leads out of its folder, to ") for name in ("vocab.json", TEMPLATE)),
    *((WHOLE | {f"{name}.json": OUT}, f"{name}.json", "out of") for name in ("tokenizer_config", "special_tokens_map")),
    (WHOLE | {TEMPLATES: Path("../elsewhere")}, TEMPLATES, "leads out of its folder"),
    (WHOLE | {TEMPLATE: b"x" * (2**20 + 1)}, TEMPLATE, "cannot be read: it has more than 1,048,576 bytes"),
    (WHOLE | {TEMPLATE: b"\xff"}, TEMPLATE, "invalid start byte"),
    (WHOLE | {f"{TEMPLATES}/{n}.jinja": b"" for n in range(65)}, TEMPLATES, "has more than 64 chat templates: remove"),
]


@pytest.mark.parametrize(("files", "named", "words"), REFUSED, ids=range(len(REFUSED)))
def test_an_unreadable_tokenizer_is_named(
    tmp_path: Path, files: Mapping[str, bytes | Path], named: str, words: str
) -> None:
    (tmp_path / "id_rsa").write_text("{}")
    for folder in ("elsewhere", "model"):
        (tmp_path / folder).mkdir()
    for name, content in files.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else path.symlink_to(content)
    with pytest.raises(DataError) as raised:
        load_tokenizer(tmp_path / "model")
    assert raised.value.path == tmp_path / "model" / named and words in str(raised.value)


def test_links_inside_the_folder_and_those_of_the_hubs_cache_are_read(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x/snapshots/1", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    TRAINED.save(blobs)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    (snapshot / "kept").write_text("{{ messages }}")
    (snapshot / TEMPLATE).symlink_to("kept")
    loaded = load_tokenizer(snapshot)
    assert (loaded.sha256, loaded.chat_template) == (TRAINED.sha256, "{{ messages }}")


def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes() -> None:
    lengths = TRAINED.byte_lengths()
    assert lengths is not None and lengths[0] == 0 and len(lengths) == TRAINED.vocab_size
    for text in TEXTS:
        assert sum(lengths[number] for number in TRAINED.encode(text)) == len(text.encode())


def test_bytes_of_sentencepiece_tokens_and_of_added_ones(tmp_path: Path) -> None:
    words = ["<s>", "<0xE2>", "\u2581the", "\u00e4", "<0x0>", "\u2581"]
    definition = {
        "model": {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": []},
        "added_tokens": [added(0, "<s>", special=True), added(6, "na\u00efve", special=False)],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert load_tokenizer(tmp_path).byte_lengths() == [0, 1, 4, 2, 5, 1, 6]


@pytest.mark.parametrize("splits", ["normalizer", "pre_tokenizer", None])
@pytest.mark.parametrize("space", ["\u2581", "other"])
def test_a_space_that_is_written_as_the_bytes_of_its_mark_leaves_no_bytes(
    tmp_path: Path, splits: str | None, space: str
) -> None:
    words = ["a", space, *(f"<0x{byte:02X}>" for byte in range(256))]
    steps: dict[str, dict[str, object]] = {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True},
    }
    vocabulary = {word: number for number, word in enumerate(words)}
    definition = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        **({} if splits is None else {splits: steps[splits]}),
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path)
    lengths = tokenizer.byte_lengths()
    assert (lengths is None) == (splits is not None and space == "other")
    assert lengths is None or sum(lengths[token] for token in tokenizer.encode("a a  a")) == 6


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_tokens_without_known_bytes_have_none(tmp_path: Path, decoder: dict[str, object] | None) -> None:
    definition = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert load_tokenizer(tmp_path).byte_lengths() is None


def added(number: int, content: str, special: bool) -> dict[str, object]:
    sides = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **sides}


def test_the_token_that_hugging_face_tools_put_first_is_known() -> None:
    assert TRAINED.begin_of_text is None
    tokenizer = train_tokenizer(["some text"], 260)
    tokenizer.library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer.begin_of_text == 0 and 0 not in tokenizer.encode("some text")


def test_a_name_on_the_hub_is_fetched_if_no_path_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(tmp_path / "cache"))
    write_word_tokenizer(tmp_path / "cache", {"?": 0, "a": 1}, [])
    assert load_tokenizer("someone/words-1.5").vocab_size == 2
    write_word_tokenizer(tmp_path / "someone/words-1.5", {"?": 0, "a": 1, "b": 2}, [])
    assert load_tokenizer("someone/words-1.5").vocab_size == 3


def test_a_regular_expression_that_gives_up_is_an_error() -> None:
    tokenizer = train_tokenizer(["a b"], 300)
    tokenizer.library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match="retry-limit"):
            encode("a" * 100 + "!")


def test_all_files_of_a_tokenizer_travel_whole(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    files = {
        "special_tokens_map.json": b'{"unk_token": "?"}',
        "added_tokens.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "tokenizer.model": bytes(range(256)),
        "vocab.txt": b"a",
    }
    write_word_tokenizer(source, {"?": 0, "a": 1}, [])
    (source / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    (source / "notes.txt").write_text("of the user")
    copy.mkdir()
    load_tokenizer(source).save(copy)
    assert load_tokenizer(copy).files == load_tokenizer(source).files == files
    assert not (copy / "notes.txt").exists()


CONFIG = "tokenizer_config.json"
ONE = {"chat_template": "a"}
NAMED = [{"name": "default", "template": "a"}, {"name": "b", "template": "b"}]


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({CONFIG: ONE}, "a"),
        ({CONFIG: {"chat_template": NAMED}}, "a"),
        ({CONFIG: {"chat_template": NAMED[1:]}}, None),
        ({CONFIG: ONE, TEMPLATE: "j\r\n"}, "j\n"),
        ({CONFIG: ONE, f"{TEMPLATES}/rag.jinja": "r"}, None),
        ({TEMPLATE: "j", f"{TEMPLATES}/default.jinja": "d"}, "d"),
        ({"chat_template.json": {"chat_template": "p"}}, None),  # of a processor of images
    ],
)
def test_the_chat_template_is_that_of_transformers(
    tmp_path: Path, files: dict[str, object], template: str | None
) -> None:
    TRAINED.save(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps({"eos_token": END_OF_TEXT, **dict(content)})  # type: ignore[call-overload]
        (tmp_path / name).write_bytes(text.encode())
    assert load_tokenizer(tmp_path).chat_template == template
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert (loaded.get("default") if isinstance(loaded, dict) else loaded) == template


def test_names_of_special_tokens_are_text_in_data_and_ids_in_prompts() -> None:
    text = f"a{END_OF_TEXT}b"
    ids = TRAINED.encode(text, special_tokens=True)
    assert ids == [*TRAINED.encode("a"), 0, *TRAINED.encode("b")]
    assert TRAINED.encode_batch([text], special_tokens=True) == [ids]
    assert 0 not in TRAINED.encode(text)


def test_texts_are_never_cut_padded_or_dropped_out_and_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(TRAINED.definition.decode())
    library.enable_truncation(4)
    library.enable_padding(length=8)
    document = json.loads(library.to_str())
    document["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    loaded = load_tokenizer(tmp_path)
    for special_tokens in (False, True):
        texts = ["a", *[TEXTS[0]] * 5]
        assert loaded.encode_batch(texts, special_tokens=special_tokens) == TRAINED.encode_batch(texts)
    assert loaded.definition == (tmp_path / "tokenizer.json").read_bytes()
    assert json.loads(loaded.definition_without_dropout)["model"]["dropout"] is None
    assert TRAINED.definition_without_dropout == TRAINED.definition


def test_names_of_special_tokens_are_those_that_transformers_knows(tmp_path: Path) -> None:
    load = pytest.importorskip("transformers").AutoTokenizer.from_pretrained
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"content": "<|endoftext|>"}, "eos_token": "a"}
    (tmp_path / "tokenizer.json").write_bytes(TRAINED.definition)
    extras: list[tuple[dict[str, object], str]] = [({}, "b"), ({"added_tokens_decoder": {}}, "a")]
    for extra, eos in extras:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": END_OF_TEXT, **extra}))
        (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "b", "unk_token": null}')
        expected = {"bos_token": END_OF_TEXT, "eos_token": eos}
        assert load_tokenizer(tmp_path).special_tokens == load(tmp_path).special_tokens_map == expected


CLASSES = sorted(IMPLIED)


@pytest.mark.parametrize("name", CLASSES)
def test_special_tokens_that_a_class_implies_are_those_of_transformers(name: str) -> None:
    kind = getattr(pytest.importorskip("transformers"), f"{name}Tokenizer")
    defaults = {key: each.default for key, each in inspect.signature(kind).parameters.items() if key in SPECIAL_NAMES}
    pairs = zip(SPECIAL_NAMES, IMPLIED[name].split(), strict=False)
    named = {key: None if token == "-" else token for key, token in pairs}
    assert {**dict.fromkeys(SPECIAL_NAMES), **named} == {**dict.fromkeys(SPECIAL_NAMES), **defaults}


@pytest.mark.parametrize("name", ["GPT2", "GPTNeoX", "Qwen2"])
@pytest.mark.parametrize("suffix", ["Tokenizer", "TokenizerFast"])
@pytest.mark.parametrize("given", [{}, {"bos_token": None, "pad_token": "a"}, {"eos_token": "b", "unk_token": None}])
def test_a_folder_without_entries_has_the_special_tokens_of_its_class(
    tmp_path: Path, name: str, suffix: str, given: dict[str, str | None]
) -> None:
    library = tokenizers.Tokenizer.from_str(TRAINED.definition.decode())
    library.add_special_tokens(["<|padding|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / CONFIG).write_text(json.dumps({"tokenizer_class": f"{name}{suffix}", **given}))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.end_of_text, ours.pad_token) == (theirs.eos_token_id, theirs.pad_token_id)
    (tmp_path / "copy").mkdir()
    ours.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").special_tokens == ours.special_tokens


def test_a_token_that_a_class_implies_counts_only_if_the_vocabulary_has_it(tmp_path: Path) -> None:
    for name, expected in (("GPTNeoX", {"bos_token", "eos_token", "unk_token"}), ("Llama", {"eos_token"})):
        TRAINED.save(tmp_path)  # without <|padding|> and <s>; its end of text has a usual name
        (tmp_path / CONFIG).write_text(json.dumps({"tokenizer_class": f"{name}Tokenizer"}))
        assert load_tokenizer(tmp_path).special_tokens == dict.fromkeys(expected, END_OF_TEXT)


Change = Callable[[dict[str, Any]], object]
WORDS = ["<unk>", "a", "b", "ab", "c"]
VOCABULARY = {word: number for number, word in enumerate(WORDS)}
KINDS = {
    "BPE": models.BPE(VOCABULARY, [("a", "b")], unk_token="<unk>"),
    "Unigram": models.Unigram([(word, -float(number)) for number, word in enumerate(WORDS)], unk_id=0),
    "WordLevel": models.WordLevel(VOCABULARY, unk_token="<unk>"),
    "WordPiece": models.WordPiece(VOCABULARY, unk_token="<unk>"),
}


def written(folder: Path, kind: str, change: Change = lambda document: None) -> Tokenizer:
    library = tokenizers.Tokenizer(KINDS[kind])
    library.add_special_tokens(["<s>"])
    document = json.loads(library.to_str())
    change(document)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document, indent=len(folder.name)))
    return load_tokenizer(folder)


def set_vocabulary(document: dict[str, Any], words: list[str]) -> None:
    """Give the words their numbers in this order."""
    is_list = document["model"]["type"] == "Unigram"
    document["model"]["vocab"] = [[word, -1.0] for word in words] if is_list else {w: n for n, w in enumerate(words)}


def merges_as_text(document: dict[str, Any]) -> None:
    if "merges" in document["model"]:
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]


def entries_in_another_order(document: dict[str, Any]) -> None:
    if isinstance(document["model"]["vocab"], dict):
        document["model"]["vocab"] = dict(reversed(document["model"]["vocab"].items()))


def another_added_token(document: dict[str, Any]) -> None:
    document["added_tokens"].append({**document["added_tokens"][0], "id": 6, "content": "<pad>"})


def added_token_in_the_vocabulary(document: dict[str, Any]) -> None:
    set_vocabulary(document, [*WORDS, "<s>"])


def larger(document: dict[str, Any]) -> None:
    set_vocabulary(document, [*WORDS, "<s>", "abc"])
    if "merges" in document["model"]:
        document["model"]["merges"].append(["ab", "c"])


def other_words(*words: str) -> Change:
    return lambda document: set_vocabulary(document, ["<unk>", *words])


# changes, and whether ids mean something else after them
CHANGES: list[tuple[Change, bool]] = [
    (merges_as_text, False),
    (entries_in_another_order, False),
    (another_added_token, False),
    (added_token_in_the_vocabulary, False),
    (larger, False),
    (other_words("b", "a", "ab", "c"), True),
    (other_words("a", "b", "ab", "d", "c"), True),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("change", "is_other"), CHANGES, ids=range(len(CHANGES)))
def test_other_tokens_are_a_difference_and_other_forms_none(
    tmp_path: Path, kind: str, change: Change, is_other: bool
) -> None:
    before, after = written(tmp_path / "before", kind), written(tmp_path / "after", kind, change)
    assert before.sha256 != after.sha256
    for found in (before.difference(after), after.difference(before)):
        assert "the first is " in (found or "") if is_other else found is None


def test_other_merges_and_other_kinds_are_a_difference(tmp_path: Path) -> None:
    before = written(tmp_path / "before", "BPE")
    after = written(tmp_path / "after", "BPE", lambda document: document["model"].update(merges=[]))
    assert before.difference(after) == after.difference(before) == "their merges differ"
    assert before.difference(written(tmp_path / "words", "WordLevel")) == "one is a BPE, the other a WordLevel"
