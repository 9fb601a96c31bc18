"""Which token files there are: `data_path/<dataset>/**/*.arrow` (or another format's, or one file), listed once a job.

Rank 0 makes the listing and broadcasts it, so that a hundred thousand files are asked for once. Hidden files and
folders (names that start with a dot) are not data: an index may be there. Symbolic links are followed.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pretraining.config.plugins import TOKEN_FORMATS
from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import format_class
from pretraining.errors import ConfigError, DataError, PathError
from pretraining.files import entries_of, exists, is_file, is_folder, read_json
from pretraining.text import list_some

log = logging.getLogger(__name__)

MANIFEST_FILE = "prepare.json"
"""Says what a folder of token files holds that `pretrain prepare` made; a folder that has it is complete."""
COUNTS_FILES = "meta/*counts*.csv"
"""What other tools write beside their datasets: how many documents and tokens there are in each file."""
_SAVED_TO_DISK = ("state.json", "dataset_dict.json")
"""Beside the Arrow streams that `save_to_disk` of Hugging Face's datasets writes."""
_NAMES_SHOWN = 12
_NAMES_OF_A_FOLDER = 64
"""Under so many a folder is listed. More have only folders with links to each other, whose ways are without number."""


@dataclass(frozen=True)
class DatasetFiles:
    """The token files of a dataset, in canonical order; the same on every host.

    Attributes:
        name: its folder or its only file relative to data_path; `folder`, absolute, is that folder or around that file.
        paths: relative to the folder, with forward slashes, sorted by code points; `sizes` are their bytes.
        digest: 128 bits of hexadecimal over paths and sizes.
    """

    name: str
    folder: str
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    digest: str
    file_type: str
    is_file: bool = False

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
    formats = _suffixes(config.file_type)
    if not is_folder(root):
        hint = how_to_prepare(root) if is_file(root) else _what_is_in(root.parent)
        if is_file(root) and root.name.endswith(tuple(formats.values())):
            hint = f"give --data_path={root.parent} --datasets={root.name}"
        raise DataError(f"--data_path is not a folder; {hint}", path=root)
    if config.datasets:
        names = [name.strip("/") for name in config.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"--datasets names {', '.join(twice)} more than once")
        found = {name: _scan(_existing(root, name), formats) for name in names}
        for name, files in found.items():
            if not files:
                kinds = _patterns(formats)
                raise DataError(
                    f"dataset '{name}' has no {kinds} files; {_what_is_in(root / name)}. {how_to_prepare(root / name)}",
                    path=root / name,
                )
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
        place = folder.expanduser()
        path = (place.parent if is_file(place) else place) / MANIFEST_FILE
        try:
            token = read_json(path)["tokenizer"]["end_of_text"]
            if token is not None and (not isinstance(token, int) or token < 0):
                raise ValueError(f"{token!r} is no token id")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"cannot be read ({type(error).__name__}: {error}), and it says which token ends documents. "
                "Prepare the dataset again, or give --sep_token",
                path=path,
            ) from error
        if token is not None:
            found[str(folder)] = token
    if len(set(found.values())) > 1:
        named = ", ".join(f"{folder}: {token}" for folder, token in found.items())
        raise ConfigError(f"datasets end their documents with different tokens ({named}): give --sep_token")
    separator = next(iter(found.values()), None)
    if separator is not None:
        names = list_some(list(found), _NAMES_SHOWN)
        log.info("sep_token   %s, the end_of_text of %s in %s", separator, MANIFEST_FILE, names)
    return separator


def describe_changes(before: dict[str, int], after: dict[str, int]) -> str:
    """Says what differs between two listings (path -> bytes); empty where nothing does."""
    added = sorted(after.keys() - before.keys())
    removed = sorted(before.keys() - after.keys())
    resized = sorted(path for path in before.keys() & after.keys() if before[path] != after[path])
    changes = (("added", added), ("removed", removed), ("changed in size", resized))
    return "; ".join(f"{what}: {list_some(paths, _NAMES_SHOWN)}" for what, paths in changes if paths)


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
            f"dataset '{name}' holds files of two kinds: {held}. Say which are its tokens, as in "
            f"--file_type={kinds[0]}, or give each kind a dataset of its own",
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
    """Find the sizes by relative path of all files of some formats below a folder, or of the file that it is."""
    suffixes = tuple(formats.values())
    if is_file(folder):
        return {folder.name: folder.stat().st_size} if folder.name.endswith(suffixes) else {}
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
                            f"it is in {folder} under more than {_NAMES_OF_A_FOLDER} names, such as {entry.path}: "
                            "folders there link to each other. Remove such links",
                            path=os.path.realpath(entry.path),
                        )
                    visit(entry.path, f"{prefix}{entry.name}/", above | {identity})
                elif entry.name.endswith(suffixes):
                    status = entry.stat()  # a link that leads nowhere is an error here, and not a file less
                    if not stat.S_ISREG(status.st_mode):
                        raise DataError(
                            "a pipe or a device, not a file that could hold tokens. Remove it", path=entry.path
                        )
                    found[prefix + entry.name] = status.st_size

    try:
        status = folder.stat()
        visit(str(folder), "", frozenset({(status.st_dev, status.st_ino)}))
    except OSError as error:
        raise DataError(f"cannot be listed: {error.strerror}", path=error.filename or folder) from error
    except RecursionError:
        raise DataError("cannot be listed: folders there are nested too deep", path=folder) from None
    return found


def _sub_folders(folder: Path) -> list[str]:
    return sorted(child.name for child in entries_of(folder) if not child.name.startswith(".") and is_folder(child))


def _existing(root: Path, name: str) -> Path:
    """Return the folder or file of a dataset that was asked for by name."""
    if is_folder(root / name) or is_file(root / name):
        return root / name
    raise DataError(f"dataset '{name}' is not in {root}{did_you_mean_dataset(root, name) or f'; {_what_is_in(root)}'}")


def did_you_mean_dataset(root: Path, name: str) -> str:
    """Return a hint at the dataset in a folder whose name is nearest; empty where none is near."""
    files = [child.name for child in entries_of(root) if child.suffix in _suffixes("auto").values()]
    same = [file for file in files if Path(file).stem == name]
    near = same or difflib.get_close_matches(name, [*_sub_folders(root), *files], n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def how_to_prepare(path: str | Path) -> str:
    """Return the command that makes token files of a folder or file that holds none."""
    source = Path(path)
    shards = [shard for pattern in ("*.mds*", "*/*.mds*") for shard in islice(source.glob(pattern), 1)]
    if shards:
        source = Path(f"{shards[0].parent}.parquet")
        script = (
            "from datasets import Dataset as D; from streaming import LocalDataset as L; "
            f"D.from_generator(lambda: (row for row in L('{shards[0].parent}'))).to_parquet('{source}')"
        )
        return f'MDS is read by its own library: python -c "{script}" && pretrain prepare --input_path={source}'
    command = f"pretrain prepare --input_path={shlex.quote(str(source))}"
    return f"`{command}` makes token files of text, Parquet and saved datasets"


def _nothing_found(root: Path, formats: dict[str, str]) -> str:
    files = sorted(child.name for child in entries_of(root) if child.name.endswith(tuple(formats.values())))
    if files and not any(exists(root / name) for name in _SAVED_TO_DISK):
        return (
            f"data_path {root} holds {_patterns(formats)} files itself: give --datasets={files[0]} for one of them, or "
            f"--data_path={root.parent} --datasets={root.name} for all"
        )
    return (
        f"no dataset in {root}: none of its sub-folders holds {_patterns(formats)} files; {_what_is_in(root)}. "
        f"{how_to_prepare(root)}"
    )


def _what_is_in(folder: Path) -> str:
    """Says what a folder holds, for an error message."""
    try:
        if not is_folder(folder):
            if is_file(folder):
                return f"{folder} is a file"
            return f"{folder} does not exist either"
        names = sorted(child.name + ("/" if is_folder(child) else "") for child in entries_of(folder))
    except PathError as error:  # what is wrong was found elsewhere
        return str(error)
    return f"{folder} holds {list_some(names, _NAMES_SHOWN)}" if names else f"{folder} is empty"
