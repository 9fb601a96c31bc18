"""A dataset on disk as a sequence of samples: order (rounds, streams) and content (reader) joined.

k --SampleOrder--> (shard, j) --TokenStream--> spans of documents --DocumentReader--> S + 1 tokens

Finding and reading work on many samples at once: what Python does a call is shared by all the rows of a step.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pretraining.data.sampling.keyed_hash import text_key
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import OrderCache, Spans, TokenStream, cut_shards, shard_count
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.document_reader import DocumentReader
from pretraining.data.storage.index import Index


class Samples(Protocol):
    """An endless sequence of samples, each a pure function of its number."""

    @property
    def name(self) -> str:
        """Of the dataset."""
        ...

    @property
    def shards(self) -> int:
        """How many shards samples come from."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON-able: equal for two sequences only if their samples are."""
        ...

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard of samples [begin, end), and their numbers within it, both [end - begin] int64."""
        ...

    def spans(self, shards: np.ndarray, numbers: np.ndarray) -> Spans:
        """The pieces of documents that make samples, one row each; a made-up sample is a document of its own.

        Args:
            shards: [rows], of the samples.
            numbers: [rows], within their shards.
        """
        ...

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows of a batch with samples, and with zeros behind them.

        Args:
            spans: of the samples.
            target: [batch rows, S + 1].
            rows: [rows], which rows of it to fill.

        Raises:
            DataError: a file cannot be read, or holds a token beyond the vocabulary.
        """
        ...


class StreamSamples:
    """Samples cut from the token streams of a dataset's shards.

    Args:
        files: the dataset.
        index: of these files.
        split: "train" or "held_out".
        reader: of the documents' tokens.
        seq_length: S.
        logical_shards: pieces that the dataset is cut into at most.
        seed: of all orders.
        cache: shared memory for orders.
    """

    def __init__(
        self,
        files: DatasetFiles,
        index: Index,
        split: str,
        reader: DocumentReader,
        *,
        seq_length: int,
        logical_shards: int,
        seed: int,
        cache: OrderCache,
    ) -> None:
        self.name = files.name
        self._files = files
        self._index = index
        self._reader = reader
        lengths = index.split(split)
        self._tokens = lengths.tokens
        shards = cut_shards(lengths, shard_count(lengths.tokens, seq_length, logical_shards))
        self.shards = len(shards)
        key = (seed, text_key(files.name, split))
        self._order = SampleOrder(shards.tokens, seq_length, key)
        self._stream = TokenStream(lengths, shards, seq_length, key, cache)

    def fingerprint(self) -> dict[str, Any]:
        """What the samples are made from: files by names and sizes, settings of the index, and totals."""
        return {
            "files": self._files.digest,
            "file_count": len(self._files.paths),
            "settings": self._index.header["settings"],
            "documents": len(self._index.documents),
            "tokens": self._tokens,
        }

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard of samples [begin, end), and their numbers within it, both [end - begin] int64."""
        return self._order.samples(begin, end)

    def spans(self, shards: np.ndarray, numbers: np.ndarray) -> Spans:
        """The pieces of documents that make samples, one row each."""
        return self._stream.spans(shards, numbers)

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows of a batch with samples; see `DocumentReader.read`."""
        self._reader.read(spans, target, rows)
