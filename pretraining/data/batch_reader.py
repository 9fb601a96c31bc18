"""The reader that makes a rank's share of a global batch from the step number alone.

    step -> samples [begin, end) --Mixture--> (dataset, k) --Samples--> (dataset, shard, j)
         --sorted, cut at the rank's slots--> rows of tokens

The slots of a global batch are sorted by shard and dataset before the ranks divide them, so each rank reads few shards
and keeps few blocks in memory. The sorted batch is the same for any number of ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.context_group import ContextGroup
from pretraining.data.samples import Samples
from pretraining.data.sampling.mixture import Mixture
from pretraining.data.sampling.token_stream import Spans
from pretraining.data.storage.document_reader import Fetch
from pretraining.errors import DataError

if TYPE_CHECKING:
    import torch

    from pretraining.data.batch import StepBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slots:
    """The samples of a global batch, in the order in which ranks divide them; all [global batch size] int64, or fewer.

    Attributes:
        samples: global indices.
        datasets: positions in the reader's sources.
        numbers: sample numbers within the shard.
    """

    samples: np.ndarray
    datasets: np.ndarray
    shards: np.ndarray
    numbers: np.ndarray


@dataclass(frozen=True)
class Located:
    """The share of a rank in a step, before it is read.

    Attributes:
        spans: of the samples of each dataset, by its position in the reader's sources.
    """

    step: int
    slots: Slots
    spans: dict[int, Spans]


class BatchReader:
    """A thread-safe reader of one rank's batch of any step.

    Args:
        sources: datasets, sorted by name; phases of the mixture may use others.
        vocab_size: tokens are uint16 up to 65536, else int32.
        group: ranks that read the same batch, to compute a part of each row; None = none do.
    """

    def __init__(
        self,
        sources: Sequence[Samples],
        mixture: Mixture,
        plan: BatchSizes,
        rank: int,
        config: DataConfig,
        vocab_size: int,
        group: ContextGroup | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self._set_mixture(mixture)
        self._plan = plan
        self._begin, self._end = plan.share(rank)
        self._config = config
        self._vocab_size = vocab_size
        self._group = group
        self._quarantine = Quarantine() if config.bad_documents == "quarantine" else None

    @cached_property
    def _tensor_options(self) -> dict[str, Any]:
        """Return dtype and pinning of the tensor for tokens."""
        import torch

        # Reading into pinned memory saves the copy of pinning later. A run on CPUs does not start CUDA.
        dtype = torch.uint16 if self._vocab_size <= 1 << 16 else torch.int32
        return {"dtype": dtype, "pin_memory": torch.cuda.is_initialized()}

    def with_mixture(self, mixture: Mixture) -> BatchReader:
        """Return a copy of the reader with another mixture; threads that use this reader keep the old one."""
        other = copy.copy(self)
        other._set_mixture(mixture)
        return other

    def _set_mixture(self, mixture: Mixture) -> None:
        self.mixture = mixture
        positions = {source.name: position for position, source in enumerate(self.sources)}
        self._source_of_name = np.array([positions.get(name, -1) for name in mixture.names])

    def slots(self, step: int) -> Slots:
        """Return the sorted global batch of a step.

        Raises:
            DataError: the step belongs to an earlier phase with a dataset that is not among the sources.
        """
        samples, named, within = self.mixture.assign_step(step)
        datasets = self._source_of_name[named]
        if (datasets < 0).any():
            missing = ", ".join(sorted({self.mixture.names[number] for number in named[datasets < 0]}))
            raise DataError(f"step {step} used datasets that this run does not read: add {missing} to --datasets")
        shards, numbers, scaled = (np.empty(len(samples), dtype=np.int64) for _ in range(3))
        for dataset in np.flatnonzero(np.bincount(datasets)).tolist():
            source, positions = self.sources[dataset], np.flatnonzero(datasets == dataset)
            # The samples of a dataset in a batch are consecutive, except for skipped ones.
            for run in np.split(positions, np.flatnonzero(np.diff(within[positions]) != 1) + 1):
                first = int(within[run[0]])
                shards[run], numbers[run] = source.samples(first, first + len(run))
            # Datasets may have different numbers of shards: scale shard numbers before sorting.
            scaled[positions] = shards[positions] * self._config.logical_shards // source.shards
        order = np.lexsort((datasets, scaled))  # stable: ties keep the order of samples
        return Slots(samples[order], datasets[order], shards[order], numbers[order])

    @property
    def is_remote(self) -> bool:
        """Whether some of the data is in an object store."""
        return any(source.fetches is not None for source in self.sources)

    def locate(self, step: int) -> Located:
        """Find the rank's share of a step."""
        slots = self.slots(step)
        datasets = slots.datasets[self._begin : self._end]
        spans = {}
        for dataset in np.flatnonzero(np.bincount(datasets)).tolist():
            taken = self._begin + np.flatnonzero(datasets == dataset)
            spans[dataset] = self.sources[dataset].spans(slots.shards[taken], slots.numbers[taken])
        return Located(step, slots, spans)

    def fetches(self, located: Located) -> Iterator[Fetch]:
        """Yield what makes the data of a step ready that is in object stores."""
        for dataset, spans in located.spans.items():
            yield from (self.sources[dataset].fetches or (lambda spans: ()))(spans)

    def read(self, step: int | Located) -> StepBatch:
        """Read the rank's share of a step. A DataError names an unreadable sample."""
        import torch  # here: `inspect` lists slots without tensors

        from pretraining.data.batch import MicroBatch, StepBatch

        located = self.locate(step) if isinstance(step, int) else step
        step, slots = located.step, located.slots
        assert self.mixture.global_batch_size(step) == self._plan.global_batch_size, "sizes belong to another phase"
        size = self._plan.micro_batch_size
        row_count = size * self._plan.grad_accum_steps
        tokens_RT = torch.empty(row_count, self._config.seq_length + 1, **self._tensor_options)
        rows = _BatchRows(tokens_RT.numpy())
        # Slots fill the first rows; the last rows may stay empty.
        datasets = slots.datasets[self._begin : self._end]
        rows.tokens[len(datasets) :] = 0
        for dataset, spans in located.spans.items():
            self._fill(step, slots, self.sources[dataset], np.flatnonzero(datasets == dataset), spans, rows)
        lengths = rows.micro_batch_lengths(size)
        starts = rows.micro_batch_starts(size) if self._config.document_mask else [None] * len(lengths)
        numbers_R = torch.zeros(len(tokens_RT), dtype=torch.int64)
        numbers_R[: len(datasets)] = torch.from_numpy(datasets)
        unreadable: Sequence[torch.Tensor | None] = [None] * len(lengths)
        if self._quarantine is not None:
            unreadable = torch.from_numpy(rows.unreadable).split(size)
        parts = zip(tokens_RT.split(size), lengths, starts, numbers_R.split(size), unreadable, strict=True)
        names = tuple(source.name for source in self.sources)
        micro_batches = [MicroBatch(*part, self._group) for part in parts]
        return StepBatch(step, self.mixture.first_sample(step), micro_batches, names)

    def _fill(
        self, step: int, slots: Slots, source: Samples, numbers: np.ndarray, spans: Spans, rows: _BatchRows
    ) -> None:
        """Read the spans of one dataset into the rows `numbers`."""
        try:
            source.read(spans, rows.tokens, numbers)
        except DataError as error:
            if len(numbers) > 1:
                for number in numbers:  # one by one, to find the unreadable samples
                    taken = [self._begin + number]
                    alone = source.spans(slots.shards[taken], slots.numbers[taken])
                    self._fill(step, slots, source, np.array([number]), alone, rows)
                return
            slot = self._begin + int(numbers[0])
            shard, sample = slots.shards[slot], slots.numbers[slot]
            where = f"step {step + 1}, slot {slot}: dataset '{source.name}', shard {shard}, its sample {sample}"
            problem = f"{error}\n  needed for sample {slots.samples[slot]} ({where})"
            if self._quarantine is None:
                error.args = (problem,)  # keeps path and row
                raise
            rows.tokens[numbers] = 0
            rows.unreadable[numbers] = True
            self._quarantine.add(problem)
            return
        rows.mark_filled(numbers, spans)
        if self._quarantine is not None:
            self._quarantine.record_success()


class _BatchRows:
    """The rows of a rank's share, their lengths and document starts; all rows are empty and readable at first."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.lengths = np.zeros(len(tokens), dtype=np.int32)
        self.unreadable = np.zeros(len(tokens), dtype=np.bool_)
        self._starts: list[np.ndarray] = []

    def mark_filled(self, rows: np.ndarray, spans: Spans) -> None:
        """Record that rows were filled with spans."""
        self.lengths[rows] = spans.row_tokens
        self._starts.append(spans.positions(rows * self.tokens.shape[1]))

    def micro_batch_lengths(self, size: int) -> list[torch.Tensor | None]:
        """Return `lengths_B` of each micro-batch of `size` rows."""
        import torch

        full, lengths = self.tokens.shape[1], self.lengths.reshape(-1, size)
        return [None if (part == full).all() else torch.from_numpy(part) for part in lengths]

    def micro_batch_starts(self, size: int) -> list[torch.Tensor | None]:
        """Return `document_starts` of each micro-batch of `size` rows."""
        import torch

        width = self.tokens.shape[1]
        partly = np.flatnonzero(self.lengths < width)  # padding of an empty row starts at the row's start
        starts = np.concatenate([*self._starts, partly * width + self.lengths[partly]])
        starts.sort()
        borders = np.arange(0, self.tokens.size + 1, size * width)
        numbers = np.searchsorted(starts, borders)
        return [
            torch.from_numpy((starts[low:high] - border).astype(np.int32))
            for low, high, border in zip(numbers[:-1], numbers[1:], borders[:-1], strict=True)
        ]


MAX_NAMED = 20
"""Quarantined samples that the log names; after these, the log only counts."""
MAX_CONSECUTIVE = 256
"""Consecutive unreadable samples in a process that stop the run."""


class Quarantine:
    """A counter and log of unreadable samples. Their labels are ignored; other samples keep their slots.

    Many consecutive failures, as on a lost file system, stop the run. Counts may miss a sample if threads collide.
    """

    def __init__(self) -> None:
        self._count = self._consecutive = 0

    def add(self, problem: str) -> None:
        """Record an unreadable sample; raise a DataError after too many consecutive ones."""
        self._count += 1
        self._consecutive += 1
        count = self._count
        if self._consecutive >= MAX_CONSECUTIVE:
            raise DataError(f"{self._consecutive} consecutive samples are unreadable, too many to skip: {problem}")
        if count <= MAX_NAMED:
            log.warning("quarantined, labels ignored: %s", problem)
        elif count.bit_count() == 1:  # 32, 64, 128, …: keeps the log of a long run short
            log.warning("quarantined: %s samples so far. `pretrain verify` lists all faults", f"{count:,}")

    def record_success(self) -> None:
        """Reset the count of consecutive unreadable samples."""
        self._consecutive = 0
