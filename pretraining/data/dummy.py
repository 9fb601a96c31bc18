"""Made-up samples: no files, the same loader.

A sample counts upwards from a number that is a hash of its own global number, so it is a pure function of that, no two
runs of a seed differ, and a model learns quickly that the next token is the one after: the loss falls only where labels
are shifted as they should be.
"""

from __future__ import annotations

import numpy as np

from pretraining.data.order import Purpose, derive_key, hash64, text_key
from pretraining.data.streams import Spans

DUMMY_NAME = "dummy"


class DummySamples:
    """Samples of consecutive tokens, modulo the vocabulary.

    Args:
        logical_shards: samples are dealt to so many shards, so that batches are sorted as those of a dataset are.
        seed: of the run.
        split: "train" or "held_out", which differ.
        vocab_size: tokens are below it.
    """

    name = DUMMY_NAME

    def __init__(self, logical_shards: int, seed: int, split: str, vocab_size: int) -> None:
        self.shards = logical_shards
        self._key = derive_key(Purpose.DUMMY, seed, text_key(split))
        self._vocab_size = vocab_size

    def fingerprint(self) -> dict[str, object]:
        """What the samples are made from."""
        return {"dummy": True, "vocab_size": self._vocab_size}

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard of samples [begin, end), and their numbers, both [end - begin] int64."""
        numbers = np.arange(begin, end)
        return (hash64(self._key, numbers) % np.uint64(self.shards)).astype(np.int64), numbers

    def spans(self, shard: int, number: int) -> Spans:
        """No sample is made of documents."""
        nothing = np.zeros(0, dtype=np.int64)
        return Spans(nothing, nothing, nothing)

    def read(self, shard: int, number: int, row: np.ndarray) -> None:
        """Fill a row, [S + 1], with a sample."""
        first = int(hash64(self._key, np.array([number]))[0]) % self._vocab_size
        row[:] = (np.arange(len(row)) + first) % self._vocab_size
