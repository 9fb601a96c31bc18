"""Checkpoints in an object store.

    <address>/checkpoints/step_1000_ckp/<files>, manifest.json    address of a run: the manifest is written last
    <address>/checkpoints/set_aside_<time>/step_1000_ckp/manifest.json    the manifest of a copy that is set aside
    <address>/<files>, manifest.json                              address of a checkpoint

A folder without a manifest, or with files of other sizes, is no complete checkpoint. A fetch compares files with the
checksums in the manifest, and the checkpoint appears complete or not at all.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import thread_time

from pretraining.checkpoint.branches import age_in_place, continues
from pretraining.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from pretraining.checkpoint.own_checkpoints import Copies, move_aside
from pretraining.checkpoint.run_folder import (
    CHECKPOINTS,
    SET_ASIDE,
    Copy,
    checkpoint_at,
    misnamed_files,
    temporary_name,
)
from pretraining.checkpoint.stored_files import ChecksummedFile, crc32_text
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import exists, flush_folder, parse_address, parse_json, write_atomic, write_flushed, writing_into
from pretraining.model.hf import ORIGIN_FILE
from pretraining.object_store import PIECE_BYTES, Store

log = logging.getLogger(__name__)

READING_THREADS = 8
REST_RATIO = 49
"""Seconds that an upload pauses per second of CPU time. A model on a CPU waits for the slowest core in each step, so an
upload on one core slows all cores."""
TRIES_OF_START = 5


def upload_file(
    store: Store, file: Path, name: str, entry: FileEntry, stop: threading.Event, full_speed: threading.Event
) -> None:
    """Write a checkpoint's file as an object.

    Args:
        stop: stops the upload when set.
        full_speed: until it is set, the thread pauses most of the time.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: the file does not have the checksum in its manifest.
        StoreError: the store fails.
    """
    checksum = 0

    def pieces() -> Iterator[bytes]:
        nonlocal checksum
        with file.open("rb", buffering=0) as source:
            began = thread_time()
            while (piece := source.read(PIECE_BYTES)) and not stop.is_set():
                checksum = zlib.crc32(piece, checksum)
                yield piece
                full_speed.wait(REST_RATIO * (thread_time() - began))
                began = thread_time()

    store.write(name, pieces())
    if crc32_text(checksum) != entry.crc32:
        raise CheckpointError("damaged: its checksum differs from its manifest", path=file)


def _download_file(store: Store, name: str, file: Path) -> FileEntry:
    """Write an object to a file and flush it to disk; return its size and checksum."""
    with ChecksummedFile(file) as target:
        for piece in store.read_pieces(name):
            target.write(piece)
        return target.finish()


def read_copies(address: str) -> Copies:
    """List the checkpoints in a store.

    Raises:
        StoreError: the store cannot be read, or the address cannot be used.
    """
    store = Store(address)
    sizes = store.sizes()
    form = re.compile(rf"({CHECKPOINTS}/({SET_ASIDE}[^/]+/)?[^/]+/)?{re.escape(MANIFEST)}")
    names = [name for name in sizes if form.fullmatch(name)]

    def read(name: str) -> Manifest | None:
        try:
            return Manifest.parse(parse_json(store.read(name) or b""), f"{store.address}/{name}")
        except (CheckpointError, ValueError) as error:
            log.warning("%s/%s is skipped: %s", store.address, name, error)
            return None

    with ThreadPoolExecutor(READING_THREADS) as pool:
        manifests = dict(zip(names, pool.map(read, names), strict=True))
    complete, set_aside, incomplete = dict[str, Copy](), dict[str, Copy](), 0
    for name, manifest in manifests.items():
        parts = name.split("/")[:-1]
        folder = "/".join([*parts[:1], *parts[-1:]])  # the files of a copy that is set aside stay where they are
        copy = None if manifest is None else Copy(address, folder, manifest)
        is_complete = copy is not None and all(
            sizes.get(f"{folder}/{file}".lstrip("/")) == entry.bytes
            for file, entry in copy.manifest.recorded_files.items()
        )
        if copy is not None and len(parts) == 3:
            set_aside["/".join(parts[1:])] = copy
        elif copy is not None and is_complete:
            complete[copy.name] = copy
        else:
            incomplete += 1
    return Copies(complete, set_aside, incomplete)


def fetch_copy(copy: Copy, path: Path) -> None:
    """Fetch a checkpoint to a path of a run, and the origin of its run.

    A damaged or older checkpoint under this name is replaced, one of another branch is set aside.

    Raises:
        DamagedError: a file does not have the checksum in the manifest.
        CheckpointError: the disk cannot be written.
        StoreError: the store cannot be read.
    """
    log.info("fetching %s to %s", copy, path)
    temporary = temporary_name(path)
    try:
        with writing_into(path):
            _fetch_files(Store(copy.address), copy, temporary)
            replaced = checkpoint_at(path)
            if replaced.kind is not None and not continues(copy.manifest, replaced):
                move_aside(path.parents[1], [replaced])
            elif exists(path):
                path.rename(temporary_name(path))  # the next save removes it
            temporary.rename(path)
            flush_folder(path.parent)
            _fetch_origin(copy, path.parents[1])
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch_files(store: Store, copy: Copy, folder: Path) -> None:
    """Fetch the files of a checkpoint into a new folder; raise a DamagedError if one differs from the manifest."""
    prefix, stop = f"{copy.folder}/".lstrip("/"), threading.Event()

    def fetch(name: str) -> str | None:
        entry = store.retry(lambda: _download_file(store, prefix + name, folder / name), stop, TRIES_OF_START)
        return None if entry == copy.manifest.files[name] else f"size or checksum of {name} differs from the manifest"

    faults = list(misnamed_files(folder, copy.manifest))
    if not faults:
        folder.mkdir(parents=True)
        with ThreadPoolExecutor(READING_THREADS) as pool:
            faults = list(filter(None, pool.map(fetch, copy.manifest.recorded_files)))
    if faults:
        raise DamagedError(f"damaged: {faults[0]}", path=str(copy))
    write_flushed(folder / MANIFEST, json.dumps(copy.manifest.document(), indent=1))
    flush_folder(folder)


def _fetch_origin(copy: Copy, run: Path) -> None:
    """Fetch the record of the model that the run of a copy began with, if only the store has it."""
    place = parse_address(copy.address)
    root = place if copy.folder else place._replace(path="/".join(place.path.split("/")[:-2]))
    content = None if exists(run / ORIGIN_FILE) else Store(root.text).read(ORIGIN_FILE)
    if content is not None:
        write_atomic(run / ORIGIN_FILE, content)


@contextmanager
def local_view(address: str, *, with_files: bool, names: Collection[str] | None = None) -> Iterator[Path]:
    """Provide a temporary folder like that of the run at an address.

    Args:
        with_files: whether to fetch the newest good checkpoint, or those of `names`. Otherwise the folder holds the
            manifests of all checkpoints, also of those set aside, and sparse files of the right sizes.

    Raises:
        CheckpointError: there is no checkpoint.
        StoreError: the store cannot be used.
    """
    listed = read_copies(address)
    copies = sorted(listed.complete.values(), key=lambda copy: age_in_place(copy.manifest))
    copies = [copy for copy in copies if names is None or copy.name in names]
    with tempfile.TemporaryDirectory(prefix="pretrain-") as name:
        run = Path(name) / "run"
        is_empty = True
        for copy in reversed(copies):
            try:
                _view(copy, run / CHECKPOINTS / copy.name, with_files=with_files)
            except DamagedError as error:
                log.warning(str(error))
                continue
            is_empty = False
            if with_files and names is None:
                break
        for folder, copy in listed.set_aside.items() if not with_files else ():
            if copy.name not in listed.complete:  # otherwise its files belong to the checkpoint that was saved again
                _view(copy, run / CHECKPOINTS / folder, with_files=False)
        if is_empty:
            raise CheckpointError("holds no complete and good checkpoint", path=parse_address(address).place)
        yield run


def _view(copy: Copy, path: Path, *, with_files: bool) -> None:
    if with_files:
        fetch_copy(copy, path)
        return
    path.mkdir(parents=True)
    for file, entry in copy.manifest.recorded_files.items():
        with (path / Path(file).name).open("wb") as empty:
            empty.truncate(entry.bytes)
    (path / MANIFEST).write_text(json.dumps(copy.manifest.document()))
