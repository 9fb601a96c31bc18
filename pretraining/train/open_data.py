"""Opening of a job's data: the training datasets and the evaluation sets.

    listing (rank 0) -> indices (rank 0, then one process per node) -> datasets (all) -> loaders

All functions are collective calls, and raise errors on all ranks alike.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.batch import StepBatch
from pretraining.data.dataset import (
    build_evaluation_loader,
    build_indices,
    is_indexed,
    open_datasets,
    warn_about_datasets,
    with_content,
    working_set_bytes,
)
from pretraining.data.evaluation_sets import EvaluationFolder, find_evaluation_folders
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets, SplitName
from pretraining.data.storage.dataset_files import DatasetFiles, list_datasets
from pretraining.data.storage.index_files import find_index, receive_index
from pretraining.data.tokenizer import load_fitting_tokenizer
from pretraining.distributed.dims import Dims
from pretraining.distributed.processes import Processes, gather_from_every_rank, on_every_rank, on_rank_zero
from pretraining.errors import ConfigError, DataError, PretrainError
from pretraining.evaluation.evaluators import Evaluators
from pretraining.evaluation.held_out import EvaluationRecord, EvaluationSource
from pretraining.evaluation.tasks import Tasks
from pretraining.text import format_bytes, parse_bytes

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**24


@dataclass(frozen=True)
class OpenedData:
    """Data of a job.

    Attributes:
        training: training datasets; None for dummy data, or if `eval_only` needs no held-out documents.
        folders: opened folders of `--eval_datasets`.
    """

    training: OpenedDatasets | None
    folders: tuple[tuple[EvaluationFolder, OpenedDatasets], ...] = ()


def open_data(config: TrainConfig, processes: Processes, index_folder: str | None = None) -> OpenedData:
    """Open a job's datasets and evaluation folders in every process.

    Args:
        index_folder: folder for new indices; None = where the settings say.
    """
    data = config.data
    listing: tuple[DatasetFiles, ...] = ()
    if data.data_path is not None and not data.use_dummy_dataset:
        # Listing 100,000 files is slow on a shared file system: rank 0 lists them for all.
        listing = on_rank_zero(lambda: list_datasets(data))
    paths, is_evaluation = config.evaluation.eval_datasets, config.evaluation.eval_only
    folders = on_rank_zero(lambda: find_evaluation_folders(paths, data, listing, may_overlap=is_evaluation))
    needs_training = bool(listing) and not (is_evaluation and data.held_out_fraction == 0)
    opened = OpenedData(
        training=_open_datasets(listing, data, processes, index_folder) if needs_training else None,
        folders=tuple(
            (folder, _open_datasets((folder.files,), folder.config, processes, index_folder)) for folder in folders
        ),
    )
    if opened.training is not None:
        needed = working_set_bytes(opened.training, data) * processes.local_world_size // processes.world_size
        on_every_rank(lambda: check_cache(needed, data, processes))
        on_rank_zero(partial(warn_about_datasets, opened.training, data))
    for folder, datasets in opened.folders:
        on_rank_zero(partial(warn_about_datasets, datasets, folder.config))
    return opened


def check_cache(needed: int, config: DataConfig, processes: Processes) -> None:
    """Warn about a cache below what a machine has in use at a time, and refuse one below a quarter of it."""
    if parse_bytes(config.data_cache_size) >= needed:
        return
    problem = (
        f"--data_cache_size={config.data_cache_size} is less than the {format_bytes(needed)} of data in object stores "
        "that each machine has in use at a time"
    )
    if 4 * parse_bytes(config.data_cache_size) < needed:
        raise ConfigError(f"{problem}, and less than a quarter of them: most would be fetched again and again")
    if processes.is_main:
        log.warning("%s: some of it is fetched again and again", problem)


def _open_datasets(
    listing: tuple[DatasetFiles, ...], config: DataConfig, processes: Processes, index_folder: str | None
) -> OpenedDatasets:
    if index_folder is not None:
        listing = on_rank_zero(lambda: tuple(with_content(files, config) for files in listing))
        indexed_by_rank = gather_from_every_rank(lambda: [is_indexed(files, config) for files in listing])
        elsewhere = replace(config, index_path=index_folder)
        configs = [config if all(indexed) else elsewhere for indexed in zip(*indexed_by_rank, strict=True)]
        parts = [_open_datasets((files,), each, processes, None) for files, each in zip(listing, configs, strict=True)]
        return replace(parts[0], datasets=tuple(dataset for part in parts for dataset in part.datasets))
    listing = on_rank_zero(lambda: build_indices(listing, config))
    for files in listing:
        if files.is_remote:
            _share_index(files, config, processes)
    # Nodes may not share the cache folder of the indices. If they do, this call finds the indices of rank 0.
    is_first_of_node = processes.local_rank == 0
    on_every_rank(lambda: build_indices(listing, config) if is_first_of_node else None)
    return on_every_rank(lambda: open_datasets(listing, config, processes.local_world_size))


def _share_index(files: DatasetFiles, config: DataConfig, processes: Processes) -> None:
    """Send the index that rank 0 has built to machines that lack it, so that one machine alone reads the store."""
    lacks = gather_from_every_rank(lambda: processes.local_rank == 0 and find_index(files, config) is None)
    if not any(lacks):
        return
    index = find_index(files, config) if processes.is_main else None
    content = np.zeros(0, np.uint8) if index is None else np.memmap(index.path, np.uint8, "r")
    begins = range(0, on_rank_zero(lambda: len(content)), _PIECE_BYTES)

    def share() -> None:
        pieces = (on_rank_zero(content[begin : begin + _PIECE_BYTES].tobytes) for begin in begins)
        try:
            if lacks[processes.rank]:
                receive_index(files, config, pieces)
        finally:
            deque(pieces, maxlen=0)  # all processes take part until the end, also if one cannot write

    on_every_rank(share)


def open_evaluation_sources(
    config: TrainConfig,
    data: OpenedData,
    batch: BatchSizes,
    processes: Processes,
    dims: Dims,
    record: EvaluationRecord,
    deciders: Sequence[Tasks | Evaluators | None] = (),
) -> tuple[list[EvaluationSource], EvaluationRecord]:
    """Open the evaluation sets: the held-out documents of all datasets, and each folder of `--eval_datasets`.

    Called at the start, so that a set with too few documents fails early.

    Args:
        record: of the first start of the run; empty in a new run, and in a run that recorded no sets.
        deciders: what has other numbers that `--best_by` may name.

    Returns:
        The sources, and the record for the run's checkpoints.

    Raises:
        DataError: a set has too few tokens for one sample.
        ConfigError: `--best_by` names no set and nothing of the deciders, or a set that gets no sequence of
            `eval_batches`.
    """
    asked = config.evaluation.eval_batches * batch.global_batch_size
    sequences = asked if record.sequences is None else record.sequences
    weights, vocab_size = record.weights, resolve_shape(config.model).vocab_size
    rank, seed, group = dims.data_rank, config.run.seed, dims.context_group
    parts: list[tuple[OpenedDatasets | None, DataConfig, SplitName, str | None]] = []
    if config.data.held_out_fraction > 0:
        parts.append((data.training, config.data, "held_out", None))
    parts += [(opened, folder.config, "train", folder.name) for folder, opened in data.folders]
    sources: list[EvaluationSource] = []
    counts: dict[str, int] = {}
    for opened, settings, split, named in parts:
        open_loader = partial(
            build_evaluation_loader, opened, settings, batch, rank, seed, vocab_size, split, sequences, group
        )
        loader, found, weights_now = on_every_rank(open_loader)
        kept = weights if weights.keys() == weights_now.keys() else weights_now
        weights = kept if named is None else weights
        # The sequences of a set are the first of its order, so these values determine them.
        common = {"seq_length": settings.seq_length, "document_mask": settings.document_mask}
        sets = {named or each.name: each for each in loader.reader.sources}
        counts.update((name, found[each.name]) for name, each in sets.items())
        definitions = tuple(
            {**common, "data": each.fingerprint, "sequences": counts[name]} for name, each in sets.items()
        )
        shares = tuple(kept[each.name] for each in sets.values())
        sources.append(EvaluationSource(tuple(sets), _batch_opener(loader, processes), shares, definitions))
    _check_best_by(config, counts, [each for each in deciders if each is not None])
    for name in (name for name, count in counts.items() if count == 0):
        log.info(
            "evaluation set %s gets none of the %d sequences of an evaluation, so it has no scores", name, sequences
        )
    if not sources:
        return [], record
    if sequences != asked:
        log.info("evaluations read %d sequences, as since the first start, not %d (--eval_batches)", sequences, asked)
    return sources, EvaluationRecord(sequences, weights)


def _check_best_by(config: TrainConfig, counts: dict[str, int], deciders: Sequence[Tasks | Evaluators]) -> None:
    best_by = config.evaluation.best_by
    if best_by is None or counts.get(best_by):
        return
    if best_by in counts or not deciders:
        raise ConfigError(
            f"--best_by={best_by} gets no sequence of --eval_batches={config.evaluation.eval_batches} batches; the "
            f"evaluation sets are {', '.join(counts)}"
        )
    if all(each.best_by(best_by) is None for each in deciders):
        there = [*counts, *(name for each in deciders for name in each.names())]
        raise ConfigError(f"--best_by={best_by} is none of what evaluations find: {', '.join(there)}")


def byte_lengths(config: TrainConfig, processes: Processes, vocab_size: int) -> torch.Tensor | None:
    """Return the text bytes of each token, [V] on the device; None if no tokenizer tells them."""
    path = config.data.tokenizer_path
    lengths = None if path is None else on_rank_zero(lambda: load_fitting_tokenizer(path, vocab_size).byte_lengths())
    if lengths is None:
        return None
    table_V = torch.zeros(vocab_size, dtype=torch.int64)
    table_V[: len(lengths)] = torch.tensor(lengths[:vocab_size])
    return table_V.to(processes.device)


def _batch_opener(loader: Loader, processes: Processes) -> Callable[[], AbstractContextManager[Iterable[StepBatch]]]:
    """Return a context manager that yields the loader's batches from the first one."""

    @contextmanager
    def open_batches() -> Iterator[Iterable[StepBatch]]:
        loader.rewind()
        with closing(read_batches(loader, processes.rank)) as batches:
            yield processes.activity.watch(batches)

    return open_batches


def read_batches(loader: Loader, rank: int) -> Generator[StepBatch, None, None]:
    """Yield the loader's batches until closed; a read error names this rank, since the other ranks do not see it.

    An error in a reading thread is raised here, too, at the step whose batch it was reading.
    """
    try:
        with loader:
            yield from loader
    except PretrainError as error:
        error.rank = rank
        raise
    except Exception as error:  # a bug: it keeps its traceback
        error.add_note(f"on rank {rank}, reading the batch of step {loader.next_step + 1}")
        raise
    except SystemExit as error:
        exited = DataError(f"a data-reading thread has exited ({error!r}) at step {loader.next_step + 1}")
        exited.rank = rank
        raise exited from error
