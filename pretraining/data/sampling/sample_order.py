"""The order of a dataset's samples over its shards.

In pass e a shard of T tokens has floor((e + 1)T / S) - floor(eT / S) samples: remainders carry over to the next pass,
so no token is dropped or padded. A pass consists of rounds. Round t visits every shard that still has a sample, in a
keyed order, and takes the shard's t-th sample of the pass.

    sample k of the dataset -> pass e (all of it before e + 1) -> round t, position in the round
                            -> shard -> sample j = floor(eT / S) + t of the shard

The arithmetic is exact in 64 bits up to 2**63 samples. Samples are computed in chunks of about a round. The last few
chunks are cached, because small batches share them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial

import numpy as np

from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64
from pretraining.data.threads import RecentlyUsed

_MIN_CHUNK_SAMPLES = 64
"""Samples that are computed at once; larger rounds make larger chunks."""


@dataclass(frozen=True)
class _Pass:
    """Pass e over a dataset. A level is a range of rounds that visit the same shards.

    Attributes:
        first: number of its first sample in the dataset's order.
        first_of_shard: [shards], j of each shard's first sample in the pass.
        by_length: [shards], shards in ascending order of their samples in the pass.
        level_rounds, level_samples: [levels + 1], rounds and samples of the pass before each level.
        level_skip: [levels], shards of `by_length` that are exhausted before the level.
    """

    number: int
    first: int
    first_of_shard: np.ndarray
    by_length: np.ndarray
    level_rounds: np.ndarray
    level_samples: np.ndarray
    level_skip: np.ndarray


class SampleOrder:
    """The order of a dataset's samples.

    Args:
        shard_tokens: [shards] T of each; the sum is positive.
        seq_length: S.
        key: (seed, `text_key` of the dataset).
    """

    def __init__(self, shard_tokens: np.ndarray, seq_length: int, key: tuple[int, int]) -> None:
        self._quotient, self._remainder = np.divmod(shard_tokens.astype(np.int64), seq_length)
        self._tokens = sum(int(tokens) for tokens in shard_tokens)
        self._seq_length = seq_length
        self._key = key
        self._passes: RecentlyUsed[_Pass] = RecentlyUsed(4, cost=lambda _: 1)
        self._chunk_size = max(_MIN_CHUNK_SAMPLES, len(shard_tokens))
        self._chunks: RecentlyUsed[tuple[np.ndarray, np.ndarray]] = RecentlyUsed(4, cost=lambda _: 1)

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards of samples [begin, end), and their numbers j within them, both [end - begin] int64."""
        first, size = begin // self._chunk_size, self._chunk_size
        chunks = [
            self._chunks.get(number, partial(self._compute, number * size, (number + 1) * size))
            for number in range(first, max(first + 1, -(-end // size)))
        ]
        wanted = slice(begin - first * size, end - first * size)
        shards, numbers = (np.concatenate(parts)[wanted] for parts in zip(*chunks, strict=True))
        return shards, numbers

    def _compute(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute `samples` without the cache."""
        shards, numbers = np.empty(end - begin, dtype=np.int64), np.empty(end - begin, dtype=np.int64)
        at = begin
        while at < end:
            current = self._pass_of(at)
            local = at - current.first
            level = int(np.searchsorted(current.level_samples, local, side="right")) - 1
            active = np.sort(current.by_length[int(current.level_skip[level]) :])
            rounds_done, place = divmod(local - int(current.level_samples[level]), len(active))
            first_round = int(current.level_rounds[level]) + rounds_done
            taken = min(end - at, int(current.level_samples[level + 1]) - local)
            rounds = np.arange(first_round, first_round - (-(place + taken) // len(active)))
            visited = self._visit(current.number, rounds, active).reshape(-1)[place : place + taken]
            target = slice(at - begin, at - begin + taken)
            shards[target] = visited
            numbers[target] = current.first_of_shard[visited] + np.repeat(rounds, len(active))[place : place + taken]
            at += taken
        return shards, numbers

    def samples_before_pass(self, pass_number: int) -> int:
        """Count the samples of all passes before a pass."""
        return int(self._first_of_shard(pass_number).sum())

    def _first_of_shard(self, pass_number: int) -> np.ndarray:
        """Return floor(eT / S) for every shard. With T = qS + r this is eq + floor(er / S), which cannot overflow."""
        firsts: np.ndarray = pass_number * self._quotient + pass_number * self._remainder // self._seq_length
        return firsts

    def _visit(self, pass_number: int, rounds: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Return the shards that rounds visit, in each round's order: [rounds, active]."""
        keys = hash64(derive_key(Purpose.ROUNDS, *self._key, pass_number), rounds)
        return active[np.argsort(hash64(keys[:, None], active[None, :]), axis=1)]

    def _pass_of(self, sample: int) -> _Pass:
        """Return the pass of a sample."""
        # With T tokens in N shards, each of which rounds down, more than eT / S - N and at most eT / S samples come
        # before pass e. These bound the search for the last pass that begins at or before the sample.
        low = sample * self._seq_length // self._tokens
        high = (sample + len(self._quotient)) * self._seq_length // self._tokens + 1
        number = low + bisect_right(range(low, high + 1), sample, key=self.samples_before_pass) - 1
        return self._passes.get(number, partial(self._make_pass, number))

    def _make_pass(self, number: int) -> _Pass:
        first_of_shard = self._first_of_shard(number)
        counts = self._first_of_shard(number + 1) - first_of_shard
        by_length = np.argsort(counts, kind="stable")
        # A level ends when its shortest shards are exhausted.
        ends, ended = np.unique(counts[counts > 0], return_counts=True)
        skip = np.concatenate(([0], np.cumsum(ended)))[:-1] + np.count_nonzero(counts == 0)
        rounds = np.concatenate(([0], ends))
        samples = np.concatenate(([0], np.cumsum(np.diff(rounds) * (len(counts) - skip))))
        return _Pass(number, int(first_of_shard.sum()), first_of_shard, by_length, rounds, samples, skip)
