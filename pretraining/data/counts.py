"""What a counts file says of a dataset's files, compared with what they hold.

fms-fsdp keeps a table `meta/*counts*.csv` beside its datasets, with the header `dataset/filename,documents,tokens`, and
takes the documents of each file from it. Here everything is counted in the files themselves. Where such a table is
there all the same, it tells of files that were cut short, swapped or lost since it was made.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from pretraining.data.files import COUNTS_FILES, DatasetFiles

_FILES_SHOWN = 3


def describe_contradictions(files: DatasetFiles, held: Mapping[str, tuple[int, int]]) -> str | None:
    """Say in a line how the counts files contradict what a dataset's files hold; None where nothing does.

    Args:
        files: the dataset.
        held: documents and tokens that are stored in each file, by path.
    """
    lines = []
    for place, dataset in _places(files):
        try:
            counts = _read(place, dataset)
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            lines.append(f"{place} cannot be read ({type(error).__name__}: {error}), so nothing is compared with it")
            continue
        wrong = [text for path, count in counts.items() if (text := _contradiction(files, path, count, held.get(path)))]
        if wrong:
            more = f" and {len(wrong) - _FILES_SHOWN:,} more" if len(wrong) > _FILES_SHOWN else ""
            lines.append(f"{place} contradicts the files, which are believed: {'; '.join(wrong[:_FILES_SHOWN])}{more}")
    return f"dataset '{files.name}': {'; '.join(lines)}" if lines else None


def _places(files: DatasetFiles) -> Iterator[tuple[Path, str]]:
    """Counts files, from beside the dataset up to data_path, each with the name that the dataset has there."""
    folder = Path(files.folder)
    for parent in folder.parents[: len(Path(files.name).parts)]:
        for place in sorted(parent.glob(COUNTS_FILES)):
            yield place, folder.relative_to(parent).as_posix()


def _read(place: Path, dataset: str) -> dict[str, tuple[int, int]]:
    """Documents and tokens of the dataset's files, by path. A row names `dataset/path`, whatever stands before that."""
    counts = {}
    with place.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            _, found, path = f"/{row['dataset/filename']}".partition(f"/{dataset}/")
            if found:
                counts[path] = (int(row["documents"]), int(row["tokens"]))
    return counts


def _contradiction(files: DatasetFiles, path: str, count: tuple[int, int], held: tuple[int, int] | None) -> str | None:
    if held is None:
        return None if Path(files.folder, path).exists() else f"{path} is gone"
    if count == held:
        return None
    return f"{path} has {held[0]:,} documents of {held[1]:,} tokens, not {count[0]:,} of {count[1]:,}"
