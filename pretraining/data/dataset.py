"""The steps from data settings to a loader, in the order in which a training program calls them.

    listing = list_datasets(config)             once per job, then broadcast
    listing = build_indices(listing, config)    once per job, then broadcast; then once per file system, then a barrier
    opened = open_datasets(listing, config)     every process
    loader = build_loader(opened, config, plan, rank, seed, vocab_size)

With `use_dummy_dataset`, skip the first three calls and pass `opened=None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.context_group import ContextGroup
from pretraining.data.batch_reader import BatchReader
from pretraining.data.loader import Loader
from pretraining.data.resume import describe_order
from pretraining.data.samples import OpenedDataset, OpenedDatasets, Samples, SplitName, dummy_samples, stored_samples
from pretraining.data.sampling.mixture import FirstSamples, Mixture, Phase, integer_weights
from pretraining.data.sampling.token_stream import shard_count
from pretraining.data.storage.bin_counts import build_bin_counts, find_bin_counts
from pretraining.data.storage.dataset_files import DatasetFiles, index_folders
from pretraining.data.storage.doubts import warn_about_splits, warn_about_tokens
from pretraining.data.storage.index_folder import build_index, find_index
from pretraining.data.storage.store_files import chunk_cache
from pretraining.errors import ConfigError, DataError
from pretraining.text import parse_bytes


def build_indices(listing: Sequence[DatasetFiles], config: DataConfig) -> tuple[DatasetFiles, ...]:
    """Build missing indices and, for packed datasets, missing bin counts. Several processes may call it at once.

    Returns:
        The listing with the content of each dataset, by which other processes find the same indices.

    Raises:
        DataError: a file is unusable (`pretrain verify` lists all such files), or an index cannot be written.
    """
    indexed = []
    for files in listing:
        index = build_index(files, config)
        if config.packing != "stream":
            build_bin_counts(files, index, config)
        indexed.append(replace(files, content=index.content))
    return tuple(indexed)


def with_content(files: DatasetFiles, config: DataConfig) -> DatasetFiles:
    """Return a listing with the content of its index; unchanged without a valid index."""
    index = find_index(files, config)
    return files if index is None else replace(files, content=index.content)


def is_indexed(files: DatasetFiles, config: DataConfig) -> bool:
    """Return whether a dataset has its index and bin counts."""
    return _find_dataset(files, config) is not None


def working_set_bytes(opened: OpenedDatasets, config: DataConfig) -> int:
    """Return about how much of the data in object stores is in use at a time: a block of each shard, at most all."""
    total = 0
    for dataset in opened.datasets:
        size, blocks = sum(dataset.files.sizes), len(dataset.index.split("train").block_bounds) - 1
        shards = shard_count(dataset.tokens("train"), config.seq_length, config.logical_shards)
        total += min(size, shards * size // max(blocks, 1)) if dataset.files.is_remote else 0
    return total


def open_datasets(listing: Sequence[DatasetFiles], config: DataConfig, processes: int = 1) -> OpenedDatasets:
    """Map the indices of all datasets into memory.

    Args:
        processes: of the job on this machine, which share `data_cache_size`.

    Raises:
        DataError: an index is missing, or a dataset has no documents.
    """
    datasets = []
    for files in listing:
        dataset = _find_dataset(files, config)
        if dataset is None:
            paths = " or ".join(map(str, index_folders(files, config)))
            raise DataError(
                f"dataset '{files.name}' has no index (or bin counts) in {paths}; another machine has built it: "
                "give --index_path=<a folder that all machines see>"
            )
        if len(dataset.index.documents) == 0:
            raise DataError(f"dataset '{files.name}' is empty: its files have no documents", path=files.folder)
        datasets.append(dataset)
    size = parse_bytes(config.data_cache_size)
    return OpenedDatasets(tuple(datasets), chunks=chunk_cache(config.data_cache_path, size, processes))


def warn_about_datasets(opened: OpenedDatasets, config: DataConfig) -> None:
    """Log warnings about data that is probably not what its user means; in one process of a job."""
    warn_about_splits([dataset.files for dataset in opened.datasets], config)
    for dataset in opened.datasets:
        warn_about_tokens(dataset.files, dataset.index, config)


def _find_dataset(files: DatasetFiles, config: DataConfig) -> OpenedDataset | None:
    """Open the index and bin counts of a dataset; None if one is missing."""
    index = find_index(files, config)
    if index is None or config.packing == "stream":
        return None if index is None else OpenedDataset(files, index)
    counts = find_bin_counts(files, index, config)
    return None if counts is None else OpenedDataset(files, index, counts)


def build_loader(
    opened: OpenedDatasets | None,
    config: DataConfig,
    plan: BatchSizes,
    rank: int,
    seed: int,
    vocab_size: int,
    group: ContextGroup | None = None,
) -> Loader:
    """Make the loader of one data-parallel rank, for training.

    Args:
        opened: None = the dummy dataset.
        vocab_size: vocabulary size of the model; reading a larger token raises an error.
        group: ranks that share the sequences of this data-parallel rank; None = it is one rank.

    Raises:
        ConfigError: bos_token or sep_token is not in the vocabulary.
        DataError: a dataset has too few tokens for one sample.
    """
    sources, weights = _open_sources(opened, config, seed, "train", vocab_size)
    phase = Phase.first(plan.global_batch_size, config.seq_length, weights)
    order = describe_order(sources, phase, config, seed)
    reader = BatchReader(sources, Mixture([phase]), plan, rank, config, vocab_size, group)
    changes = {source.name: source.changes for source in sources}
    return Loader(reader, order, num_workers=config.num_workers, changes=changes)


def build_evaluation_loader(
    opened: OpenedDatasets | None,
    config: DataConfig,
    plan: BatchSizes,
    rank: int,
    seed: int,
    vocab_size: int,
    split: SplitName,
    sequences: int,
    group: ContextGroup | None = None,
) -> tuple[Loader, dict[str, int], dict[str, int]]:
    """Make the loader of one rank that reads the first sequences of each dataset, each once, and stops.

    The sequences are divided equally among the datasets, whatever their weights, up to one pass over each. They are the
    same for any batch size and number of ranks.

    Args:
        opened, config, plan, rank, seed, vocab_size, group: as in `build_loader`.
        sequences: of all datasets together.

    Returns:
        The loader, the sequences of each dataset, and the weights of the datasets in training.
    """
    sources, weights = _open_sources(opened, config, seed, split, vocab_size)
    shares = (
        (number + 1) * sequences // len(sources) - number * sequences // len(sources) for number in range(len(sources))
    )
    counts = {source.name: min(share, source.pass_samples) for source, share in zip(sources, shares, strict=True)}
    mixture = FirstSamples(counts, plan.global_batch_size, config.seq_length)
    reader = BatchReader(sources, mixture, plan, rank, config, vocab_size, group)
    loader = Loader(reader, None, num_workers=config.num_workers, limit_steps=mixture.steps)
    return loader, counts, weights


def _open_sources(
    opened: OpenedDatasets | None, config: DataConfig, seed: int, split: SplitName, vocab_size: int
) -> tuple[list[Samples], dict[str, int]]:
    """Return the samples and the integer weights of all datasets."""
    _check_virtual_tokens(config, vocab_size)
    if opened is None:
        source = dummy_samples(config.seq_length, config.logical_shards, seed, split, vocab_size)
        return [source], {source.name: 1}
    used, weights = _weighted_datasets(opened, config, split)
    sources = [stored_samples(dataset, opened, config, seed, split, vocab_size) for dataset in used]
    return sources, {source.name: weights[source.name] for source in sources}


def _check_virtual_tokens(config: DataConfig, vocab_size: int) -> None:
    for name, token in (("bos_token", config.bos), ("sep_token", config.sep)):
        if token is not None and token >= vocab_size:
            raise ConfigError(
                f"{name}={token} is not in the vocabulary of {vocab_size} tokens: give "
                f"--vocab_size={token + 1} or more, or another --{name} (none = no token)"
            )


def _weighted_datasets(
    opened: OpenedDatasets, config: DataConfig, split: SplitName
) -> tuple[list[OpenedDataset], dict[str, int]]:
    """Return the datasets with a positive weight, and the weights as integers."""
    given: dict[str, float] = {}
    if config.weights:
        given = dict(zip((name.strip("/") for name in config.datasets), config.weights, strict=True))
    # Without weights, every dataset is used.
    used = [dataset for dataset in opened.datasets if given.get(dataset.files.name, 1)]
    _check_enough(used, config, split)
    return used, integer_weights(given or {dataset.files.name: dataset.pass_tokens("train") for dataset in used})


def _check_enough(datasets: list[OpenedDataset], config: DataConfig, split: SplitName) -> None:
    """Raise a DataError if a dataset has fewer tokens than one sample."""
    for dataset in datasets:
        tokens, needed = dataset.tokens(split), 1 if dataset.counts is not None else config.seq_length + 1
        if tokens < needed:
            is_train = split == "train"
            flags = "smaller --seq_length or --held_out_fraction" if is_train else "larger --held_out_fraction"
            raise DataError(
                f"dataset '{dataset.files.name}' has {tokens:,} tokens in the split {split}, but one sample needs "
                f"{needed:,}: give a {flags}"
            )
