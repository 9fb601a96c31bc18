"""How a global batch is cut into the micro-batches of each data-parallel rank.

`global_batch_size` is what learning sees, `batch_size` is what one GPU can hold. From these and the number of ranks
`resolve_batch_sizes` derives the rest, so the same sequences make a step on any number of ranks:

    slots of the global batch   0 ............................................ G
    shares of the ranks         | rank 0: m | rank 1: m | rank 2: m - 1 |        near-equal, contiguous
    micro-batches of a rank     | micro_batch_size | micro_batch_size | ...      grad_accum_steps of them

Every rank runs the same shapes, so shares that are shorter are filled with sequences whose labels are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.training import BatchConfig
from pretraining.errors import ConfigError
from pretraining.text import count_of


@dataclass(frozen=True)
class BatchSizes:
    """The batch of one optimizer step on every rank.

    Attributes:
        global_batch_size: G, sequences a step over all ranks; only this is seen by learning.
        micro_batch_size: sequences that a rank takes in one forward pass.
        grad_accum_steps: micro-batches of a rank in a step.
        data_parallel_ranks: W, ranks that take different sequences.
    """

    global_batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    data_parallel_ranks: int

    def share(self, rank: int) -> tuple[int, int]:
        """Return the slots [begin, end) of the global batch that a rank computes; in order of rank they tile it."""
        size, ranks = self.global_batch_size, self.data_parallel_ranks
        return rank * size // ranks, (rank + 1) * size // ranks

    @property
    def padding_sequences(self) -> int:
        """Sequences a step with ignored labels, over all ranks: the price of the same shapes on every rank."""
        return self.data_parallel_ranks * self.micro_batch_size * self.grad_accum_steps - self.global_batch_size

    def describe(self) -> str:
        """Say in a line how the batch is cut, and what is wasted where it does not divide evenly."""
        computed = self.global_batch_size + self.padding_sequences
        text = (
            f"{count_of(self.global_batch_size, 'sequence')} a step: "
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
    """Cut the global batch for a number of ranks; without one, it is batch_size x grad_accum_steps x ranks.

    The largest share m = ceil(G / W) is taken in as few micro-batches as `batch_size` allows, n = ceil(m / batch_size),
    and the micro-batches are made as even as possible, ceil(m / n): this computes the least padding for that n.

    Args:
        batch: the settings.
        data_parallel_ranks: W, ranks that take different sequences.
        restored_global_batch_size: what the checkpoint was trained with. It holds unless `batch` names a global batch
            size. Accumulation is then derived, so that the same command goes on with another number of ranks.

    Raises:
        ConfigError: `grad_accum_steps` was given and does not fit the global batch size.
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
    if steps is None:
        steps = fewest
    if not fewest <= steps <= largest_share:
        raise ConfigError(
            f"global_batch_size={size} over {data_parallel_ranks} data-parallel ranks is at most {largest_share} "
            f"sequences a rank, which grad_accum_steps={steps} micro-batches of batch_size={batch.batch_size} do not "
            f"fit: give --grad_accum_steps from {fewest} to {largest_share}, or leave it out to have it derived"
        )
    return BatchSizes(size, -(-largest_share // steps), steps, data_parallel_ranks)
