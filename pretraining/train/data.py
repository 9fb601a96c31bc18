"""Opens a job's data together: listed once, indexed once a file system, mapped by every process."""

from __future__ import annotations

from pretraining.config.batch import BatchPlan
from pretraining.config.training import TrainConfig
from pretraining.data.dataset import build_indices, build_loader, open_datasets
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets, SplitName
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.progress import TokenSchedule


def open_data(config: TrainConfig, processes: Processes) -> OpenedDatasets | None:
    """The datasets of a job, or None for the dummy dataset; a collective call.

    Raises:
        DataError, ConfigError: the same on every rank.
    """
    if config.data.use_dummy_dataset:
        return None
    # Listing 100,000 files costs a shared file system dearly: one process does it for all.
    listing = on_rank_zero(lambda: list_datasets(config.data))
    on_rank_zero(lambda: build_indices(listing, config.data))
    # Where indices lie in a cache folder, nodes may not see each other's; where they do, this finds rank 0's.
    is_first_of_node = processes.local_rank == 0
    on_every_rank(lambda: build_indices(listing, config.data) if is_first_of_node else None)
    return on_every_rank(lambda: open_datasets(listing, config.data))


def open_loader(
    opened: OpenedDatasets | None,
    config: TrainConfig,
    plan: BatchPlan,
    rank: int,
    vocab_size: int,
    split: SplitName,
) -> Loader:
    """This rank's loader of a split: endless for training, `eval_batches` long for evaluation; a collective call."""
    limit_steps = config.evaluation.eval_batches if split == "held_out" else None
    return on_every_rank(
        lambda: build_loader(
            opened,
            config.data,
            plan,
            rank,
            config.run.seed,
            vocab_size,
            split=split,
            limit_steps=limit_steps,
        )
    )


def token_schedule_of(loader: Loader, seq_length: int) -> TokenSchedule:
    """Tokens of a run's steps, from the first, as its training loader knows them."""
    phases = loader.reader.mixture.phases
    segments, tokens = [], 0
    for phase, after in zip(phases, (*phases[1:], None), strict=True):
        segments.append((phase.first_step, tokens, phase.global_batch_size * seq_length))
        if after is not None:
            tokens += (after.first_step - phase.first_step) * phase.global_batch_size * seq_length
    return TokenSchedule(tuple(segments))
