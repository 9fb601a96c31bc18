"""Which files there are to read, and in which order.

    inputs (files, folders, globs; or Python's standard library) --> [InputFile]

The order is a function of the inputs and the files' names only, never of the file system's. What is in a file follows
from its ending: `.jsonl` and `.ndjson` hold a document a line, `.parquet`, `.arrow` and `.feather` a document a row,
any other file is one document. `.gz` and `.zst` behind the ending of a text are unpacked on the way.
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

from pretraining.config.commands import COMPRESSED_ENDINGS
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.errors import DataError
from pretraining.files import exists, is_file, is_folder

SMALLEST_MODULE_BYTES = 200
"""Empty `__init__.py` files and one-line stubs teach nothing."""

# Tests (long tables of cases), and modules that are data rather than code: they are unlike the rest and would be a
# fifth of the text.
LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "msilib"}
LEFT_OUT_FILES = {"html/entities.py", "this.py"}
WILDCARDS = set("*?[")


@dataclass(frozen=True)
class InputFile:
    """A file of documents.

    Attributes:
        name: path below the input that it was found under, with `/`: the same on every machine.
        size: in bytes, on disk.
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
        """`lines` (a JSON object a line), `parquet`, `arrow`, or `text` (one document)."""
        name = self.name.lower()
        if name.endswith(".parquet"):
            return "parquet"
        if name.endswith((".arrow", ".feather")):
            return "arrow"
        if self.compression is not None:
            name = name[: -len(self.compression) - 1]
        return "lines" if name.endswith((".jsonl", ".ndjson")) else "text"


def list_files(inputs: Sequence[str], extensions: Sequence[str]) -> list[InputFile]:
    """Find the files of some inputs: in the order of the inputs, inside a folder or glob by name, each file once.

    Args:
        inputs: files, folders (walked to the bottom, following links, without hidden names and prepared datasets)
            and globs.
        extensions: endings, without the first dot, of the files to take from folders; `.gz` and `.zst` may follow.

    Raises:
        DataError: an input does not exist, cannot be read, or gives no file.
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
                f"--input_path: it cannot be read: {error.strerror}. Mend it, or leave it out",
                path=error.filename or given,
            ) from error
        if len(files) == before:
            raise DataError(
                "--input_path: there is no such file or folder, or no text in it that is not listed already. Folders "
                f"are searched for {', '.join(plain)} (--extensions); for a comma in a name write ?",
                path=given,
            )
    return files


def fingerprint(names_and_sizes: Sequence[tuple[str, int]]) -> str:
    """Hash names, sizes and order: what an input is recognised by without reading it."""
    listing = "".join(f"{name}\0{size}\n" for name, size in names_and_sizes)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def even_cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """Cut a length into (begin, end) of almost equal ranges."""
    return list(pairwise(length * i // pieces for i in range(pieces + 1)))


def _paths_of(path: Path, endings: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """List paths of one input with their names below it."""
    if is_folder(path):
        yield from sorted(_walk(path, endings))
    elif exists(path):
        yield path, path.name
    elif WILDCARDS.intersection(str(path)):
        # Names start below the last folder without a wildcard.
        fixed = next(parent for parent in path.parents if not WILDCARDS.intersection(str(parent)))
        # Unlike Path.glob, glob.glob takes absolute patterns and passes hidden names over.
        for match in sorted(Path(found) for found in glob.glob(str(path), recursive=True)):  # noqa: PTH207
            yield match, match.relative_to(fixed).as_posix()


def _walk(root: Path, endings: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """List files below a folder with one of the endings."""

    def refuse(error: OSError) -> None:  # os.walk passes over what it cannot read unless told otherwise
        raise error

    visited: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        status = Path(folder).stat()
        # A link back to a folder above; or token files that were made here, of an output below the input.
        if (status.st_dev, status.st_ino) in visited or (MANIFEST_FILE in names and Path(folder) != root):
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(folder, name) for name in names if name.lower().endswith(endings) and name[0] != "."):
            yield path, path.relative_to(root).as_posix()


def standard_library_files(root: Path | None = None) -> list[InputFile]:
    """List the modules of Python's standard library worth learning from, by name: text that every machine has.

    It is for trying things out: some ten megabytes of well-written code and English, on which a model of a few million
    parameters visibly learns within minutes on a CPU. One module is one document. The text depends on the version of
    Python. Only modules that Python names as its own are taken, no packages installed beside them.

    Args:
        root: the library's folder; None = the running Python's.

    Raises:
        DataError: there is no text, as in a Python that came without sources.
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
        raise DataError(f"{problem}. Install them, or give text with --input_path", path=root)
    return modules
