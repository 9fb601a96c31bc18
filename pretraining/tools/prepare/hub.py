"""Hugging Face datasets as pieces, through the `datasets` library (extra `hf`): by name, or a local folder.

A dataset of the Hub and a folder of data files are streamed, a shard (a data file) at a time, so that nothing is
downloaded before it is encoded and nothing is stored; a folder that `save_to_disk` wrote is read in place, in ranges of
rows. Either way documents come in the library's order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pretraining.errors import DataError
from pretraining.files import exists, is_folder
from pretraining.tools.prepare.inputs import even_cuts, fingerprint
from pretraining.tools.prepare.tables import ROWS_AT_ONCE, field_type, pieces_of_rows
from pretraining.tools.prepare.text import Piece

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_SAVED_TO_DISK = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset, by its name on the Hub or a local folder; config is None where there is only one."""

    path: str
    config: str | None
    split: str

    def __str__(self) -> str:
        config = "" if self.config is None else f", {self.config}"
        return f"{self.path}{config} ({self.split})"


@dataclass(frozen=True)
class HubShards:
    """How a split can be cut.

    Attributes:
        ranges: (begin, end, bytes) of each shard or range of rows; 0 bytes where the size is unknown.
        fingerprint: of the files with their sizes, and of the revision of the Hub.
    """

    ranges: tuple[tuple[int, int, int], ...]
    fingerprint: str


def shards_of(split: HubSplit, wanted_bytes: int) -> HubShards:
    """Finds out what a split consists of; ranges of rows have about the wanted bytes.

    Raises:
        DataError: the library is missing, or there is no such dataset, configuration or split.
    """
    _open_split.cache_clear()  # it may have changed since an earlier call in this process
    opened = _open_split(split)
    if not _is_streamed(opened):
        size = sum(Path(file["filename"]).stat().st_size for file in opened.cache_files)
        ranges = max(-(-size // wanted_bytes), 1)
        bounds = zip(even_cuts(opened.num_rows, ranges), even_cuts(size, ranges), strict=True)
        cuts = tuple((begin, end, after - before) for (begin, end), (before, after) in bounds)
        return HubShards(cuts, fingerprint([(opened._fingerprint, opened.num_rows)]))
    files = _data_files(split)
    sizes, shards = [size for _, size in files], opened.num_shards
    if len(sizes) != shards:  # archives have more shards than files
        sizes = [sum(sizes) // shards] * shards
    return HubShards(tuple((i, i + 1, sizes[i]) for i in range(shards)), fingerprint(files))


def column_type_of(split: HubSplit, column: str) -> pa.DataType:
    """The type of a split's column; null where the split has no rows."""
    for table in _tables(split, _open_split(split), column, 1):
        return table.schema.types[0]
    return pa.null()


def read_shards(split: HubSplit, column: str, begin: int, end: int, size: int) -> Iterator[Piece]:
    """Reads some shards (streamed) or rows (saved to disk) of a split; they are `size` bytes on disk.

    Raises:
        DataError: they cannot be read, or the column holds neither text nor token ids.
    """
    opened = _open_split(split)
    if _is_streamed(opened):
        for number in range(begin, end):
            shard = opened.shard(num_shards=opened.num_shards, index=number)
            yield from _pieces(split, shard, column, f"{split}, shard {number}", 0, 0)
    elif end > begin:
        yield from _pieces(split, opened.select(range(begin, end)), column, str(split), begin, size / (end - begin))


def _pieces(
    split: HubSplit, opened: Dataset | IterableDataset, column: str, place: str, first_row: int, row_bytes: float
) -> Iterator[Piece]:
    for table in _tables(split, opened, column, ROWS_AT_ONCE):
        for chunk in table.column(0).chunks:
            yield from pieces_of_rows(chunk, column, place, first_row, int(row_bytes * len(chunk)))
            first_row += len(chunk)


def _tables(split: HubSplit, opened: Dataset | IterableDataset, column: str, rows: int) -> Iterator[pa.Table]:
    """The column of a split, some rows at a time."""
    if opened.features is not None:  # else the first rows tell
        field_type(opened.features.arrow_schema, column, str(split))
    with _errors_named(f"{split} cannot be read"):
        yield from opened.select_columns([column]).with_format("arrow").iter(batch_size=rows)


@contextmanager
def _errors_named(problem: str, way_out: str = "") -> Iterator[None]:
    """Turns any error into one for users: the library, its file formats and the Hub raise errors of many kinds."""
    try:
        yield
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise DataError(f"{problem}: {type(error).__name__}: {first_line}{way_out}") from error


@functools.lru_cache(maxsize=4)
def _open_split(split: HubSplit) -> Any:
    """The split: a `Dataset` where it was saved to disk, else a streamed `IterableDataset`."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"--hf_dataset={split.path} needs the `datasets` package ({error}): pip install 'pretraining[hf]'"
        ) from error
    folder = Path(split.path).expanduser()
    way_out = ". Look at --hf_dataset (a name on the Hub or a folder), --hf_config and --hf_split"
    with _errors_named(f"the dataset {split} cannot be opened", way_out):
        if not any(exists(folder / name) for name in _SAVED_TO_DISK):
            return datasets.load_dataset(_place(split), split.config, split=split.split, streaming=True)
        loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.Dataset):  # a single split, whatever it was called
        return loaded
    if split.split not in loaded:
        raise DataError(f"{split.path} has no split {split.split!r}, but {', '.join(loaded)}: give --hf_split")
    return loaded[split.split]


def _data_files(split: HubSplit) -> list[tuple[str, int]]:
    """Names and sizes of the files of a streamed split, in order; a file of the Hub is named with its revision."""
    import datasets
    import fsspec

    folder = Path(split.path).expanduser()
    found = []
    with _errors_named(f"the files of {split} cannot be listed"):
        builder = datasets.load_dataset_builder(_place(split), split.config)
        for url in (builder.config.data_files or {}).get(split.split, ()):
            system, path = fsspec.core.url_to_fs(url)
            name = Path(url).relative_to(folder.absolute()).as_posix() if is_folder(folder) else url
            found.append((name, int(system.size(path) or 0)))
    return found


def _place(split: HubSplit) -> str:
    folder = Path(split.path).expanduser()
    return str(folder.absolute()) if is_folder(folder) else split.path


def _is_streamed(opened: Dataset | IterableDataset) -> bool:
    return hasattr(opened, "num_shards")
