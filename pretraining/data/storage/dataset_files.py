"""Which token files there are: `data_path/<dataset>/**/*.arrow` (or another format's), listed once a job.

Rank 0 makes the listing and broadcasts it, so that a hundred thousand files are asked for once. Hidden files and
folders (names that start with a dot) are not data: an index may be there. Symbolic links are followed.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pretraining.config.plugins import TOKEN_FORMATS
from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import format_class
from pretraining.errors import ConfigError, DataError, PathError
from pretraining.files import entries_of, is_file, is_folder, read_json

log = logging.getLogger(__name__)

MANIFEST_FILE = "prepare.json"
"""Says what a folder of token files holds that `pretrain prepare` made; a folder that has it is complete."""
COUNTS_FILES = "meta/*counts*.csv"
"""What other tools write beside their datasets: how many documents and tokens there are in each file."""
_NAMES_SHOWN = 12
_NAMES_OF_A_FOLDER = 64
"""Under so many a folder is listed. More have only folders with links to each other, whose ways are without number."""


@dataclass(frozen=True)
class DatasetFiles:
    """The token files of a dataset, in canonical order; the same on every host.

    Attributes:
        name: its folder relative to data_path; `folder` is the absolute path.
        paths: relative to the folder, with forward slashes, sorted by code points; `sizes` are their bytes.
        digest: 128 bits of hexadecimal over paths and sizes.
    """

    name: str
    folder: str
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    digest: str
    file_type: str

    def path(self, number: int) -> str:
        """Returns the absolute path of a file by its number in the canonical order."""
        return f"{self.folder}/{self.paths[number]}"


def list_datasets(config: DataConfig) -> tuple[DatasetFiles, ...]:
    """Finds the configured datasets, sorted by name: without `datasets`, every sub-folder that holds token files.

    Raises:
        DataError: a folder is missing, holds no token files, or files of two formats.
        ConfigError: there is no such format.
    """
    if config.data_path is None:
        raise DataError("no data: give --data_path=<folder with a sub-folder a dataset>, or --use_dummy_dataset=true")
    root = Path(config.data_path).expanduser().absolute()
    if not is_folder(root):
        raise DataError(f"data_path {root} is not a folder; {_what_is_in(root.parent)}")
    formats = _suffixes(config.file_type)
    if config.datasets:
        names = [name.strip("/") for name in config.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"--datasets names {', '.join(twice)} more than once")
        found = {name: _scan(_existing(root, name), formats) for name in names}
        for name, files in found.items():
            if not files:
                kinds = _patterns(formats)
                raise DataError(f"dataset '{name}' has no {kinds} files in {root / name}; {_what_is_in(root / name)}")
    else:
        has_counts = any(root.glob(COUNTS_FILES))
        names = [name for name in _sub_folders(root) if not (has_counts and name == "meta")]
        found = {name: _scan(root / name, formats) for name in names}
        found = {name: files for name, files in found.items() if files}
        if not found:
            raise DataError(_nothing_found(root, formats))
    datasets = tuple(_dataset(root, name, found[name], formats) for name in sorted(found))
    if config.token_dtype is not None and {files.file_type for files in datasets} <= {"arrow", "npy"}:
        raise ConfigError(f"--token_dtype={config.token_dtype} is for *.bin files, and there are none: leave it out")
    return datasets


def prepared_separator(config: DataConfig, eval_datasets: Iterable[str] = ()) -> int | None:
    """Return the end-of-text token that the prepare.json files beside the data name, and log it; None without any.

    Raises:
        ConfigError: datasets name different tokens.
        DataError: a prepare.json cannot be read.
    """
    folders = [Path(folder) for folder in eval_datasets]
    if config.data_path is not None:
        root = Path(config.data_path).expanduser()
        prepared = (path.parent for path in sorted(root.glob(f"[!.]*/{MANIFEST_FILE}")))
        folders = [*([root / name.strip("/") for name in config.datasets] or prepared), *folders]
    found: dict[str, int] = {}
    for folder in folders:
        path = folder.expanduser() / MANIFEST_FILE
        try:
            token = read_json(path)["tokenizer"]["end_of_text"]
            if token is not None and (not isinstance(token, int) or token < 0):
                raise ValueError(f"{token!r} is no token id")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} cannot be read ({type(error).__name__}: {error}), and it says which token ends documents. "
                "Prepare the dataset again, or give --sep_token"
            ) from error
        if token is not None:
            found[str(folder)] = token
    if len(set(found.values())) > 1:
        named = ", ".join(f"{folder}: {token}" for folder, token in found.items())
        raise ConfigError(f"datasets end their documents with different tokens ({named}): give --sep_token")
    separator = next(iter(found.values()), None)
    if separator is not None:
        log.info("sep_token   %s, the end_of_text of %s in %s", separator, MANIFEST_FILE, _shortened(list(found)))
    return separator


def describe_changes(before: dict[str, int], after: dict[str, int]) -> str:
    """Says what differs between two listings (path -> bytes); empty where nothing does."""
    added = sorted(after.keys() - before.keys())
    removed = sorted(before.keys() - after.keys())
    resized = sorted(path for path in before.keys() & after.keys() if before[path] != after[path])
    changes = (("added", added), ("removed", removed), ("changed in size", resized))
    return "; ".join(f"{what}: {_shortened(paths)}" for what, paths in changes if paths)


def _suffixes(file_type: str) -> dict[str, str]:
    """Returns how files of each format that is looked for end, by the format's name."""
    return {name: format_class(name).suffix for name in (TOKEN_FORMATS if file_type == "auto" else (file_type,))}


def _patterns(formats: dict[str, str]) -> str:
    *others, last = (f"*{suffix}" for suffix in formats.values())
    return f"{', '.join(others)} or {last}" if others else last


def _dataset(root: Path, name: str, files: dict[str, int], formats: dict[str, str]) -> DatasetFiles:
    counts = {kind: sum(path.endswith(suffix) for path in files) for kind, suffix in formats.items()}
    kinds = [kind for kind, count in counts.items() if count]
    if len(kinds) > 1:
        held = " and ".join(f"{counts[kind]:,} *{formats[kind]}" for kind in kinds)
        raise DataError(
            f"dataset '{name}' holds files of two kinds in {root / name}: {held}. Say which are its tokens, as in "
            f"--file_type={kinds[0]}, or give each kind a dataset of its own"
        )
    paths = tuple(sorted(files))
    sizes = tuple(files[path] for path in paths)
    digest = hashlib.blake2b(digest_size=16)
    for path, size in zip(paths, sizes, strict=True):
        digest.update(f"{path}\0{size}\n".encode("utf-8", "surrogateescape"))
    return DatasetFiles(name, str(root / name), paths, sizes, digest.hexdigest(), kinds[0])


def _scan(folder: Path, formats: dict[str, str]) -> dict[str, int]:
    """Finds the sizes by relative path of all files of some formats below a folder."""
    suffixes = tuple(formats.values())
    found: dict[str, int] = {}
    times: Counter[tuple[int, int]] = Counter()

    def visit(path: str, prefix: str, above: frozenset[tuple[int, int]]) -> None:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    status = entry.stat()
                    identity = (status.st_dev, status.st_ino)
                    if identity in above:  # a link to a folder that we are in would go round for ever
                        continue
                    times[identity] += 1
                    if times[identity] > _NAMES_OF_A_FOLDER:
                        raise DataError(
                            f"{os.path.realpath(entry.path)} is in {folder} under more than {_NAMES_OF_A_FOLDER} "
                            f"names, such as {entry.path}: folders there link to each other. Remove such links"
                        )
                    visit(entry.path, f"{prefix}{entry.name}/", above | {identity})
                elif entry.name.endswith(suffixes):
                    status = entry.stat()  # a link that leads nowhere is an error here, and not a file less
                    if not stat.S_ISREG(status.st_mode):
                        raise DataError(
                            f"{entry.path} is no file that could hold tokens: a pipe or a device. Remove it"
                        )
                    found[prefix + entry.name] = status.st_size

    try:
        status = folder.stat()
        visit(str(folder), "", frozenset({(status.st_dev, status.st_ino)}))
    except OSError as error:
        raise DataError(f"cannot list {error.filename or folder}: {error.strerror}") from error
    except RecursionError:
        raise DataError(f"cannot list {folder}: folders there are nested too deep") from None
    return found


def _sub_folders(folder: Path) -> list[str]:
    return sorted(child.name for child in entries_of(folder) if not child.name.startswith(".") and is_folder(child))


def _existing(root: Path, name: str) -> Path:
    """Returns the folder of a dataset that was asked for by name."""
    folder = root / name
    if is_folder(folder):
        return folder
    near = difflib.get_close_matches(name, _sub_folders(root), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; {_what_is_in(root)}"
    raise DataError(f"dataset '{name}' is not in {root}{how_to_make_folder(folder) or hint}")


def how_to_make_folder(folder: Path) -> str:
    """Says how a token file of a missing folder's name becomes a dataset; empty where there is none."""
    for suffix in _suffixes("auto").values():
        file = Path(f"{folder}{suffix}")
        if is_file(file):
            return (
                f"; {file.name} is there, and a dataset is a folder: mkdir {folder} && ln -s ../{file.name} {folder}/"
            )
    return ""


def _nothing_found(root: Path, formats: dict[str, str]) -> str:
    if any(child.name.endswith(tuple(formats.values())) for child in entries_of(root)):
        return (
            f"data_path {root} holds {_patterns(formats)} files itself, but datasets are its sub-folders: "
            f"give --data_path={root.parent} --datasets={root.name}"
        )
    return (
        f"no dataset in {root}: none of its sub-folders holds {_patterns(formats)} files; {_what_is_in(root)}. "
        "`pretrain prepare` makes token files from text"
    )


def _what_is_in(folder: Path) -> str:
    """Says what a folder holds, for an error message."""
    try:
        if not is_folder(folder):
            return f"{folder} does not exist either"
        names = sorted(child.name + ("/" if is_folder(child) else "") for child in entries_of(folder))
    except PathError as error:  # what is wrong was found elsewhere
        return str(error)
    return f"{folder} holds {_shortened(names)}" if names else f"{folder} is empty"


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN:,} more"
