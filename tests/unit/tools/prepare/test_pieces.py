"""Long documents in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from pretraining.tools.prepare import pieces
from pretraining.tools.prepare.pieces import cut_text

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "words_of",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated"),
    ],
    ids=["gpt2", "llama3"],
)
@given(
    text=st.text(alphabet=st.one_of(st.sampled_from("ab1 \n\r.'é漢_\t"), st.characters(codec="utf-8")), max_size=100)
)
def test_a_cut_goes_through_no_word_of_the_usual_tokenizers(words_of: pre_tokenizers.PreTokenizer, text: str) -> None:
    for match in pieces._SAFE_CUT.finditer(text):
        parts = text[: match.start()], text[match.start() :]
        words = [word for part in parts for word, _ in words_of.pre_tokenize_str(part)]
        assert words == [word for word, _ in words_of.pre_tokenize_str(text)]


@given(text=st.text(alphabet="ab \n", max_size=300), limit=st.integers(1, 40))
def test_pieces_make_the_text_again_and_only_the_last_ends_it(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARACTERS", limit)
        found = list(cut_text(text))
    assert "".join(part for part, _ in found) == text
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]
    assert max(len(part) for part, _ in found) <= limit
