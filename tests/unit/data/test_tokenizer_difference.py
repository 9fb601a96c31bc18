"""Whether the ids of two tokenizers mean the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from pretraining.data.tokenizer import Tokenizer, load_tokenizer

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
def test_ids_of_other_tokens_are_a_difference_and_another_form_is_none(
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
