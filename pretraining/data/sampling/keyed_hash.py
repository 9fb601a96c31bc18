"""Keyed 64-bit hashes, and the orders that follow from them.

Every random choice of the data path is `hash64(key, item)`, so any part of any order can be computed alone, on any
machine. Items under a key are ordered by their hashes. For a fixed key the hash is a bijection of the 64-bit integers,
so different items never tie.

Definitions, modulo 2**64 (golden vectors in the tests keep them fixed across releases):

    mix64(x)           the finalizer of splitmix64: xor-shift 30, multiply, xor-shift 27, multiply, xor-shift 31
                       (Steele, Lea and Flood 2014, with the constants of Stafford's variant 13)
    hash64(key, item)  mix64(key xor mix64(item + GOLDEN))
    derive_key(p, …)   key = 0, then key = hash64(key, p) for each part
    text_key(t, …)     the first 8 bytes, little endian, of BLAKE2b over the UTF-8 texts, each followed by a zero byte
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
_SECOND_MULTIPLIER = 0x94D049BB133111EB
_MASK = 2**64 - 1


class Purpose(IntEnum):
    """The first part of a key, one per kind of choice. Never change a value: the order of samples depends on it."""

    BLOCKS = 1
    DOCUMENTS = 2
    ROUNDS = 3
    HELD_OUT = 4
    DUMMY = 5
    BINS = 6
    CHECKED_TEXTS = 7
    PLACES = 8
    CONTENT = 9


def mix64(value: int) -> int:
    """Mix one 64-bit integer."""
    value = ((value ^ (value >> 30)) * _FIRST_MULTIPLIER) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND_MULTIPLIER) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Make a key from a sequence of non-negative integers below 2**64."""
    key = 0
    for part in parts:
        key = mix64(key ^ mix64((part + GOLDEN) & _MASK))
    return key


def text_key(*texts: str) -> int:
    """Make a part of a key, a 64-bit integer, from texts."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return int.from_bytes(digest.digest(), "little")


def hash64(keys: int | np.ndarray, items: np.ndarray) -> np.ndarray:
    """Hash non-negative integers under a key, or under an array of keys (uint64) that broadcasts; return uint64."""
    hashes = items.astype(np.uint64)
    hashes += np.uint64(GOLDEN)
    _mix64_in_place(hashes)
    hashes = hashes ^ (np.uint64(keys) if isinstance(keys, int) else keys)
    _mix64_in_place(hashes)
    return hashes


def keyed_order(key: int, items: np.ndarray) -> np.ndarray:
    """Return the positions of distinct items in the order of their hashes, [len(items)] int64."""
    return np.argsort(hash64(key, items))


def _mix64_in_place(values: np.ndarray) -> None:
    """Apply `mix64` to every element."""
    shifted = values >> np.uint64(30)
    values ^= shifted
    values *= np.uint64(_FIRST_MULTIPLIER)
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= np.uint64(_SECOND_MULTIPLIER)
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
