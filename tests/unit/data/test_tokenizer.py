"""Training, loading and using a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from pretraining.data.tokenizer import END_OF_TEXT, library_threads, load_tokenizer, train_tokenizer
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


def test_a_lone_tokenizer_file_gives_its_end_of_text_by_name_and_its_vocabulary_by_the_largest_id(
    tmp_path: Path,
) -> None:
    write_word_tokenizer(tmp_path / "llama", {"?": 0, "a": 1, "</s>": 2}, ["</s>"])
    assert load_tokenizer(tmp_path / "llama").end_of_text == 2
    write_word_tokenizer(tmp_path / "none", {"?": 0, "a": 70_000}, [])
    none = load_tokenizer(tmp_path / "none")
    assert (none.end_of_text, none.vocab_size) == (None, 70_001)


def test_texts_are_never_cut_or_padded(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(TRAINED.definition.decode())
    library.enable_truncation(4)
    library.enable_padding(length=8)
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    assert load_tokenizer(tmp_path).encode_batch(["a", TEXTS[0]]) == TRAINED.encode_batch(["a", TEXTS[0]])


DEFINITION = TRAINED.definition.decode()


@pytest.mark.parametrize(
    ("named", "files"),
    [
        ("tokenizer.json", {}),
        ("tokenizer.json", {"tokenizer.json": "{}"}),
        ("tokenizer_config.json", {"tokenizer.json": DEFINITION, "tokenizer_config.json": "{"}),
        ("special_tokens_map.json", {"tokenizer.json": DEFINITION, "special_tokens_map.json": "[]"}),
        ("", {"tokenizer.json": DEFINITION, "tokenizer_config.json": '{"eos_token": "x!"}'}),
        ("tokenizer.json", {"tokenizer.model": "of SentencePiece"}),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, named: str, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as raised:
        load_tokenizer(tmp_path)
    assert raised.value.path == tmp_path / named


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
