"""Settings whose text has a grammar."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pretraining.config.training import checkpointed_blocks


@pytest.mark.parametrize(
    ("selective", "blocks"),
    [
        ("1", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("op", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("2", [1, 3, 5, 7]),
        ("3", [2, 5]),
        ("8", [7]),
        ("1/3", [1, 4, 7]),
        ("1/2", [0, 2, 4, 6]),
        ("0.5", [0, 2, 4, 6]),
        ("2/3", [0, 2, 3, 5, 6]),
        ("3/4", [0, 1, 3, 4, 5, 7]),
        ("1/16", [7]),
    ],
)
def test_blocks_are_every_kth_or_a_fraction_spread_evenly(selective: str, blocks: list[int]) -> None:
    assert checkpointed_blocks(selective, 8) == blocks


def test_a_checkpointed_fraction_holds_in_any_prefix_to_half_a_block() -> None:
    for share in (Fraction(1, 7), Fraction(2, 5), Fraction(5, 6)):
        taken = checkpointed_blocks(str(share), 80)
        for count in range(81):
            assert abs(sum(block < count for block in taken) - share * count) <= Fraction(1, 2)
