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

SMALLEST_CORPUS_BYTES = 2_000_000
SMALLEST_MODULE_BYTES = 200
"""Empty `__init__.py` files and one-line stubs teach nothing."""

# Tests (long tables of cases), and modules that are data rather than code: they are unlike the rest and would be a
# fifth of the text.
LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "msilib"}
LEFT_OUT_FILES = {"html/entities.py", "this.py"}


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
    """Finds the files of some inputs: in the order of the inputs, inside a folder or glob by name, each file once.

    Args:
        inputs: files, folders (walked to the bottom, following links, without hidden names and prepared datasets)
            and globs.
        extensions: endings, without the first dot, of the files to take from folders; `.gz` and `.zst` may follow.

    Raises:
        DataError: an input does not exist, cannot be read, or gives no file.
    """
    files: list[InputFile] = []
    seen: set[tuple[int, int]] = set()
    for given in inputs:
        before = len(files)
        try:
            found = [(path, name, path.stat()) for path, name in _paths_of(given, extensions)]
        except OSError as error:
            raise DataError(
                f"{error.filename or given} cannot be read: {error.strerror}. Mend it (a broken link? permissions?) or "
                "give another --input_path"
            ) from error
        for path, name, status in found:
            identity = (status.st_dev, status.st_ino)
            if stat.S_ISREG(status.st_mode) and not (identity in seen and status.st_ino):
                seen.add(identity)
                files.append(InputFile(path, name, status.st_size))
        if len(files) == before:
            endings = ", ".join(f".{extension}" for extension in extensions)
            raise DataError(
                f"{given} holds no text that is not listed already. Folders are searched for {endings}; --extensions "
                "changes that"
            )
    return files


def fingerprint(names_and_sizes: Sequence[tuple[str, int]]) -> str:
    """A hash of names, sizes and order: what an input is recognised by without reading it."""
    listing = "".join(f"{name}\0{size}\n" for name, size in names_and_sizes)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def even_cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """Cuts a length into (begin, end) of almost equal ranges."""
    return list(pairwise(length * i // pieces for i in range(pieces + 1)))


def _paths_of(given: str, extensions: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Paths of one input with their names below it."""
    path = Path(given).expanduser()
    if is_folder(path):
        plain = [f".{extension.lower().lstrip('.')}" for extension in extensions]
        yield from _walk(path, tuple(ending + more for ending in plain for more in ("", *COMPRESSED_ENDINGS)))
    elif exists(path):
        yield path, path.name
    elif set("*?[").intersection(given):
        # Names start below the last folder without a wildcard.
        fixed = next(parent for parent in path.parents if not set("*?[").intersection(str(parent)))
        # Unlike Path.glob, glob.glob takes absolute patterns and passes hidden names over.
        for match in sorted(Path(found) for found in glob.glob(str(path), recursive=True)):  # noqa: PTH207
            if not is_folder(match):
                yield match, match.relative_to(fixed).as_posix()
    else:
        raise DataError(
            f"--input_path: there is no file or folder {path.absolute()} (a comma parts inputs: of a name that has "
            "one, write it as ?)"
        )


def _walk(root: Path, endings: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Files below a folder with one of the endings, sorted by path."""

    def refuse(error: OSError) -> None:  # os.walk passes over what it cannot read unless told otherwise
        raise error

    found: list[Path] = []
    visited: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        status = Path(folder).stat()
        # A link back to a folder above; or token files that were made here, of an output below the input.
        if (status.st_dev, status.st_ino) in visited or (MANIFEST_FILE in names and Path(folder) != root):
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found.extend(
            Path(folder, name) for name in names if not name.startswith(".") and name.lower().endswith(endings)
        )
    for path in sorted(found):
        yield path, path.relative_to(root).as_posix()


def standard_library_files(root: Path | None = None, smallest_bytes: int = SMALLEST_CORPUS_BYTES) -> list[InputFile]:
    """Lists the modules of Python's standard library worth learning from, by name: text that every machine has.

    It is for trying things out: some ten megabytes of well-written code and English, on which a model of a few million
    parameters visibly learns within minutes on a CPU. One module is one document. The text depends on the version of
    Python. Only modules that Python names as its own are taken, no packages installed beside them.

    Args:
        root: the library's folder; None = the running Python's.

    Raises:
        DataError: there is less text than `smallest_bytes`, as in a Python that came without sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = (
        InputFile(path, path.relative_to(root).as_posix(), path.stat().st_size)
        for top in sorted(sys.stdlib_module_names)
        for path in (root / f"{top}.py", *sorted((root / top).rglob("*.py")))
        if is_file(path)
    )
    modules = [file for file in files if _is_kept(file)]
    size = sum(file.size for file in modules)
    if size < smallest_bytes:
        raise DataError(
            f"--source=stdlib: only {size / 1e6:.1f} MB of Python sources in {root}, {smallest_bytes / 1e6:.1f} MB "
            "are needed. This Python came without its sources: install the full one (Debian: libpython3-stdlib) or "
            "give your own text with --input_path"
        )
    return modules


def _is_kept(file: InputFile) -> bool:
    is_left_out = file.name in LEFT_OUT_FILES or LEFT_OUT_FOLDERS.intersection(file.name.split("/")[:-1])
    return file.size >= SMALLEST_MODULE_BYTES and not is_left_out
