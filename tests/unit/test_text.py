"""Numbers in words."""

from __future__ import annotations

import pytest

from pretraining.text import count_of


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2000, "step", "2,000 steps"),
        (2, "micro-batch", "2 micro-batches"),
    ],
)
def test_a_number_has_its_noun_in_the_plural_unless_it_is_one(number: int, noun: str, said: str) -> None:
    assert count_of(number, noun) == said
