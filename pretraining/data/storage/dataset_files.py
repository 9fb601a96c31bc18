"""The listing of token files: `data_path/<dataset>/**/*.arrow`, another format's files, or a single file.

Rank 0 lists the files once per job and broadcasts the listing. Hidden files and folders, such as the index, are
skipped. Symbolic links are followed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from pretraining.config.plugins import TOKEN_FORMATS
from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import format_class
from pretraining.errors import DataError
from pretraining.files import entries_of, exists, is_file, is_folder
from pretraining.text import list_some

MANIFEST_FILE = "prepare.json"
"""Manifest of a folder that `pretrain prepare` wrote; a folder that has it is complete."""


@dataclass(frozen=True)
class DatasetFiles:
    """The token files of a dataset, in canonical order, the same on every host.

    Attributes:
        name: folder or single file, relative to data_path.
        folder: absolute path of the folder, or of the single file's parent.
        paths: relative to the folder, with forward slashes, sorted by code points.
        sizes: bytes of each file.
        digest: hexadecimal 128-bit hash of paths and sizes.
    """

    name: str
    folder: str
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    digest: str
    file_type: str
    is_file: bool = False

    def path(self, number: int) -> str:
        """Return the absolute path of a file by its number."""
        return f"{self.folder}/{self.paths[number]}"


def list_datasets(config: DataConfig) -> tuple[DatasetFiles, ...]:
    """Find the configured datasets, sorted by name; without `datasets`, every sub-folder with token files.

    Raises:
        DataError: a folder is missing, has no token files, or has files of two formats.
        ConfigError: the format is unknown.
    """
    if config.data_path is None:
        raise DataError("no data: give --data_path=<folder with a sub-folder per dataset>, or --use_dummy_dataset=true")
    root = Path(config.data_path).expanduser().absolute()
    if not is_folder(root):
        itself = f"; for this file, give --data_path={root.parent} --datasets={root.name}" if is_file(root) else ""
        raise DataError(f"--data_path is not a folder{itself}. {how_to_prepare(root)}", path=root)
    kinds = TOKEN_FORMATS if config.file_type == "auto" else (config.file_type,)
    formats = {name: format_class(name).suffix for name in kinds}
    patterns = " or ".join(f"*{suffix}" for suffix in formats.values())
    names = [name.strip("/") for name in config.datasets]
    if len(set(names)) < len(names):
        raise DataError(f"--datasets repeats a name: {', '.join(names)}")
    for name in names:
        if not exists(root / name):
            there = list_some(_sub_folders(root), 12) or "no folders"
            raise DataError(f"--datasets names '{name}', which does not exist; {root} has {there}", path=root / name)
    scanned = {name: _scan(root / name, formats) for name in names or _sub_folders(root)}
    found = {name: files for name, files in scanned.items() if files}
    for name in names:
        if name not in found:
            place = root / name
            raise DataError(f"dataset '{name}' has no {patterns} files. {how_to_prepare(place)}", path=place)
    if not found:
        raise DataError(
            f"no sub-folder has {patterns} files. For this folder itself, give --data_path={root.parent} "
            f"--datasets={root.name}. {how_to_prepare(root)}",
            path=root,
        )
    return tuple(_dataset(root, name, found[name], formats) for name in sorted(found))


def describe_changes(before: dict[str, int], after: dict[str, int]) -> str:
    """Return the differences between two listings (path -> bytes); empty if they are equal."""
    added = sorted(after.keys() - before.keys())
    removed = sorted(before.keys() - after.keys())
    resized = sorted(path for path in before.keys() & after.keys() if before[path] != after[path])
    changes = (("added", added), ("removed", removed), ("changed in size", resized))
    return "; ".join(f"{what}: {list_some(paths, 12)}" for what, paths in changes if paths)


def _dataset(root: Path, name: str, files: dict[str, int], formats: dict[str, str]) -> DatasetFiles:
    kinds = [kind for kind, suffix in formats.items() if any(path.endswith(suffix) for path in files)]
    if len(kinds) > 1:
        raise DataError(
            f"dataset '{name}' has files of {' and '.join(kinds)}: give --file_type={kinds[0]}, or make two datasets",
            path=root / name,
        )
    paths = tuple(sorted(files))
    sizes = tuple(files[path] for path in paths)
    digest = hashlib.blake2b(digest_size=16)
    for path, size in zip(paths, sizes, strict=True):
        digest.update(f"{path}\0{size}\n".encode("utf-8", "surrogateescape"))
    place = root / name
    alone = is_file(place)
    return DatasetFiles(
        name, str(place.parent if alone else place), paths, sizes, digest.hexdigest(), kinds[0], is_file=alone
    )


def _scan(folder: Path, formats: dict[str, str]) -> dict[str, int]:
    """Return the sizes of files with these formats, by relative path, below a folder; `folder` may be a file."""
    suffixes = tuple(formats.values())
    if is_file(folder):
        return {folder.name: folder.stat().st_size} if folder.name.endswith(suffixes) else {}
    found: dict[str, int] = {}

    def visit(path: Path, prefix: str, above: frozenset[tuple[int, int]]) -> None:
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:  # a link to a parent folder
            return
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    visit(Path(entry.path), f"{prefix}{entry.name}/", above | {identity})
                elif entry.name.endswith(suffixes):
                    # Follows links, so that a broken link is an error, not a missing file.
                    found[prefix + entry.name] = entry.stat().st_size

    try:
        visit(folder, "", frozenset())
    except OSError as error:
        raise DataError(f"cannot be listed: {error.strerror}", path=error.filename or folder) from error
    return found


def _sub_folders(folder: Path) -> list[str]:
    return sorted(child.name for child in entries_of(folder) if not child.name.startswith(".") and is_folder(child))


def how_to_prepare(path: str | Path) -> str:
    """Return the command that makes token files from a folder or file."""
    command = f"pretrain prepare --input_path={shlex.quote(str(path))}"
    return f"`{command}` makes token files from text, Parquet and saved datasets"
