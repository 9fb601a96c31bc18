"""List of the input files, in a fixed order.

    inputs (files, folders, globs; or Python's standard library) --> [InputFile]

The order depends on the inputs and the file names only, not on the file system. A file that is named is read. In
folders and globs, some files are left out, and a line says so: other splits, caches of `datasets`, descriptions of the
data, and files with other endings. A warning names files that hold the same text: `a.jsonl` and `a.jsonl.gz`, or copies
under other names.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import re
import stat
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pretraining.data.storage.content import PART_BYTES, content_record
from pretraining.data.storage.dataset_files import MANIFEST_FILE, STATE_FILE, saved_files, walk_folders
from pretraining.data.storage.doubts import split_of
from pretraining.data.storage.token_format import beginning_of
from pretraining.errors import DataError
from pretraining.files import exists, is_file, is_folder, read_object
from pretraining.text import count_of
from pretraining.tools.command_settings import COMPRESSED_ENDINGS
from pretraining.tools.prepare.formats import FORMATS, JSON, format_of, recognise
from pretraining.tools.prepare.packed_files import InputFile

log = logging.getLogger(__name__)

SMALLEST_MODULE_BYTES = 200
"""Smaller modules, such as empty `__init__.py` files, are left out."""

# Tests and modules of data would be a fifth of the text, and are unlike the rest.
LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "msilib"}
LEFT_OUT_FILES = {"html/entities.py", "this.py"}
WILDCARDS = set("*?[")


TRAIN, ALL_SPLITS = "train", "all"
_CACHE = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")
_DESCRIPTIONS = {"readme", "license", "licence", "notice", "citation", "dataset_info", "dataset_infos"}
"""Names, without ending, of files beside records that describe them."""
SAVED_SPLITS = "dataset_dict.json"
"""File in which `save_to_disk` lists the folders of a DatasetDict."""

_ENDINGS = (".txt", ".text", *(ending for row in FORMATS if row.has_fields for ending in row.endings))
LeftOut = defaultdict[str, list[str]]
"""Names of files that are not read, by reason."""


@dataclass(frozen=True)
class Selection:
    """Choice of files in folders and globs.

    Attributes:
        extensions: endings of files to take from folders, without the first dot; those of compressions may follow.
        split: None = training files, and those that name no split.
        as_text: take each file of JSON, CSV and TSV as one document.
    """

    extensions: tuple[str, ...] = ()
    split: str | None = None
    as_text: bool = False

    @property
    def dotted(self) -> list[str]:
        """The extensions with their first dots, in lower case."""
        return [f".{extension.lower().lstrip('.')}" for extension in self.extensions]


def list_files(inputs: Sequence[str], selection: Selection) -> list[InputFile]:
    """Return each file of the inputs once: in the order of the inputs, and by name within a folder or glob.

    Args:
        inputs: files, globs, and folders (walked recursively, following links, without hidden names and prepared
            datasets).

    Raises:
        DataError: an input does not exist, cannot be read, or has no files; or a file has a format that is not read.
    """
    files: list[InputFile] = []
    seen: set[tuple[int, int]] = set()
    for given in inputs:
        left_out: LeftOut = defaultdict(list)
        path = Path(given).expanduser()
        is_named = exists(path) and not is_folder(path)
        try:
            places = [(path, path.name)] if is_named else _search(path, selection, left_out)
            found = list(_recognise_new(places, seen, as_text=selection.as_text))
        except OSError as error:
            raise DataError(
                f"--input_path: it cannot be read: {error.strerror}. Repair it, or leave it out",
                path=error.filename or given,
            ) from error
        if is_named and selection.split is not None:
            raise DataError(f"--split={selection.split} selects files of a folder; leave it out here", path=path)
        if not found and any(is_file(place) for place, _ in places):
            raise DataError("--input_path: no new file in it: earlier inputs hold them all. Leave it out", path=given)
        if not is_named:
            found = _of_split(_without_descriptions(found, left_out), path, selection.split, left_out)
        for reason, names in left_out.items():
            log.info("%s: %s not read, the first is %s: %s", given, count_of(len(names), "file"), names[0], reason)
        if not found and left_out:
            raise DataError("--input_path: all files in it are left out, for the reasons above", path=given)
        if not found:
            raise DataError(
                "--input_path: no such file or folder, or no file in it. Folders are searched for "
                f"{', '.join(selection.dotted)} (--extensions); for a comma in a name write ?",
                path=given,
            )
        files += found
    return files


def _recognise_new(
    places: Iterable[tuple[Path, str]], seen: set[tuple[int, int]], *, as_text: bool
) -> Iterator[InputFile]:
    """Yield the regular files that were not seen, by device and inode."""
    for path, name in places:
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        if stat.S_ISREG(status.st_mode) and not (identity in seen and status.st_ino):
            seen.add(identity)
            yield recognise(path, name, status.st_size, as_text=as_text)


def fingerprint(names_and_sizes: Sequence[tuple[str, int]]) -> str:
    """Return a hash of names, sizes and order, which identifies an input without reading it."""
    listing = "".join(f"{name}\0{size}\n" for name, size in names_and_sizes)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def _search(path: Path, selection: Selection, left_out: LeftOut) -> list[tuple[Path, str]]:
    """Return the files of a folder or glob, sorted, with their names relative to it."""
    if is_folder(path):
        found = sorted(_walk(path, selection.split, left_out))
        endings = tuple(ending + more for ending in selection.dotted for more in ("", *COMPRESSED_ENDINGS))
        others = [name for _, name in found if not name.lower().endswith(endings)]
        if others:
            left_out[f"their endings are not in --extensions={','.join(selection.extensions)}"] += others
        return [(place, name) for place, name in found if name.lower().endswith(endings)]
    if not WILDCARDS.intersection(str(path)):
        return []
    # Names are relative to the last folder without a wildcard.
    fixed = next(parent for parent in path.parents if not WILDCARDS.intersection(str(parent)))
    by_folder = defaultdict(list)
    for match in glob.glob(str(path), recursive=True):  # noqa: PTH207 (Path.glob refuses absolute patterns)
        by_folder[Path(match).parent].append(Path(match).name)
    return sorted(
        (folder / name, (folder / name).relative_to(fixed).as_posix())
        for folder, names in by_folder.items()
        for name in _without_caches(folder, names, left_out)
    )


def _walk(root: Path, split: str | None, left_out: LeftOut) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder that are not hidden."""
    for prefix, folders, entries in walk_folders(root, []):
        folder, names = root / prefix, [entry.name for entry in entries]
        if MANIFEST_FILE in names and folder != root:  # a dataset that prepare wrote below the input
            folders.clear()
            continue
        if SAVED_SPLITS in names:
            wanted = _folders_of_split(folder, split, left_out)
            folders[:] = [each for each in folders if each.name in wanted]
            names.remove(SAVED_SPLITS)
        for name in _without_caches(folder, names, left_out):
            yield folder / name, prefix + name


def _without_caches(folder: Path, names: list[str], left_out: LeftOut) -> list[str]:
    """Return the files of a folder without caches of the `datasets` library, such as the results of `map`.

    Raises:
        DataError: a saved dataset is incomplete, or has its rows in another order.
    """
    if is_file(folder / STATE_FILE) and any(name.endswith(".arrow") for name in names):
        kept, reason = saved_files(folder), f"{STATE_FILE} does not list them"
    else:
        kept = {name for name in names if not _CACHE.fullmatch(name)}
        reason = "`datasets` names its caches so; to read one, name it as a file"
    others = sorted(set(names) - kept - {STATE_FILE, "dataset_info.json"})
    if others:
        left_out[reason] += others
    return [name for name in names if name in kept]


def _folders_of_split(folder: Path, split: str | None, left_out: LeftOut) -> list[str]:
    """Return the folders of a DatasetDict to read; raise a DataError if it has no such split."""
    found = read_object(folder / SAVED_SPLITS).get("splits")
    splits = sorted(name for name in found if isinstance(name, str)) if isinstance(found, list) else []
    wanted = splits[0] if split is None and len(splits) == 1 else split or TRAIN
    if wanted != ALL_SPLITS and wanted not in splits:
        raise DataError(f"it has no split {wanted!r}, but {', '.join(splits)}: give one as --split", path=folder)
    if wanted == ALL_SPLITS:
        return splits
    if others := [f"{name}/" for name in splits if name != wanted]:
        left_out["other splits, which --split takes"] += others
    return [wanted]


def _drop(files: list[InputFile], reason_of: Callable[[InputFile], str], left_out: LeftOut) -> list[InputFile]:
    """Return the files without a reason to leave them out."""
    kept = []
    for file in files:
        if reason := reason_of(file):
            left_out[reason].append(file.name)
        else:
            kept.append(file)
    return kept


def _without_descriptions(files: list[InputFile], left_out: LeftOut) -> list[InputFile]:
    """Return the files without settings in JSON and, beside records, without a README or license."""
    has_records = any(format_of(file).has_fields for file in files)

    def reason_of(file: InputFile) -> str:
        if file.format == JSON:
            return "JSON, but neither JSON lines nor an array of objects; to read one, name it as a file"
        is_description = file.name.lower().rpartition("/")[2].partition(".")[0] in _DESCRIPTIONS
        named = "they describe the records beside them; to read one, name it as a file"
        return named if is_description and has_records and format_of(file).is_text else ""

    return _drop(files, reason_of, left_out)


def _of_split(files: list[InputFile], path: Path, split: str | None, left_out: LeftOut) -> list[InputFile]:
    """Return the files of a split, by their names; files that name no split are for training.

    Raises:
        DataError: no file is of the split, or the files are of several splits and none is for training.
    """
    splits = {file: split_of(file.name) for file in files}
    if split == ALL_SPLITS or (split is None and len(set(splits.values())) < 2):
        return files
    wanted = split or TRAIN
    # In the names of whole texts, such as modules of code, a word tells something only if most names have one.
    named = sum(name is not None for name in splits.values())
    are_plain = split is None and (TRAIN not in splits.values() or 2 * named <= len(files))

    def reason_of(file: InputFile) -> str:
        name = splits[file]
        if wanted in file.name.split("/") or (name or TRAIN) == (split_of(wanted) or wanted):
            return ""
        if are_plain and not format_of(file).has_fields:
            return ""
        return f"they look like the split {name or TRAIN}: read them with --split={name or TRAIN} or {ALL_SPLITS}"

    chosen = _drop(files, reason_of, left_out)
    if files and not chosen:
        there = ", ".join(sorted({name or TRAIN for name in splits.values()}))
        raise DataError(f"no file looks like the split {wanted}, but like {there}: give one as --split", path=path)
    return chosen


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


# Copies


def warn_of_copies(files: Sequence[InputFile]) -> None:
    """Warn of the first files with one text: of one name before known endings in a folder, or of equal content.

    Only files of equal size are read, and only parts of them.
    """
    names = _groups(files, _plain_path)
    _warn(names, "the same name before their endings")
    named = {file for group in names for file in group[1:]}
    candidates = [[file for file in files if file.size and file not in named]]
    for key in (lambda file: file.size, _beginning, _content):  # the beginnings tell most files apart
        candidates = [alike for group in candidates for alike in _groups(group, key)]
    _warn(candidates, "the same size and content")


def _groups(files: Iterable[InputFile], key: Callable[[InputFile], Hashable]) -> list[list[InputFile]]:
    """Return the groups of several files with an equal key, in the order of the files."""
    groups = defaultdict(list)
    for file in files:
        groups[key(file)].append(file)
    return [group for group in groups.values() if len(group) > 1]


def _plain_path(file: InputFile) -> str:
    """Return the path of a file without the endings of compressions, and of formats of records or plain text."""
    path = str(file.path)
    for endings in (COMPRESSED_ENDINGS, _ENDINGS):
        if path.lower().endswith(endings):
            path = path[: -max(len(ending) for ending in endings if path.lower().endswith(ending))]
    return path


def _beginning(file: InputFile) -> Hashable:
    return beginning_of(file.path, PART_BYTES)


def _content(file: InputFile) -> Hashable:
    """Return the record of the content of a file, or the file itself if it cannot be read."""
    with suppress(OSError):
        return content_record(file.path, 0, file.size)
    return file


def _warn(groups: list[list[InputFile]], alike: str) -> None:
    if groups:
        copies = count_of(sum(len(group) - 1 for group in groups), "file")
        first, second = (file.path for file in groups[0][:2])
        log.warning("%s probably read twice, the first is %s: %s has %s. Leave one out.", copies, second, first, alike)
