"""Mirror of a run: a copy of its checkpoints in an object store, which outlives the machines (`--ckpt_mirror_path`).

    start      `list_copies`: check that this run may write there; `fetch_start`: fetch what only the store holds
    commit     `Mirror.copy`: each process uploads its files in the background, then rank 0 uploads the manifest
    each step  `Mirror.poll`: is every process done? No rank waits for another
    end        `Mirror.finish`: wait for the newest copy

`mirror.json` in the store holds the run's id and the token of its writer. The mirror of another run is refused, and a
process that finds another token uploads no more manifests.

A copy is set aside once the mirror holds the manifest of a checkpoint that gives it up. Its manifest moves to
`set_aside_<time>/<name>/`, and its files stay.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from pretraining.checkpoint.branches import identity_of, is_given_up
from pretraining.checkpoint.copies import TRIES_OF_START, fetch_copy, read_copies, upload_file
from pretraining.checkpoint.manifest import MANIFEST, Manifest
from pretraining.checkpoint.own_checkpoints import NO_COPIES, Copies, best_of, list_run, saved_by_run, superseded
from pretraining.checkpoint.run_folder import (
    CHECKPOINTS,
    SET_ASIDE,
    checkpoint_from,
    committed_checkpoints,
    read_document,
)
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.recipe_files import RUN_CONFIG_FILE
from pretraining.config.training import CheckpointConfig
from pretraining.distributed.host_sync import DelayedMinimum
from pretraining.distributed.processes import gather_from_every_rank, on_every_rank, on_rank_zero, rank_and_world_size
from pretraining.distributed.rendezvous import in_background
from pretraining.errors import CheckpointError, DamagedError, OutdatedError
from pretraining.files import (
    checked_values,
    flush_folder,
    is_file,
    parse_json,
    with_checksum,
    write_atomic,
    writing_into,
)
from pretraining.model.hf import ORIGIN_FILE
from pretraining.object_store import Store, StoreError, exit_without_waiting
from pretraining.observability.events import EVENTS_FILE
from pretraining.observability.trackers import LOGS, METRICS_FILE

log = logging.getLogger(__name__)

MIRROR_FILE = "mirror.json"
EVENTS = f"{LOGS}/{EVENTS_FILE}"
LOG_FILES = (f"{LOGS}/{METRICS_FILE}", EVENTS)
COPIED_FILES = (RUN_CONFIG_FILE, ORIGIN_FILE, *LOG_FILES)
LOG_FILES_SECONDS = 60.0
"""Time between two copies of the log files."""
PREEMPTED_SECONDS = 20.0
"""How long a preempted run waits for its last copy: launchers kill 30 seconds after SIGTERM."""
CLOSING_SECONDS = 30.0


class TakenOverError(CheckpointError):
    """Another process writes into this run's mirror."""


# Start of a run


def list_copies(config: CheckpointConfig, tries: int = 1, *, writes: bool = True) -> Copies:
    """List the checkpoints in a run's mirror, after a check that the run may write there; in one process.

    Nothing is written into the run's folder, so a start that is refused later leaves no trace of a wrong mirror.

    Args:
        tries: maximum, if the store fails.
        writes: whether to check that the store can be written.

    Raises:
        StoreError: the store cannot be used.
        CheckpointError: it holds the mirror of another run.
    """
    if config.ckpt_save_path is None or config.ckpt_mirror_path is None:
        return NO_COPIES
    address, folder = config.ckpt_mirror_path, config.folder
    store = Store(address)

    def read() -> Copies:
        copies, probe = read_copies(address), f"probe.{secrets.token_hex(4)}"
        if writes:
            store.write(probe, [b"may this run write here?"])
            store.remove(probe)
        _check_run_id(store, folder, copies)
        return copies

    return store.retry(read, threading.Event(), tries)


def _check_run_id(store: Store, run: Path, copies: Copies) -> None:
    """Raise a CheckpointError if the mirror belongs to another run."""
    mirrored, here = _read_owner(store).get("run"), committed_checkpoints(run)
    ids = {checkpoint.run_id for checkpoint in here if checkpoint.kind is not None}
    if mirrored is None or not ids or mirrored in ids:
        return
    raise CheckpointError(
        f"is the mirror of another run than {run}: give another --ckpt_mirror_path or --ckpt_save_path",
        path=store.address,
    )


def fetch_start(config: CheckpointConfig, start: CheckpointRef) -> None:
    """Bring the start point and the run's best checkpoint to their paths, from an object store or `set_aside_<time>/`.

    Call it in one process.

    Raises:
        DamagedError: the copy of the start point is damaged.
        CheckpointError: a checkpoint cannot be written or moved.
        StoreError: a store cannot be used.
    """
    if start.aside is not None:
        with writing_into(start.path):
            start.aside.rename(start.path)
            flush_folder(start.path.parent)
    if start.copy is not None:
        if start.is_own:
            _fetch_log_files(Store(start.copy.address), config.folder)
        fetch_copy(start.copy, start.path)
    if start.best_copy is not None:
        try:
            fetch_copy(start.best_copy, config.folder / CHECKPOINTS / start.best_copy.name)
        except DamagedError as error:
            log.warning("the best checkpoint is lost: %s", error)


def _fetch_log_files(store: Store, run: Path) -> None:
    """Fetch the log files of the mirror; this start has written events already, which stay behind those."""
    for name in LOG_FILES:
        content, path = store.read(name) or b"", run / name
        local = path.read_bytes() if is_file(path) else b""
        if not local.startswith(content):
            path.parent.mkdir(parents=True, exist_ok=True)
            known = set(content.splitlines())
            newer = [line for line in local.splitlines(keepends=True) if line.rstrip(b"\n") not in known]
            write_atomic(path, content + b"".join(newer if name == EVENTS else []))


def _read_owner(store: Store) -> dict[str, Any]:
    """Return the run and the writer that the store names; empty without mirror.json."""
    content = store.read(MIRROR_FILE)
    try:
        return {} if content is None else checked_values(parse_json(content))
    except ValueError as error:
        raise CheckpointError(
            f"damaged ({error}). Remove it if no other run writes there", path=f"{store.address}/{MIRROR_FILE}"
        ) from None


def _to_json(**values: str) -> bytes:
    return json.dumps(with_checksum(values)).encode()


# Copies in the background

TAKEN_OVER, RUNNING, FAILED, DONE = -1, 0, 1, 2
"""Status of a process's part of a copy; the lowest status of all processes counts."""


class Mirror:
    """Background copies of a run's checkpoints; the constructor, `copy`, `poll` and `finish` are collective calls.

    Args:
        run_id: written into the store if it holds no run.
        newest: the run's own start point; `start` copies it if the mirror lacks it.
        expected: the newest copy when the start was chosen: id of its branch, and step. None = none.
        is_checked: whether another newest copy is an error.
        spare_cores: whether uploads pause most of the time until `finish`, since training needs every core.

    Attributes:
        copies: on rank 0: all copies when this process became the writer.
        protected: checkpoint that is being copied, and the next one; retention keeps both.

    Raises:
        OutdatedError: another machine has copied a newer checkpoint; on every rank alike.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_id: str,
        newest: Path | None = None,
        *,
        expected: tuple[str, int] | None = None,
        is_checked: bool = False,
        spare_cores: bool = False,
    ) -> None:
        self._config, self._run, self._newest = config, config.folder, newest
        self._store = on_every_rank(lambda: Store(config.ckpt_mirror_path or ""))
        self._token = on_rank_zero(lambda: secrets.token_hex(8))
        self.copies = NO_COPIES
        self._held: dict[str, Manifest] = {}  # on rank 0: complete checkpoints in the mirror
        self._closing, self._full_speed = threading.Event(), threading.Event()
        if not spare_cores:
            self._full_speed.set()
        self._sync = DelayedMinimum()
        self._work: Future[int] | None = None
        self._is_uploaded = False
        self._not_copied: Path | None = None
        self._log_files_copied = -LOG_FILES_SECONDS
        self.protected: tuple[Path, ...] = ()
        on_rank_zero(lambda: self._store.retry(lambda: self._take_over(run_id), self._closing, TRIES_OF_START))
        if is_checked:
            on_rank_zero(lambda: self._check_newest(expected))

    def start(self) -> None:
        """Copy the start point if the mirror lacks it, else set aside what it gives up; a collective call."""
        newest = self._newest
        if newest is None or self._work is not None:
            return
        if on_rank_zero(lambda: self.lacks(newest)):
            self.copy(newest)
        else:
            with suppress(StoreError):  # the next commit tries again
                on_rank_zero(lambda: self._set_aside_others(read_document(newest)))

    def lacks(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint has no complete copy; on rank 0."""
        return self._held.get(checkpoint.name) != read_document(checkpoint)

    def copy(self, checkpoint: Path) -> None:
        """Copy a committed checkpoint after the running copy; only the newest of several waiting ones is copied."""
        self.protected = (*self.protected[:1], checkpoint)
        if self._work is None:
            self._start_upload()

    def poll(self) -> None:
        """Continue a copy once every rank has done its part; call it once per step.

        Raises:
            TakenOverError: another process writes into the mirror; on every rank alike.
        """
        if self._work is not None and (least := self._sync.offer(self._status())) is not None:
            self._continue_copy(int(least[0]))

    def finish(self, seconds: float) -> str | None:
        """Wait until all is copied; return the problem if that takes longer than `seconds`, on every rank alike.

        Raises:
            TakenOverError: as in `poll`.
        """
        self._full_speed.set()
        self._sync.forget()
        self._log_files_copied = -LOG_FILES_SECONDS
        deadline = monotonic() + seconds
        while self._work is not None:
            with suppress(TimeoutError):
                self._work.result(max(0.0, deadline - monotonic()))
            ranks = gather_from_every_rank(lambda: (self._status(), self._store.problem))
            status = min(status for status, _ in ranks)
            if status == RUNNING:
                return next((problem for _, problem in ranks if problem), "the store is slow")
            self._continue_copy(status)
        return None if self._not_copied is None else f"copying {self._not_copied.name} failed; the log says why"

    def close(self, *, wait: bool) -> None:
        """Stop the running copy; its uploaded files are no checkpoint without a manifest.

        Args:
            wait: whether to wait for its thread; otherwise the process exits without it, even if the store hangs.
        """
        self._closing.set()
        self._full_speed.set()
        if self._work is not None:
            with suppress(TimeoutError):
                self._work.result(CLOSING_SECONDS if wait else 0.0)
            if not self._work.done():
                exit_without_waiting()

    def _status(self) -> int:
        return self._work.result() if self._work is not None and self._work.done() else RUNNING

    def _start_upload(self) -> None:
        checkpoint = self.protected[0]
        # A return gives its target another manifest: the mirror may have the files.
        self._is_uploaded = checkpoint == self._newest and on_rank_zero(lambda: self._holds_files(checkpoint))
        action = self._commit if self._is_uploaded else self._upload
        self._work = in_background(partial(self._run_part, action, checkpoint), "mirror")

    def _holds_files(self, checkpoint: Path) -> bool:
        held = self._held.get(checkpoint.name)
        return held is not None and held.files == read_document(checkpoint).files

    def _continue_copy(self, status: int) -> None:
        if status == TAKEN_OVER:
            raise TakenOverError(f"{self._store.address} belongs to another start of this run now: stop this one")
        if status == RUNNING:
            return
        checkpoint, *waiting = self.protected
        self._sync.forget()
        if status == DONE and not self._is_uploaded:
            self._is_uploaded = True
            self._work = in_background(partial(self._run_part, self._commit, checkpoint), "mirror")
            return
        self._not_copied = checkpoint if status == FAILED else None
        if status == DONE:
            log.info("%s is copied to %s", checkpoint.name, self._store.address)
        self.protected, self._work = tuple(waiting), None
        if waiting:
            self._start_upload()

    def _run_part(self, action: Callable[[Path], None], checkpoint: Path) -> int:
        try:
            action(checkpoint)
        except TakenOverError:
            return TAKEN_OVER
        except Exception as error:  # of the checkpoint's files: `retry` repeats failed calls of the store
            if not self._closing.is_set():
                reason = f"{type(error).__name__}: {error}"
                log.warning("%s is not copied to %s: %s", checkpoint, self._store.address, reason)
            return FAILED
        return DONE

    def _upload(self, checkpoint: Path) -> None:
        """Upload this process's files, in a background thread, after the removal of an earlier copy's manifest."""
        rank, world_size = rank_and_world_size()
        folder = _store_folder(checkpoint)
        self._retry(self._check_writer)
        self._retry(partial(self._store.remove, f"{folder}/{MANIFEST}"))
        for name, entry in read_document(checkpoint).recorded_files.items():
            number = re.match(r"shard-(\d+)-", name)
            if (int(number[1]) - 1 if number else 0) % world_size == rank:
                self._retry(self._check_writer)
                path, target = checkpoint / name, f"{folder}/{name}"
                self._retry(partial(upload_file, self._store, path, target, entry, self._closing, self._full_speed))

    def _commit(self, checkpoint: Path) -> None:
        """Upload the manifest, remove superseded copies, and copy the log files; in a background thread of rank 0."""
        if rank_and_world_size()[0] != 0:
            return
        content = (checkpoint / MANIFEST).read_bytes()
        self._retry(self._check_writer)
        self._retry(lambda: self._store.write(f"{_store_folder(checkpoint)}/{MANIFEST}", [content]))
        self._held[checkpoint.name] = manifest = read_document(checkpoint)
        with suppress(StoreError):  # the next commit tries again
            self._set_aside_others(manifest)
            self._remove_superseded(checkpoint.name)
            self._copy_log_files()

    def _retry(self, action: Callable[[], None]) -> None:
        self._store.retry(action, self._closing)

    def _take_over(self, run_id: str) -> None:
        """Become the mirror's writer, and list its checkpoints."""
        run_id = _read_owner(self._store).get("run") or run_id
        self._store.write(MIRROR_FILE, [_to_json(run=run_id, writer=self._token)])
        self.copies = read_copies(self._config.ckpt_mirror_path or "")
        self._held = {name: copy.manifest for name, copy in self.copies.complete.items()}

    def _check_newest(self, expected: tuple[str, int] | None) -> None:
        newest = list_run(self._run, self.copies).mirrored
        if newest is not None and identity_of(newest) != expected:
            raise OutdatedError(
                f"another machine has copied step {newest.step} meanwhile: the start is planned again",
                path=self._store.address,
            )

    def _set_aside_others(self, newest: Manifest) -> None:
        """Set aside the copies that a checkpoint gives up, once the mirror holds its manifest."""
        given_up = [
            name
            for name, manifest in self._held.items()
            if checkpoint_from(Path(name), manifest).has_save_name and is_given_up(manifest, newest)
        ]
        folder = f"{CHECKPOINTS}/{SET_ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        for name in given_up:
            document = json.dumps(self._held[name].document(), indent=1).encode()
            self._store.write(f"{folder}/{name}/{MANIFEST}", [document])
            self._store.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")
            place = f"{self._store.address}/{folder}/{name}"
            log.info("%s is set aside: the run continues from step %d", place, newest.step)
            del self._held[name]

    def _check_writer(self) -> None:
        if _read_owner(self._store).get("writer") != self._token:
            raise TakenOverError

    def _remove_superseded(self, newest: str) -> None:
        copies = [checkpoint_from(Path(name), manifest) for name, manifest in self._held.items()]
        head = checkpoint_from(Path(newest), self._held[newest])
        saved = saved_by_run(head, copies)
        for checkpoint in superseded(saved, head, best_of(saved), self._config.keep_last):
            folder = f"{CHECKPOINTS}/{checkpoint.path.name}"
            self._store.remove(f"{folder}/{MANIFEST}")  # first: without it, the rest is no checkpoint
            self._store.remove(folder)
            del self._held[checkpoint.path.name]

    def _copy_log_files(self) -> None:
        if monotonic() - self._log_files_copied >= LOG_FILES_SECONDS:
            self._log_files_copied = monotonic()
            for name in COPIED_FILES:
                if is_file(self._run / name):
                    self._store.write(name, [(self._run / name).read_bytes()])


def _store_folder(checkpoint: Path) -> str:
    return f"{CHECKPOINTS}/{checkpoint.name}"
