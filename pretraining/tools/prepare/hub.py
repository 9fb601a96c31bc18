"""Reader of Hugging Face datasets, through the `datasets` library (extra `hf`): by name, or a local folder.

A dataset of the Hub, or a folder of data files, is streamed shard by shard (a shard is a data file) and never stored. A
folder that `save_to_disk` wrote is read in place, in ranges of rows. Documents keep the order of the library.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pretraining.data.storage.dataset_files import STATE_FILE
from pretraining.errors import DataError
from pretraining.files import exists, is_folder
from pretraining.tools.prepare.documents import Document, even_cuts
from pretraining.tools.prepare.inputs import SAVED_SPLITS, fingerprint
from pretraining.tools.prepare.tables import ROWS_AT_ONCE, documents_of_rows, field_type

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(frozen=True)
class HubSplit:
    """A split of a dataset on the Hub or in a local folder; config is None if there is only one."""

    path: str
    config: str | None
    split: str

    def __str__(self) -> str:
        config = "" if self.config is None else f", {self.config}"
        return f"{self.path}{config} ({self.split})"


def shards_of(split: HubSplit, wanted_bytes: int) -> tuple[list[tuple[int, int, int]], str]:
    """Cut a split into shards (streamed) or ranges of rows (saved to disk) of about `wanted_bytes`.

    Returns:
        (begin, end, bytes) of each shard or range, with 0 bytes for an unknown size; and a hash of the file names with
        their sizes and the revision on the Hub.

    Raises:
        DataError: the library is missing, or there is no such dataset, configuration or split.
    """
    _open_split.cache_clear()  # the dataset may have changed since an earlier call in this process
    opened = _open_split(split)
    if not _is_streamed(opened):
        size = sum(Path(file["filename"]).stat().st_size for file in opened.cache_files)
        count = max(-(-size // wanted_bytes), 1)
        cuts = zip(even_cuts(opened.num_rows, count), even_cuts(size, count), strict=True)
        ranges = [(begin, end, after - before) for (begin, end), (before, after) in cuts]
        return ranges, fingerprint([(opened._fingerprint, opened.num_rows)])
    files = _data_files(split)
    sizes, shards = [size for _, size in files], opened.num_shards
    if len(sizes) != shards:  # archives have more shards than files
        sizes = [sum(sizes) // shards] * shards
    return [(i, i + 1, sizes[i]) for i in range(shards)], fingerprint(files)


def local_files(split: HubSplit) -> list[Path]:
    """Return the files of a split of a local folder; none on the Hub."""
    opened, folder = _open_split(split), Path(split.path).expanduser()
    if not _is_streamed(opened):
        return [Path(file["filename"]) for file in opened.cache_files]
    return [folder.absolute() / name for name, _ in _data_files(split)] if is_folder(folder) else []


def column_type_of(split: HubSplit, column: str) -> pa.DataType:
    """Return the type of a split's column; null if the split has no rows."""
    return next((rows.type for rows in _columns(split, _open_split(split), column, 1)), pa.null())


def read_shards(split: HubSplit, column: str, begin: int, end: int, size: int) -> Iterator[Document]:
    """Yield the documents of shards (streamed) or rows (saved to disk) of a split, `size` bytes on disk.

    Raises:
        DataError: the split cannot be read, or the column holds neither text nor token ids.
    """
    opened = _open_split(split)
    if _is_streamed(opened):
        parts = [(opened.shard(opened.num_shards, n), f"{split}, shard {n}", 0, 0.0) for n in range(begin, end)]
    else:
        parts = [(opened.select(range(begin, end)), str(split), begin, size / max(end - begin, 1))]
    for part, path, row, row_bytes in parts:
        for rows in _columns(split, part, column, ROWS_AT_ONCE):
            yield from documents_of_rows(rows, column, path, row, int(row_bytes * len(rows)))
            row += len(rows)


def _columns(split: HubSplit, opened: Dataset | IterableDataset, column: str, count: int) -> Iterator[pa.Array]:
    """Yield a column of a split, `count` rows at a time."""
    if opened.features is not None:  # otherwise the first rows give the type
        field_type(opened.features.arrow_schema, column, str(split))
    with _errors_named(split, "it cannot be read"):
        for table in opened.select_columns([column]).with_format("arrow").iter(batch_size=count):
            yield from table.column(0).chunks or [pa.nulls(0)]


@contextmanager
def _errors_named(split: HubSplit, problem: str) -> Iterator[None]:
    """Turn any error into a DataError: the library, its file formats and the Hub raise many kinds of errors."""
    try:
        yield
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        cause = f"{problem}: {type(error).__name__}: {first_line}"
        raise DataError(f"{cause}. Check --hf_dataset, --hf_config and --hf_split", path=str(split)) from error


@functools.lru_cache(maxsize=4)
def _open_split(split: HubSplit) -> Any:
    """Return a `Dataset` if the split was saved to disk, else a streamed `IterableDataset`."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"--hf_dataset={split.path} needs the `datasets` package ({error}): pip install 'pretraining[hf]'"
        ) from error
    folder = Path(split.path).expanduser()
    with _errors_named(split, "it cannot be opened"):
        if not any(exists(folder / name) for name in (STATE_FILE, SAVED_SPLITS)):
            return datasets.load_dataset(_place(split), split.config, split=split.split, streaming=True)
        loaded = datasets.load_from_disk(str(folder))
        # A folder with a single Dataset has no split names.
        return loaded if isinstance(loaded, datasets.Dataset) else loaded[split.split]


def _data_files(split: HubSplit) -> list[tuple[str, int]]:
    """Return names and sizes of the files of a streamed split, in order; names on the Hub hold the revision."""
    import datasets
    import fsspec

    folder = Path(split.path).expanduser()
    files = []
    with _errors_named(split, "its files cannot be listed"):
        builder = datasets.load_dataset_builder(_place(split), split.config)
        for url in (builder.config.data_files or {}).get(split.split, ()):
            system, path = fsspec.core.url_to_fs(url)
            name = Path(url).relative_to(folder.absolute()).as_posix() if is_folder(folder) else url
            files.append((name, int(system.size(path) or 0)))
    return files


def _place(split: HubSplit) -> str:
    folder = Path(split.path).expanduser()
    return str(folder.absolute()) if is_folder(folder) else split.path


def _is_streamed(opened: Dataset | IterableDataset) -> bool:
    return hasattr(opened, "num_shards")
