"""A rank's share of a global batch, from the number of the step alone.

    step -> samples [begin, end) --Mixture--> (dataset, k) --Samples--> (dataset, shard, j)
         --sorted, cut at the rank's slots--> rows of tokens

The slots of a global batch are sorted by shard and dataset before they are cut among ranks, so that a rank meets few
shards, and keeps few blocks in memory. The sorted batch is the same for any number of ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.data.samples import Samples
from pretraining.data.sampling.mixture import Mixture
from pretraining.data.sampling.token_stream import Spans
from pretraining.errors import DataError

if TYPE_CHECKING:
    import torch

    from pretraining.data.batch import StepBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slots:
    """The samples of a global batch, in the order in which ranks take them; all [global batch size] int64.

    `samples` are global indices, `datasets` positions in the reader's sources, `numbers` count within a shard.
    """

    samples: np.ndarray
    datasets: np.ndarray
    shards: np.ndarray
    numbers: np.ndarray


class BatchReader:
    """Makes the batch of any step, for one rank; safe to call from several threads.

    Args:
        sources: the datasets, sorted by name; the mixture may have phases with others.
        vocab_size: tokens are shipped as uint16 where it is at most 65536, else as int32.
    """

    def __init__(
        self,
        sources: Sequence[Samples],
        mixture: Mixture,
        plan: BatchSizes,
        rank: int,
        config: DataConfig,
        vocab_size: int,
    ) -> None:
        self.sources = tuple(sources)
        self._use(mixture)
        self._plan = plan
        self._begin, self._end = plan.share(rank)
        self._config = config
        self._vocab_size = vocab_size
        self._quarantine = Quarantine() if config.bad_documents == "quarantine" else None

    @cached_property
    def _kind(self) -> dict[str, Any]:
        """Of the tensor that tokens are read into."""
        import torch

        # Read straight into pinned memory: a copy less than pinning what was read. A run on CPUs starts no CUDA for it.
        dtype = torch.uint16 if self._vocab_size <= 1 << 16 else torch.int32
        return {"dtype": dtype, "pin_memory": torch.cuda.is_initialized()}

    def with_mixture(self, mixture: Mixture) -> BatchReader:
        """Return the same reader for another mixture; threads that read with this one are not disturbed."""
        other = copy.copy(self)
        other._use(mixture)
        return other

    def _use(self, mixture: Mixture) -> None:
        self.mixture = mixture
        positions = {source.name: position for position, source in enumerate(self.sources)}
        self._source_of_name = np.array([positions.get(name, -1) for name in mixture.names])

    def slots(self, step: int) -> Slots:
        """Return the whole global batch of a step, sorted.

        Raises:
            DataError: the step is of an earlier phase, and used a dataset that is not among the sources.
        """
        samples, named, within = self.mixture.assign_step(step)
        datasets = self._source_of_name[named]
        if (datasets < 0).any():
            missing = sorted({self.mixture.names[number] for number in named[datasets < 0]})
            raise DataError(f"step {step} is of {', '.join(missing)}, too, and this run reads without: see --datasets")
        shards, numbers, scaled = (np.empty(len(samples), dtype=np.int64) for _ in range(3))
        for dataset in np.flatnonzero(np.bincount(datasets)).tolist():
            source, places = self.sources[dataset], np.flatnonzero(datasets == dataset)
            # The samples that a dataset gives to a batch follow each other, but for those that are skipped.
            for run in np.split(places, np.flatnonzero(np.diff(within[places]) != 1) + 1):
                first = int(within[run[0]])
                shards[run], numbers[run] = source.samples(first, first + len(run))
            # Shards of datasets that are cut into fewer are compared on the same scale.
            scaled[places] = shards[places] * self._config.logical_shards // source.shards
        order = np.lexsort((datasets, scaled))  # stable: equal slots stay in the order of their samples
        return Slots(samples[order], datasets[order], shards[order], numbers[order])

    def read(self, step: int) -> StepBatch:
        """Read the rank's share of a step; a DataError names a sample that cannot be read."""
        import torch  # here, as above: what only looks at batches, as `inspect` does, makes no tensors

        from pretraining.data.batch import MicroBatch, StepBatch

        slots = self.slots(step)
        assert len(slots.samples) == self._plan.global_batch_size, "the plan is another phase's"
        size = self._plan.micro_batch_size
        tokens_RT = torch.empty(size * self._plan.grad_accum_steps, self._config.seq_length + 1, **self._kind)
        rows = _Rows(tokens_RT.numpy())
        # Slots fill rows from the first on, whatever the micro-batches; the last rows may stay empty.
        rows.tokens[self._end - self._begin :] = 0
        datasets = slots.datasets[self._begin : self._end]
        for dataset in np.flatnonzero(np.bincount(datasets)).tolist():
            self._fill(step, slots, self.sources[dataset], np.flatnonzero(datasets == dataset), rows)
        lengths = rows.micro_batch_lengths(size)
        starts = rows.micro_batch_starts(size) if self._config.document_mask else [None] * len(lengths)
        numbers_R = torch.zeros(len(tokens_RT), dtype=torch.int64)
        numbers_R[: len(datasets)] = torch.from_numpy(datasets)
        parts = zip(tokens_RT.split(size), lengths, starts, numbers_R.split(size), strict=True)
        names = tuple(source.name for source in self.sources)
        return StepBatch(step, self.mixture.first_sample(step), [MicroBatch(*each) for each in parts], names)

    def _fill(self, step: int, slots: Slots, source: Samples, numbers: np.ndarray, rows: _Rows) -> None:
        """Read the samples of a dataset into the rows with these numbers."""
        taken = self._begin + numbers
        try:
            spans = source.spans(slots.shards[taken], slots.numbers[taken])
            source.read(spans, rows.tokens, numbers)
        except DataError as error:
            if len(numbers) > 1:
                for number in numbers:  # one by one, to name the samples that cannot be read
                    self._fill(step, slots, source, np.array([number]), rows)
                return
            slot = int(taken[0])
            shard, sample = slots.shards[slot], slots.numbers[slot]
            where = f"step {step + 1}, slot {slot}: dataset '{source.name}', shard {shard}, its sample {sample}"
            problem = f"{error}\n  needed for sample {slots.samples[slot]} ({where})"
            if self._quarantine is None:
                error.args = (problem,)  # its path and row stay
                raise
            rows.tokens[numbers] = 0
            self._quarantine.add(problem)
            return
        rows.filled(numbers, spans)
        if self._quarantine is not None:
            self._quarantine.end_row()


class _Rows:
    """The rows of a rank's share, and where documents lie in them; rows are empty until they are filled."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.lengths = np.zeros(len(tokens), dtype=np.int32)
        self._starts: list[np.ndarray] = []

    def filled(self, rows: np.ndarray, spans: Spans) -> None:
        """Note that rows were filled with spans."""
        self.lengths[rows] = spans.row_tokens
        self._starts.append(spans.places(rows * self.tokens.shape[1]))

    def micro_batch_lengths(self, size: int) -> list[torch.Tensor | None]:
        """Return `lengths_B` of every micro-batch, `size` rows each."""
        import torch

        full, lengths = self.tokens.shape[1], self.lengths.reshape(-1, size)
        return [None if (each == full).all() else torch.from_numpy(each) for each in lengths]

    def micro_batch_starts(self, size: int) -> list[torch.Tensor | None]:
        """Return `document_starts` of every micro-batch, `size` rows each."""
        import torch

        width = self.tokens.shape[1]
        partly = np.flatnonzero(self.lengths < width)  # of an empty row, padding begins at its first place
        starts = np.concatenate([*self._starts, partly * width + self.lengths[partly]])
        starts.sort()
        borders = np.arange(0, self.tokens.size + 1, size * width)
        numbers = np.searchsorted(starts, borders)
        return [
            torch.from_numpy((starts[low:high] - border).astype(np.int32))
            for low, high, border in zip(numbers[:-1], numbers[1:], borders[:-1], strict=True)
        ]


LINES_SHOWN = 20
"""Samples that are named one by one; of a dataset of another tokenizer every one would be."""
MOST_IN_A_ROW = 256
"""Samples of a process with no readable one between them that end the run."""


class Quarantine:
    """Counts and logs samples that cannot be read; threads that meet may count one too few.

    Their slots lose their labels and no other sample moves. Where nothing can be read any more, as when a file system
    is gone, the run ends.
    """

    def __init__(self) -> None:
        self._count = self._in_a_row = 0

    def add(self, problem: str) -> None:
        """Note a sample; a DataError where there were too many in a row."""
        self._count += 1
        self._in_a_row += 1
        count = self._count
        if self._in_a_row >= MOST_IN_A_ROW:
            raise DataError(
                f"{self._in_a_row} samples in a row cannot be read, which is no case for quarantine: {problem}"
            )
        if count <= LINES_SHOWN:
            log.warning("quarantined, its labels are left out: %s", problem)
        elif count.bit_count() == 1:  # 32, 64, 128, …: the log of a run of months stays short
            log.warning(
                "quarantined: %s samples so far. `pretrain verify` names every fault of the files", f"{count:,}"
            )

    def end_row(self) -> None:
        """Note that samples could be read."""
        self._in_a_row = 0
