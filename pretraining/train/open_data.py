"""Opening of a job's data: the training datasets and the evaluation sets.

    listing (rank 0) -> indices (rank 0, then one process per node) -> datasets (all) -> loaders

All functions are collective calls, and raise errors on all ranks alike.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from pretraining.config.training import DataConfig, TrainConfig
from pretraining.data.batch import StepBatch
from pretraining.data.dataset import (
    build_indices,
    is_indexed,
    open_datasets,
    warn_about_datasets,
    with_content,
    working_set_bytes,
)
from pretraining.data.evaluation_sets import EvaluationFolder, find_evaluation_folders
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.storage.dataset_files import DatasetFiles, list_datasets
from pretraining.data.storage.index_folder import find_index, receive_index
from pretraining.data.tokenizer import load_tokenizer
from pretraining.distributed.processes import Processes, gather_from_every_rank, on_every_rank, on_rank_zero
from pretraining.errors import ConfigError, DataError, PretrainError
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


def open_data(
    config: TrainConfig, processes: Processes, earlier: Collection[str] = (), index_folder: str | None = None
) -> OpenedData:
    """Open a job's datasets and evaluation folders in every process.

    Args:
        earlier: names of datasets that the run has trained on.
        index_folder: folder for new indices; None = where the settings say.
    """
    data = config.data
    listing: tuple[DatasetFiles, ...] = ()
    if data.data_path is not None and not data.use_dummy_dataset:
        # Listing 100,000 files is slow on a shared file system: rank 0 lists them for all.
        listing = on_rank_zero(lambda: list_datasets(data, earlier))
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


def byte_lengths(config: TrainConfig, processes: Processes, vocab_size: int) -> torch.Tensor | None:
    """Return the text bytes of each token, [V] on the device; None, with a log line, if the tokenizer has none."""
    path = config.data.tokenizer_path
    if path is None:
        return None
    lengths = on_rank_zero(lambda: load_tokenizer(path).byte_lengths())
    if lengths is None:
        log.info("evaluation  no bits per byte: the tokens of %s do not tell their bytes of text", path)
        return None
    table_V = torch.zeros(vocab_size, dtype=torch.int64)
    table_V[: len(lengths)] = torch.tensor(lengths[:vocab_size])
    return table_V.to(processes.device)


def batch_opener(loader: Loader, processes: Processes) -> Callable[[], AbstractContextManager[Iterable[StepBatch]]]:
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
