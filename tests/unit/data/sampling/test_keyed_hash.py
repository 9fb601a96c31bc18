from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from unit.data.sampling import stream_oracle

from pretraining.data.sampling.keyed_hash import derive_key, hash64, keyed_order, mix64, text_key

WORDS = st.integers(min_value=0, max_value=2**64 - 1)


def test_hashes_are_the_same_in_every_release() -> None:
    assert [mix64(value) for value in (0, 1, 2**64 - 1)] == [0, 0x5692161D100B05E5, 0xB4D055FCF2CBBD7B]
    assert derive_key(1, 2, 3) == 0x558194CB6FE3BC54
    assert text_key("web", "part.arrow") == 0x63EF9E3003A20CFE
    assert hash64(derive_key(1, 2, 3), np.arange(3)).tolist() == [
        0xCBD41E8A433AA3D0,
        0x37B669493896CD33,
        0x9279DEA9900B3526,
    ]
    assert keyed_order(derive_key(7), np.arange(12)).tolist() == [6, 3, 0, 2, 4, 10, 9, 8, 5, 7, 1, 11]


@given(WORDS, st.lists(st.integers(min_value=0, max_value=2**63 - 1), max_size=20))
def test_arrays_are_hashed_as_single_numbers_are(key: int, items: list[int]) -> None:
    expected = [stream_oracle.keyed_hash(key, item) for item in items]
    assert hash64(key, np.array(items, dtype=np.int64)).tolist() == expected
    assert derive_key(key, *items) == stream_oracle.key_of(key, *items)
