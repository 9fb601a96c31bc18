"""The listing of token files: `data_path/<dataset>/**/*.arrow`, another format's files, or a single file.

    folder --`_scan`: each real folder once--> sizes by path --suffix, then a look into the first file--> format, files

Rank 0 lists the files once per job and broadcasts the listing. Hidden files and folders, such as the index, are
skipped. Symbolic links are followed; an object store has none. The tag of an object stands for the time of change of a
file. In a folder of `save_to_disk` only the files that its state.json names belong to
the dataset; `datasets` leaves other files there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from pretraining.config.plugins import TOKEN_FORMATS
from pretraining.config.training import DataConfig
from pretraining.data.storage.content import time_of_change
from pretraining.data.storage.token_format import TokenFormat, format_class
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError, PathError
from pretraining.files import Location, entries_of, exists, is_address, is_file, is_folder, read_json
from pretraining.object_store import REQUESTS, StorePath, location, text_of
from pretraining.text import count_of, list_some

log = logging.getLogger(__name__)

MANIFEST_FILE = "prepare.json"
"""Manifest of a folder that `pretrain prepare` wrote; a folder that has it is complete."""
STATE_FILE = "state.json"
"""List of the files of a folder that `save_to_disk` of the `datasets` library wrote."""
_WITHOUT_FOLDER = "To train without this folder, name the others with --datasets"


@dataclass(frozen=True)
class DatasetFiles:
    """The token files of a dataset, in canonical order, the same on every host.

    Attributes:
        name: folder or single file, relative to data_path.
        folder: absolute path of the folder, or of the single file's parent; in a store, the address without its query.
        paths: relative to the folder, with forward slashes, sorted by code points.
        sizes: bytes of each file.
        digest: hexadecimal 128-bit hash of paths and sizes.
        times: time of change of each file, or tag of each object; empty if unknown.
        content: record of the content of all files, that of their index; None = not asked.
        ending: last bytes of every undamaged file; empty = not checked.
        query: what the address of the folder has behind it: parameters, with the question mark; or empty.
    """

    name: str
    folder: str
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    digest: str
    file_type: str
    is_file: bool = False
    times: tuple[int, ...] = ()
    content: str | None = None
    ending: bytes = b""
    query: str = ""

    def path(self, number: int) -> str:
        """Return the absolute path of a file by its number, for messages the address of an object."""
        return f"{self.folder}/{self.paths[number]}"

    @property
    def is_remote(self) -> bool:
        """Whether the files are in an object store."""
        return is_address(self.folder)

    @property
    def root(self) -> Location:
        """The folder."""
        return location(f"{self.folder}{self.query}")

    def place(self, number: int) -> Location:
        """Return the place of a file by its number."""
        return self.root / self.paths[number]


def list_datasets(config: DataConfig, earlier: Collection[str] = ()) -> tuple[DatasetFiles, ...]:
    """Find the configured datasets, sorted by name; without `datasets`, every sub-folder with token files.

    Args:
        earlier: names of datasets that the run has trained on.

    Raises:
        DataError: a folder is missing, has no token files, or has files of two formats; or a file is in two datasets.
        ConfigError: the format is unknown.
    """
    if config.data_path is None:
        raise DataError("no data: give --data_path=<folder with a sub-folder per dataset>, or --use_dummy_dataset=true")
    root = location(config.data_path).absolute()
    if not is_folder(root):
        itself = f"; for this file, give --data_path={root.parent} --datasets={root.name}" if is_file(root) else ""
        dummy = ". --use_dummy_dataset=true trains on made-up tokens" if not exists(root) else ""
        raise DataError(f"--data_path is not a folder{itself}. {_how_to_prepare(root)}{dummy}", path=root)
    kinds = TOKEN_FORMATS if config.file_type == "auto" else (config.file_type,)
    formats = {name: format_class(name) for name in kinds}
    suffixes = tuple(dict.fromkeys(row.suffix for row in formats.values()))
    patterns = " or ".join(f"*{suffix}" for suffix in suffixes)
    names = [name.strip("/") for name in config.datasets]
    if len(set(names)) < len(names):
        raise DataError(f"--datasets repeats a name: {', '.join(names)}")
    for name in names:
        if not exists(root / name):
            there = list_some(_sub_folders(root), 12) or "no folders"
            raise DataError(f"--datasets names '{name}', which does not exist; {root} has {there}", path=root / name)
    companions = tuple(filter(None, map(_companion, formats.values())))
    scanned = {name: _scan(root / name, suffixes, companions) for name in names or _sub_folders(root)}
    scans = {name: scan for name, scan in scanned.items() if any(path.endswith(suffixes) for path in scan.files)}
    for name in names:
        if name not in scans:
            place = root / name
            raise DataError(f"dataset '{name}' has no {patterns} files. {_how_to_prepare(place)}", path=place)
    if not scans:
        raise DataError(
            f"no sub-folder has {patterns} files. For this folder itself, give --data_path={root.parent} "
            f"--datasets={root.name}. {_how_to_prepare(root)}",
            path=root,
        )
    weights = dict(zip(names, config.weights, strict=False))
    in_run = {name for name in scans if weights.get(name, 1)} | {name for name in earlier if exists(root / name)}
    again = {name: scans.get(name) or _scan(root / name, suffixes, companions) for name in sorted(in_run)}
    _check_distinct(again, root, set(earlier))
    return tuple(_dataset(root, name, scans[name], formats, config) for name in sorted(scans))


def _check_distinct(scans: Mapping[str, _Scan], root: Location, earlier: Collection[str]) -> None:
    """Raise a DataError if datasets of a run have a file in common; only warn of two that the run has trained on."""
    owners = dict[Hashable, str]()
    for name, scan in scans.items():
        shared = defaultdict[str, list[str]](list)
        for path, found in scan.files.items():
            if (other := owners.setdefault(found.identity, name)) != name:
                shared[other].append(path)
        for other, paths in shared.items():
            are_equal = len(paths) == len(scan.files) == len(scans[other].files)
            what = "are the same files" if are_equal else f"share {count_of(len(paths), 'file')}, such as {paths[0]}"
            problem = (
                f"datasets '{other}' and '{name}' {what}: what one holds out would be trained on in the other. Name "
                "one of them in --datasets, the same at every start of a run"
            )
            if not {other, name} <= set(earlier):
                raise DataError(problem, path=root / name)
            log.warning("%s", problem)


def prepared_folders(root: Location) -> list[Location]:
    """Return the sub-folders of a root that have a prepare.json, sorted by name."""
    return [root / name for name in _sub_folders(root, MANIFEST_FILE)] if is_folder(root) else []


def describe_changes(before: dict[str, int], after: dict[str, int], rewritten: Collection[str] = ()) -> str:
    """Return the differences between two listings (path -> bytes); empty if they are equal.

    Args:
        rewritten: paths in both whose content differs.
    """
    added = sorted(after.keys() - before.keys())
    removed = sorted(before.keys() - after.keys())
    resized = sorted(path for path in before.keys() & after.keys() if before[path] != after[path])
    others = sorted(set(rewritten) - set(resized))
    changes = (("added", added), ("removed", removed), ("changed in size", resized), ("changed in content", others))
    return "; ".join(f"{what}: {list_some(paths, 12)}" for what, paths in changes if paths)


def index_folders(files: DatasetFiles, config: DataConfig) -> list[Path]:
    """Return possible folders of an index, in order: in `index_path` or, without one, with the data or in a cache."""
    if config.index_path is not None:
        return [Path(config.index_path).expanduser().absolute() / files.name]
    root, folders, cache = files.root, list[Path](), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    if isinstance(root, Path):
        folders.append(root / ".index")
    identity = root.identity if isinstance(root, StorePath) else os.path.realpath(files.folder)
    with suppress(RuntimeError):  # a container may have no home folder
        folder_key = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=8)
        folders.append(Path(cache).expanduser() / "pretraining" / "indices" / folder_key.hexdigest())
    return folders


Formats = Mapping[str, type[TokenFormat]]


def _dataset(root: Location, name: str, scan: _Scan, formats: Formats, config: DataConfig) -> DatasetFiles:
    """Make the listing of a dataset from the files found in its folder."""
    place, kind = root / name, _kind_of(root / name, name, scan.files, formats, config)
    if scan.repeated:
        log.warning(
            "dataset '%s': %s lead to folders that are read already, and are left out. To read files twice, link the "
            "files themselves",
            name,
            list_some(scan.repeated, 3),
        )
    row = formats[kind]
    suffixes = tuple(filter(None, (row.suffix, _companion(row))))
    paths = tuple(sorted(path for path in scan.files if path.endswith(suffixes)))
    if kind == "arrow_stream":
        paths = _without_unlisted(place, paths, scan.saved)
    sizes = tuple(scan.files[path].size for path in paths)
    times = tuple(scan.files[path].time for path in paths)
    digest = hashlib.blake2b(digest_size=16)
    for path, size in zip(paths, sizes, strict=True):
        digest.update(f"{path}\0{size}\n".encode("utf-8", "surrogateescape"))
    alone = is_file(place)
    folder = place.parent if alone else place
    query = text_of(folder).removeprefix(str(folder))
    return DatasetFiles(
        name, str(folder), paths, sizes, digest.hexdigest(), kind, alone, times, ending=row.ending, query=query
    )


def _without_unlisted(place: Location, paths: tuple[str, ...], saved: Collection[str]) -> tuple[str, ...]:
    """Return the files that are not in a folder of `save_to_disk`, or that its state.json lists."""
    listed = {prefix: saved_files(place / prefix) for prefix in saved}
    split = ((path, path.rpartition("/")[0], path.rpartition("/")[2]) for path in paths)
    left_out = {path for path, prefix, file in split if prefix in listed and file not in listed[prefix]}
    if left_out:
        log.info("%s: no %s names %s, which is left out", place, STATE_FILE, list_some(sorted(left_out), 3))
    return tuple(path for path in paths if path not in left_out)


def _kind_of(place: Location, name: str, paths: Collection[str], formats: Formats, config: DataConfig) -> str:
    """Return the format of a dataset: by suffix, then by the content of its first file."""
    suffixes = dict.fromkeys(row.suffix for row in formats.values())
    present = [suffix for suffix in suffixes if any(path.endswith(suffix) for path in paths)]
    of_suffix = [[kind for kind, row in formats.items() if row.suffix == suffix] for suffix in present]
    if len(present) > 1:
        kinds = [kinds[0] for kinds in of_suffix]
        raise DataError(
            f"dataset '{name}' has files of {' and '.join(kinds)}: give --file_type={kinds[0]}, or make two datasets",
            path=place,
        )
    [(first, *others)] = of_suffix
    example = min(path for path in paths if path.endswith(present[0]))
    path = place if is_file(place) else place / example
    return next((kind for kind in others if formats[kind].accepts(path, config)), first)  # type: ignore[attr-defined]


def _companion(row: type[TokenFormat]) -> str:
    """Return the suffix of the files that belong to the token files of a format; empty if there are none."""
    return getattr(row, "companion", "")


def saved_files(folder: Location) -> set[str]:
    """Return the names of the files that the state.json in a folder of `save_to_disk` lists; others are no data.

    Raises:
        DataError: the state is unreadable, a file is missing, or the rows have another order.
    """
    state = folder / STATE_FILE
    try:
        document = read_json(state)
        named = {str(entry["filename"]) for entry in document["_data_files"]}
        selects = document.get("_indices_data_files") or document.get("_indices_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"does not name the files of a saved dataset ({type(error).__name__}: {error})", path=state
        ) from error
    if selects:
        raise DataError(
            "its rows are selected by a second file (_indices_data_files): save the dataset again after "
            f"`flatten_indices()`, or read it with `pretrain prepare --hf_dataset={folder}`",
            path=state,
        )
    if missing := sorted(named - {entry.name for entry in entries_of(folder)}):
        raise DataError(f"names {list_some(missing, 3)}, which is not there: the dataset is incomplete", path=state)
    return named


class _Found(NamedTuple):
    """A file: its size, its time of change or its tag, and what is the same for all its names."""

    size: int
    time: int
    identity: Hashable


@dataclass
class _Scan:
    """The files found in a folder.

    Attributes:
        files: by relative path.
        saved: relative paths of folders with a `STATE_FILE`.
        repeated: relative paths of folders that were found under another path before.
    """

    files: dict[str, _Found] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)


def _scan(folder: Location, suffixes: tuple[str, ...], companions: tuple[str, ...]) -> _Scan:
    """Find the files with these suffixes below a folder, which may be a file.

    Args:
        companions: suffixes of files that belong to another file.
    """
    scan, kept = _Scan(), (*suffixes, *companions)
    if is_file(folder):
        partners = [folder.with_suffix(suffix) for suffix in companions]
        paths = [folder, *partners] if folder.name.endswith(suffixes) else []
        for path in filter(is_file, paths):
            scan.files[path.name] = _look_at(path, path.stat())
        return scan
    if isinstance(folder, StorePath):
        return _scan_store(folder, kept)
    assert isinstance(folder, Path)
    try:
        for prefix, _, entries in walk_folders(folder, scan.repeated):
            for entry in entries:
                if entry.name.endswith(kept):
                    # Follows links, so that a broken link is an error, not a missing file.
                    scan.files[prefix + entry.name] = _look_at(entry.path, entry.stat())
                elif entry.name == STATE_FILE:
                    scan.saved.append(prefix.rstrip("/"))
    except OSError as error:
        problem = f"cannot be listed: {error.strerror}. {_WITHOUT_FOLDER}"
        raise DataError(problem, path=error.filename or folder) from error
    return scan


def _scan_store(folder: StorePath, suffixes: tuple[str, ...]) -> _Scan:
    """Find the files with these suffixes below a folder of a store, and ask for the tag of each."""
    scan, sizes = _Scan(), folder.files()
    for name in sizes:
        if name.endswith(suffixes) and not {"", ".", ".."}.isdisjoint(name.split("/")):
            problem = "has a part of its name that is empty, . or .., and such objects cannot be read: rename it"
            raise DataError(problem, path=f"{folder}/{name}")
    visible = [name for name in sorted(sizes) if not any(map(_is_hidden, name.split("/")))]
    names = [name for name in visible if name.endswith(suffixes)]
    for name, tag in zip(names, map_in_order(lambda name: (folder / name).tag(), names, REQUESTS), strict=True):
        scan.files[name] = _Found(sizes[name], tag, str(folder / name))
    scan.saved += [name.rpartition("/")[0] for name in visible if name.rpartition("/")[2] == STATE_FILE]
    return scan


def _look_at(path: Location | str, status: os.stat_result) -> _Found:
    if isinstance(path, StorePath):
        return _Found(status.st_size, path.tag(), str(path))
    identity = (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(str(path))  # some have no inodes
    return _Found(status.st_size, time_of_change(status), identity)


Entries = list[os.DirEntry[str]]


def walk_folders(root: Path, repeated: list[str]) -> Iterator[tuple[str, Entries, Entries]]:
    """Yield relative path, folders and other entries of a folder and of those in it, without hidden names.

    Links are followed. A real folder is yielded once: under its own path, else under that of the first link to it. A
    folder that the caller takes out of the list is not entered.

    Args:
        repeated: gets the other relative paths of folders, without links to a folder above.
    """
    seen: set[tuple[int, int]] = set()
    # Links have depth 1 and more, so the folders themselves go first.
    waiting = [(0, "", frozenset[tuple[int, int]]())]
    while waiting:
        links, prefix, above = heappop(waiting)
        status = Path(f"{root}/{prefix}").stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:  # a link to a parent folder
            continue
        if identity in seen:
            repeated.append(prefix.rstrip("/"))
            continue
        seen.add(identity)
        with os.scandir(f"{root}/{prefix}") as entries:
            visible = [entry for entry in entries if not _is_hidden(entry.name)]
        folders = [entry for entry in visible if entry.is_dir()]
        yield prefix, folders, [entry for entry in visible if not entry.is_dir()]
        for folder in folders:
            heappush(waiting, (links + folder.is_symlink(), f"{prefix}{folder.name}/", above | {identity}))


def _is_hidden(name: str) -> bool:
    """Return whether a name is hidden, or that of the folder that a file system keeps for repairs."""
    return name.startswith(".") or name == "lost+found"


def _sub_folders(folder: Location, holding: str = "") -> list[str]:
    """Return the names of the folders in a folder, sorted; with `holding`, of those with a file of this name."""
    try:
        children = [child for child in entries_of(folder) if not _is_hidden(child.name)]
        return sorted(child.name for child in children if (is_file(child / holding) if holding else is_folder(child)))
    except PathError as error:
        raise DataError(f"{error}. {_WITHOUT_FOLDER}") from None


def _how_to_prepare(path: Location) -> str:
    if isinstance(path, StorePath):
        return "`pretrain prepare` makes token files from text on a disk; copy them there (docs/data.md)"
    command = f"pretrain prepare --input_path={shlex.quote(str(path))}"
    return f"`{command}` makes token files from text, Parquet and saved datasets"
