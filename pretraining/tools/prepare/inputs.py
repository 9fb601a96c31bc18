"""List of the input files, in a fixed order.

    inputs (files, folders, globs; or Python's standard library) --> [InputFile]

The order depends on the inputs and the file names only, not on the file system. The ending of a file tells its format:
`.jsonl` and `.ndjson` hold a document per line, `.parquet`, `.arrow` and `.feather` a document per row, and any other
file is one document. Text files may be compressed (`.gz`, `.zst`).
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.errors import DataError
from pretraining.files import exists, is_file, is_folder
from pretraining.tools.commands import COMPRESSED_ENDINGS

SMALLEST_MODULE_BYTES = 200
"""Smaller modules, such as empty `__init__.py` files, are left out."""

# Tests and modules of data would be a fifth of the text, and are unlike the rest.
LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "msilib"}
LEFT_OUT_FILES = {"html/entities.py", "this.py"}
WILDCARDS = set("*?[")


@dataclass(frozen=True)
class InputFile:
    """A file of documents.

    Attributes:
        name: path relative to the input, with `/`; the same on every machine.
        size: bytes on disk.
    """

    path: Path
    name: str
    size: int

    @property
    def compression(self) -> str | None:
        """`gz`, `zst` or None."""
        ending = self.name.lower().rpartition(".")[2]
        return ending if f".{ending}" in COMPRESSED_ENDINGS else None

    @property
    def kind(self) -> str:
        """`lines` (a JSON object per line), `parquet`, `arrow`, or `text` (one document)."""
        name = self.name.lower()
        if name.endswith(".parquet"):
            return "parquet"
        if name.endswith((".arrow", ".feather")):
            return "arrow"
        if self.compression is not None:
            name = name[: -len(self.compression) - 1]
        return "lines" if name.endswith((".jsonl", ".ndjson")) else "text"


def list_files(inputs: Sequence[str], extensions: Sequence[str]) -> list[InputFile]:
    """Return each file of the inputs once: in the order of the inputs, and by name within a folder or glob.

    Args:
        inputs: files, globs, and folders (walked recursively, following links, without hidden names and prepared
            datasets).
        extensions: endings of files to take from folders, without the first dot; `.gz` and `.zst` may follow.

    Raises:
        DataError: an input does not exist, cannot be read, or has no files.
    """
    plain = [f".{extension.lower().lstrip('.')}" for extension in extensions]
    endings = tuple(ending + more for ending in plain for more in ("", *COMPRESSED_ENDINGS))
    files: list[InputFile] = []
    seen: set[tuple[int, int]] = set()
    for given in inputs:
        before = len(files)
        try:
            for path, name in _paths_of(Path(given).expanduser(), endings):
                status = path.stat()
                identity = (status.st_dev, status.st_ino)
                if stat.S_ISREG(status.st_mode) and not (identity in seen and status.st_ino):
                    seen.add(identity)
                    files.append(InputFile(path, name, status.st_size))
        except OSError as error:
            raise DataError(
                f"--input_path: it cannot be read: {error.strerror}. Repair it, or leave it out",
                path=error.filename or given,
            ) from error
        if len(files) == before:
            raise DataError(
                "--input_path: no such file or folder, or no new file in it. Folders are searched for "
                f"{', '.join(plain)} (--extensions); for a comma in a name write ?",
                path=given,
            )
    return files


def fingerprint(names_and_sizes: Sequence[tuple[str, int]]) -> str:
    """Return a hash of names, sizes and order, which identifies an input without reading it."""
    listing = "".join(f"{name}\0{size}\n" for name, size in names_and_sizes)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def even_cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """Return (begin, end) of `pieces` almost equal ranges of a length."""
    return list(pairwise(length * i // pieces for i in range(pieces + 1)))


def _paths_of(path: Path, endings: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Yield the paths of one input with their names relative to it."""
    if is_folder(path):
        yield from sorted(_walk(path, endings))
    elif exists(path):
        yield path, path.name
    elif WILDCARDS.intersection(str(path)):
        # Names are relative to the last folder without a wildcard.
        fixed = next(parent for parent in path.parents if not WILDCARDS.intersection(str(parent)))
        # Unlike Path.glob, glob.glob takes absolute patterns and skips hidden names.
        for match in sorted(Path(found) for found in glob.glob(str(path), recursive=True)):  # noqa: PTH207
            yield match, match.relative_to(fixed).as_posix()


def _walk(root: Path, endings: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder with one of the endings."""

    def fail(error: OSError) -> None:  # by default, os.walk skips folders that it cannot read
        raise error

    visited: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        status = Path(folder).stat()
        # Skip links to a folder that was visited, and datasets that prepare wrote below the input.
        if (status.st_dev, status.st_ino) in visited or (MANIFEST_FILE in names and Path(folder) != root):
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(folder, name) for name in names if name.lower().endswith(endings) and name[0] != "."):
            yield path, path.relative_to(root).as_posix()


def standard_library_files(root: Path | None = None) -> list[InputFile]:
    """Return the modules of Python's standard library, sorted by name: text that every machine has.

    About ten megabytes of code and English, on which a model of a few million parameters learns visibly within minutes
    on a CPU. A module is a document. The text depends on the Python version. Installed packages are left out.

    Args:
        root: folder of the library; None = that of the running Python.

    Raises:
        DataError: this Python has no source files.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [
        InputFile(path, path.relative_to(root).as_posix(), path.stat().st_size)
        for top in sorted(sys.stdlib_module_names)
        for path in (root / f"{top}.py", *sorted((root / top).rglob("*.py")))
        if is_file(path)
    ]
    modules = [
        file
        for file in files
        if file.size >= SMALLEST_MODULE_BYTES
        and file.name not in LEFT_OUT_FILES
        and not LEFT_OUT_FOLDERS.intersection(file.name.split("/")[:-1])
    ]
    if not modules:
        problem = "--source=stdlib: this Python came without its sources"
        raise DataError(f"{problem}. Install them, or set --input_path", path=root)
    return modules
