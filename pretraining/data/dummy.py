"""Made-up samples: no files, the same loader.

A sample counts upwards from a number that is a hash of its own global number, so it is a pure function of that, no two
runs of a seed differ, and a model learns quickly that the next token is the one after: the loss falls only where labels
are shifted as they should be.
"""

from __future__ import annotations

import numpy as np

from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64, text_key
from pretraining.data.sampling.token_stream import Spans

DUMMY_NAME = "dummy"


class DummySamples:
    """Samples of consecutive tokens, modulo the vocabulary.

    Args:
        seq_length: S.
        logical_shards: samples are dealt to so many shards, so that batches are sorted as those of a dataset are.
        seed: of the run.
        split: "train" or "held_out", which differ.
        vocab_size: tokens are below it.
    """

    name = DUMMY_NAME

    def __init__(self, seq_length: int, logical_shards: int, seed: int, split: str, vocab_size: int) -> None:
        self.shards = logical_shards
        self._seq_length = seq_length
        self._key = derive_key(Purpose.DUMMY, seed, text_key(split))
        self._vocab_size = vocab_size

    def fingerprint(self) -> dict[str, object]:
        """What the samples are made from."""
        return {"dummy": True, "vocab_size": self._vocab_size}

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard of samples [begin, end), and their numbers, both [end - begin] int64."""
        numbers = np.arange(begin, end)
        return (hash64(self._key, numbers) % np.uint64(self.shards)).astype(np.int64), numbers

    def spans(self, shards: np.ndarray, numbers: np.ndarray) -> Spans:
        """Every sample is a document of its own."""
        rows = len(numbers)
        lengths = np.full(rows, self._seq_length + 1)
        return Spans(numbers, np.zeros(rows, dtype=np.int64), lengths, np.arange(rows + 1))

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows of a batch with samples."""
        first = (hash64(self._key, spans.documents) % np.uint64(self._vocab_size)).astype(np.int64)
        target[rows] = (np.arange(target.shape[1]) + first[:, None]) % self._vocab_size
