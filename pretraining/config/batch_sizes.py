"""The division of a global batch into the micro-batches of each data-parallel rank.

`global_batch_size` decides what the model learns from in a step, `batch_size` what one GPU can hold. From both and the
number of ranks `resolve_batch_sizes` derives the rest, so a step has the same sequences on any number of ranks:

    slots of the global batch   0 ............................................ G
    shares of the ranks         | rank 0: m | rank 1: m | rank 2: m - 1 |        near-equal, contiguous
    micro-batches of a rank     | micro_batch_size | micro_batch_size | ...      grad_accum_steps of them

All ranks run the same shapes: shorter shares are padded with sequences whose labels are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.training import BatchConfig
from pretraining.errors import ConfigError
from pretraining.text import count_of


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes of one optimizer step.

    Attributes:
        global_batch_size: G, sequences per step over all ranks.
        micro_batch_size: sequences per rank and forward pass.
        grad_accum_steps: micro-batches per rank and step.
        data_parallel_ranks: W, ranks with different sequences.
    """

    global_batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    data_parallel_ranks: int

    def share(self, rank: int) -> tuple[int, int]:
        """Return the slots [begin, end) of the global batch that a rank computes; the ranks' slots tile the batch."""
        size, ranks = self.global_batch_size, self.data_parallel_ranks
        return rank * size // ranks, (rank + 1) * size // ranks

    @property
    def padding_sequences(self) -> int:
        """Sequences with ignored labels per step, over all ranks."""
        return self.data_parallel_ranks * self.micro_batch_size * self.grad_accum_steps - self.global_batch_size

    def describe(self) -> str:
        """Describe the batch in one line, with the padding if the batch does not divide evenly."""
        computed = self.global_batch_size + self.padding_sequences
        text = (
            f"{count_of(self.global_batch_size, 'sequence')} per step: "
            f"{count_of(self.data_parallel_ranks, 'data-parallel rank')} "
            f"x {count_of(self.grad_accum_steps, 'micro-batch')} of {self.micro_batch_size}"
        )
        if self.padding_sequences:
            wasted = self.padding_sequences / computed
            text += f"; {self.padding_sequences} of {computed} computed sequences are padding ({wasted:.1%} wasted)"
        return text


def resolve_batch_sizes(
    batch: BatchConfig, data_parallel_ranks: int, restored_global_batch_size: int | None = None
) -> BatchSizes:
    """Divide the global batch over the ranks. If it has no size, it is batch_size x grad_accum_steps x ranks.

    The largest share is m = ceil(G / W) sequences. It takes as few micro-batches as `batch_size` allows,
    n = ceil(m / batch_size), each of ceil(m / n) sequences, which needs the least padding for that n.

    Args:
        batch: settings.
        data_parallel_ranks: W, ranks with different sequences.
        restored_global_batch_size: the checkpoint's, used unless `batch` gives one; None = this is a new run. A resumed
            run derives `grad_accum_steps` unless it fits, so that the same command resumes on another number of ranks.

    Raises:
        ConfigError: `grad_accum_steps` does not fit the global batch size of a new run.
    """
    steps = batch.grad_accum_steps
    size = batch.global_batch_size
    if size is None and restored_global_batch_size is not None:
        size, steps = restored_global_batch_size, None
    if size is None:
        steps = 1 if steps is None else steps
        return BatchSizes(batch.batch_size * steps * data_parallel_ranks, batch.batch_size, steps, data_parallel_ranks)

    largest_share = -(-size // data_parallel_ranks)
    fewest = -(-largest_share // batch.batch_size)
    if steps is not None and (steps < fewest or largest_share % steps):
        if restored_global_batch_size is None:
            raise ConfigError(
                f"global_batch_size={size} over {data_parallel_ranks} data-parallel ranks is {largest_share} sequences "
                f"per rank. These do not divide into grad_accum_steps={steps} micro-batches of at most "
                f"batch_size={batch.batch_size}: give a --grad_accum_steps of at least {fewest} that divides "
                f"{largest_share}, or leave it out"
            )
        steps = None
    steps = fewest if steps is None else steps
    return BatchSizes(size, -(-largest_share // steps), steps, data_parallel_ranks)
