"""Mirror of a run: a copy of its checkpoints in an object store, which outlives the machines (`--ckpt_mirror_path`).

    start      `fetch_start`: check that this run may write there; fetch the newest copy if it is newer than the folder
    commit     `Mirror.copy`: each process uploads its files in the background, then rank 0 uploads the manifest
    each step  `Mirror.poll`: is every process done? No rank waits for another
    end        `Mirror.finish`: wait for the newest copy

`mirror.json` holds the run's id, in the run's folder and in the store. The store's file also holds the token of its
writer. The mirror of another run is refused, and a process that finds another token uploads no more manifests.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from pretraining.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_document, read_manifest
from pretraining.checkpoint.object_store import TRIES_OF_START, Store, StoreError, checkpoints_in, fetch_newest
from pretraining.checkpoint.retention import best_of, superseded
from pretraining.checkpoint.run_folder import CHECKPOINTS, checkpoint_from, committed_checkpoints
from pretraining.checkpoint.run_path import CONFIG_FILE
from pretraining.checkpoint.start_point import fetched_path
from pretraining.config.training import CheckpointConfig
from pretraining.distributed.host_sync import DelayedMinimum
from pretraining.distributed.processes import gather_from_every_rank, on_every_rank, on_rank_zero, rank_and_world_size
from pretraining.errors import CheckpointError
from pretraining.files import checked_values, is_address, is_file, parse_json, with_checksum, write_atomic
from pretraining.launch.program import skip_exit_handlers
from pretraining.observability.events import EVENTS_FILE
from pretraining.observability.trackers import LOGS, METRICS_FILE

log = logging.getLogger(__name__)

MIRROR_FILE = "mirror.json"
LOG_FILES = (CONFIG_FILE, f"{LOGS}/{METRICS_FILE}", f"{LOGS}/{EVENTS_FILE}")
LOG_FILES_SECONDS = 60.0
"""Time between two copies of the log files."""
PREEMPTED_SECONDS = 20.0
"""How long a preempted run waits for its last copy: launchers kill 30 seconds after SIGTERM."""
CLOSING_SECONDS = 30.0


class TakenOverError(CheckpointError):
    """Another process writes into this run's mirror."""


# Start of a run


def fetch_start(config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({})) -> Path | None:
    """Check that a run may write to its mirror, and fetch its start point if only an object store holds it.

    A mirror that is newer than the folder wins, since the run may have continued on another machine. Call it in one
    process, which holds the lease of the run.

    Args:
        damaged: checkpoints of the run that are known to be damaged.

    Returns:
        The fetched checkpoint of the run, if any.

    Raises:
        CheckpointError: a store cannot be used, the mirror belongs to another run, or its checkpoints are damaged.
    """
    run, own_step = config.folder, newest_good_step(config.folder, damaged)
    if config.ckpt_mirror_path is not None:
        store = open_mirror(config)
        copies = checkpoints_in(store, needed=own_step < 0)
        found = {folder: each for folder, each in copies.items() if folder and each.step > own_step}
        if found:
            _fetch_log_files(store, run)  # first: after the checkpoint is there, a start does not fetch them
            fetched = fetch_newest(store, found, run / CHECKPOINTS)
            if fetched is None and own_step < 0:
                raise CheckpointError("holds checkpoints, but no good one", path=store.address)
            return fetched
    if own_step < 0 and is_address(config.ckpt_load_path) and newest_good_step(fetched_path(config)) < 0:
        source = Store(config.ckpt_load_path or "")
        if fetch_newest(source, checkpoints_in(source), fetched_path(config) / CHECKPOINTS) is None:
            raise CheckpointError("holds no complete and good checkpoint", path=source.address)
    return None


def _fetch_log_files(store: Store, run: Path) -> None:
    """Fetch the log files that the run's folder lacks or has only in part."""
    for name in LOG_FILES:
        content = store.read(name) or b""
        if len(content) > ((run / name).stat().st_size if is_file(run / name) else 0):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(run / name, content)


def open_mirror(config: CheckpointConfig) -> Store:
    """Return the store of a run's mirror after a test write; raises as `fetch_start`."""
    store = Store(config.ckpt_mirror_path or "")
    name, content = f"probe.{secrets.token_hex(4)}", b"may this run write here?"
    store.write(name, content)
    if store.read(name) != content:
        raise StoreError("reads back other bytes than were written", path=f"{store.address}/{name}")
    store.remove(name)
    _match_run_id(store, config.folder)
    return store


def newest_good_step(run: Path, damaged: Mapping[Path, str] = MappingProxyType({})) -> int:
    """Return the step of a run's newest checkpoint that is not damaged; -1 without one."""
    for checkpoint in reversed(committed_checkpoints(run)):
        with suppress(CheckpointError):
            read_manifest(checkpoint.path)
            if checkpoint.path not in damaged:
                return checkpoint.step
    return -1


def _match_run_id(store: Store, run: Path) -> None:
    """Give the run its mirror's id, or both a new id; raise a CheckpointError if the mirror belongs to another run."""
    own, mirrored = _read_run_id(run), _read_owner(store).get("run")
    local = [each.path for each in committed_checkpoints(run)]
    # A run without an id (lost, or copied by hand) is identified by a checkpoint that the mirror holds, too.
    is_same = own == mirrored or not local or (own is None and any(_is_in_store(store, path) for path in local))
    if mirrored is None:
        mirrored = own or secrets.token_hex(8)
        store.write(MIRROR_FILE, _to_json(run=mirrored, writer=""))
    elif not is_same:
        raise CheckpointError(
            f"is the mirror of another run than {run}: give another --ckpt_mirror_path or --ckpt_save_path",
            path=store.address,
        )
    if own != mirrored:
        run.mkdir(parents=True, exist_ok=True)
        write_atomic(run / MIRROR_FILE, _to_json(run=mirrored))


def _is_in_store(store: Store, path: Path) -> bool:
    manifest = path / MANIFEST
    return is_file(manifest) and store.read(f"{CHECKPOINTS}/{path.name}/{MANIFEST}") == manifest.read_bytes()


def _read_run_id(run: Path) -> str | None:
    try:
        return str(checked_values(parse_json((run / MIRROR_FILE).read_bytes()))["run"])
    except (OSError, ValueError, KeyError):
        return None


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
        step: step of the start point; later checkpoints in the mirror were rolled back, and are set aside.
        newest: the run's own start point; `start` copies it if the mirror lacks it.
        spare_cores: whether uploads pause most of the time until `finish`, since training needs every core.

    Attributes:
        protected: checkpoint that is being copied, and the next one; retention keeps both.
    """

    def __init__(
        self, config: CheckpointConfig, step: int, newest: Path | None = None, *, spare_cores: bool = False
    ) -> None:
        self._config, self._run, self._newest = config, config.folder, newest
        self._store = on_every_rank(lambda: Store(config.ckpt_mirror_path or ""))
        self._token = on_rank_zero(lambda: secrets.token_hex(8))
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
        on_rank_zero(lambda: self._store.retry(lambda: self._take_over(step), self._closing, TRIES_OF_START))

    def start(self) -> None:
        """Copy the start point if the mirror lacks it; a collective call."""
        newest = self._newest
        if newest is not None and on_rank_zero(lambda: self.lacks(newest)):
            self.copy(newest)

    def lacks(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint has no complete copy; on rank 0."""
        return self._held.get(_store_folder(checkpoint)) != read_document(checkpoint)

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
            found = gather_from_every_rank(lambda: (self._status(), self._store.problem))
            status = min(status for status, _ in found)
            if status == RUNNING:
                return next((problem for _, problem in found if problem), "the store is slow")
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
                skip_exit_handlers()  # pyarrow's exit handler would wait for the store

    def _status(self) -> int:
        return self._work.result() if self._work is not None and self._work.done() else RUNNING

    def _start_upload(self) -> None:
        self._is_uploaded = False
        self._work = _in_background(partial(self._run_part, self._upload, self.protected[0]))

    def _continue_copy(self, status: int) -> None:
        if status == TAKEN_OVER:
            raise TakenOverError(f"{self._store.address} belongs to another start of this run now: stop this one")
        if status == RUNNING:
            return
        checkpoint, *waiting = self.protected
        self._sync.forget()
        if status == DONE and not self._is_uploaded:
            self._is_uploaded = True
            self._work = _in_background(partial(self._run_part, self._commit, checkpoint))
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
        """Upload this process's files, in a background thread.

        A step that is saved again usually has the same files, which are not uploaded again. If a file differs, the
        manifest in the store is removed first.
        """
        rank, world_size = rank_and_world_size()
        folder, uploaded = _store_folder(checkpoint), dict[str, FileEntry]()
        content = self._store.retry(lambda: self._store.read(f"{folder}/{MANIFEST}"), self._closing)
        with suppress(CheckpointError, ValueError):
            uploaded = dict(Manifest.parse(parse_json(content or b""), folder).files)
        for name, entry in read_document(checkpoint).files.items():
            number = re.match(r"shard-(\d+)-", name)
            if (int(number[1]) - 1 if number else 0) % world_size == rank and uploaded.get(name) != entry:
                self._store.retry(self._check_writer, self._closing)
                if content is not None:
                    self._store.retry(partial(self._store.remove, f"{folder}/{MANIFEST}"), self._closing)
                target = f"{folder}/{name}"
                upload = partial(self._store.upload, checkpoint / name, target, entry, self._closing, self._full_speed)
                self._store.retry(upload, self._closing)

    def _commit(self, checkpoint: Path) -> None:
        """Upload the manifest, remove superseded copies, and copy the log files; in a background thread of rank 0."""
        if rank_and_world_size()[0] != 0:
            return
        content, folder = (checkpoint / MANIFEST).read_bytes(), _store_folder(checkpoint)
        self._store.retry(self._check_writer, self._closing)
        self._store.retry(lambda: self._store.write(f"{folder}/{MANIFEST}", content), self._closing)
        self._held[folder] = read_document(checkpoint)
        with suppress(StoreError):  # the next commit tries again
            self._remove_superseded(folder)
            self._copy_log_files()

    def _take_over(self, step: int) -> None:
        """Become the mirror's writer, and set aside checkpoints that the run has rolled back."""
        run_id = _read_owner(self._store).get("run", "")
        self._store.write(MIRROR_FILE, _to_json(run=run_id, writer=self._token))
        for folder, manifest in checkpoints_in(self._store).items():
            if manifest.step <= step:
                self._held[folder] = manifest
                continue
            self._store.write(f"{folder}/set_aside.json", self._store.read(f"{folder}/{MANIFEST}") or b"")
            self._store.remove(f"{folder}/{MANIFEST}")
            log.info("%s/%s is newer than step %d and set aside", self._store.address, folder, step)

    def _check_writer(self) -> None:
        if _read_owner(self._store).get("writer") != self._token:
            raise TakenOverError

    def _remove_superseded(self, newest: str) -> None:
        copies = sorted(
            (checkpoint_from(Path(each), self._held[each]) for each in self._held), key=lambda each: each.step
        )
        [own] = [each for each in copies if each.path == Path(newest)]
        copies = [each for each in copies if each.step <= own.step and each.has_save_name]
        for each in superseded(copies, own, best_of(copies), self._config.keep_last):
            self._store.remove(f"{each.path}/{MANIFEST}")  # first: without it, the rest is no checkpoint
            self._store.remove(str(each.path))
            del self._held[str(each.path)]

    def _copy_log_files(self) -> None:
        if monotonic() - self._log_files_copied >= LOG_FILES_SECONDS:
            self._log_files_copied = monotonic()
            for name in LOG_FILES:
                if is_file(self._run / name):
                    self._store.write(name, (self._run / name).read_bytes())


def _store_folder(checkpoint: Path) -> str:
    return f"{CHECKPOINTS}/{checkpoint.name}"


def _in_background(action: Callable[[], int]) -> Future[int]:
    """Run an action in a daemon thread, so that a process can exit without it."""
    future: Future[int] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # a bug: `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name="mirror", daemon=True).start()
    return future
