"""Mirror of a run: a copy of its checkpoints in an object store, which outlives the machines (`--ckpt_mirror_path`).

    start      `list_copies`: check that this run may write there; `fetch_start`: fetch what only the store holds
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
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from pretraining.checkpoint.copies import TRIES_OF_START, fetch_copy, read_copies, upload_file
from pretraining.checkpoint.forms import read_document, read_if_good
from pretraining.checkpoint.manifest import MANIFEST, Manifest
from pretraining.checkpoint.own_checkpoints import NO_COPIES, Copies
from pretraining.checkpoint.retention import best_of, set_aside, superseded
from pretraining.checkpoint.run_folder import CHECKPOINTS, SET_ASIDE_FILE, checkpoint_from, committed_checkpoints
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.recipes import RUN_CONFIG_FILE
from pretraining.config.training import CheckpointConfig
from pretraining.distributed.host_sync import DelayedMinimum
from pretraining.distributed.processes import gather_from_every_rank, on_every_rank, on_rank_zero, rank_and_world_size
from pretraining.distributed.rendezvous import in_background
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import checked_values, is_file, parse_json, with_checksum, write_atomic
from pretraining.model.hf import ORIGIN_FILE
from pretraining.object_store import Store, StoreError, exit_without_waiting
from pretraining.observability.events import EVENTS_FILE
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.text import list_some

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


def list_copies(config: CheckpointConfig, tries: int = 1) -> Copies:
    """List the checkpoints in a run's mirror, after a check that the run may write there; in one process.

    Nothing is written into the run's folder, so a start that is refused later leaves no trace of a wrong mirror.

    Args:
        tries: maximum, if the store fails.

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
        store.write(probe, [b"may this run write here?"])
        store.remove(probe)
        _check_run_id(store, folder, copies)
        return copies

    return store.retry(read, threading.Event(), tries)


def _check_run_id(store: Store, run: Path, copies: Copies) -> None:
    """Raise a CheckpointError if the mirror belongs to another run."""
    own, mirrored = _read_run_id(run), _read_owner(store).get("run")
    local = [each.path for each in committed_checkpoints(run)]
    if mirrored in (None, own) or not local:
        return
    # A run without an id (lost, or copied by hand) is identified by a checkpoint that the mirror holds, too.
    in_both = [path for path in local if path.name in copies.complete]
    if own is None and any(read_if_good(path) == copies.complete[path.name].manifest for path in in_both):
        return
    raise CheckpointError(
        f"is the mirror of another run than {run}: give another --ckpt_mirror_path or --ckpt_save_path",
        path=store.address,
    )


def fetch_start(config: CheckpointConfig, start: CheckpointRef) -> None:
    """Fetch the start point and the run's best checkpoint, if only an object store holds them; in one process.

    Raises:
        DamagedError: the copy of the start point is damaged.
        CheckpointError: a checkpoint cannot be written or moved.
        StoreError: a store cannot be used.
    """
    if start.run.given_up:
        log.warning("the run has gone back on another machine, and its mirror has set newer checkpoints aside")
        set_aside(config.folder, start.run.given_up)
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
        step: step of the start point; the run has gone back from later checkpoints in the mirror, which are set aside
            once the mirror holds a checkpoint to start from in their place.
        newest: the run's own start point; `start` copies it if the mirror lacks it.
        given_up: names of other copies that the run has gone back from.
        listed: names of the copies that the start has chosen from; None = newer ones are set aside, too.
        spare_cores: whether uploads pause most of the time until `finish`, since training needs every core.

    Attributes:
        known: on rank 0: manifests of all copies at the start, those set aside included.
        protected: checkpoint that is being copied, and the next one; retention keeps both.

    Raises:
        DamagedError: the mirror holds a newer checkpoint that is not listed; on every rank alike.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        step: int,
        newest: Path | None = None,
        *,
        given_up: Collection[str] = (),
        listed: Collection[str] | None = None,
        spare_cores: bool = False,
    ) -> None:
        self._config, self._run, self._newest, self._step = config, config.folder, newest, step
        self._store = on_every_rank(lambda: Store(config.ckpt_mirror_path or ""))
        self._token = on_rank_zero(lambda: secrets.token_hex(8))
        self._held: dict[str, Manifest] = {}  # on rank 0: complete checkpoints in the mirror
        self._given_up: dict[str, Manifest] = {}  # on rank 0: those to set aside
        self._closing, self._full_speed = threading.Event(), threading.Event()
        if not spare_cores:
            self._full_speed.set()
        self._sync = DelayedMinimum()
        self._work: Future[int] | None = None
        self._is_uploaded = False
        self._not_copied: Path | None = None
        self._log_files_copied = -LOG_FILES_SECONDS
        self.protected: tuple[Path, ...] = ()
        self.known: list[Manifest] = []
        on_rank_zero(
            lambda: self._store.retry(lambda: self._take_over(given_up, listed), self._closing, TRIES_OF_START)
        )

    def start(self) -> None:
        """Copy the start point if the mirror lacks it; a collective call."""
        newest = self._newest
        if newest is not None and on_rank_zero(lambda: self.lacks(newest)):
            self.copy(newest)

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
                exit_without_waiting()

    def _status(self) -> int:
        return self._work.result() if self._work is not None and self._work.done() else RUNNING

    def _start_upload(self) -> None:
        self._is_uploaded = False
        self._work = in_background(partial(self._run_part, self._upload, self.protected[0]), "mirror")

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
        if any(each.step == self._step for each in self._held.values()):
            # First: beside a checkpoint of the new branch, an older branch counts as moved back by the user.
            self._retry(self._set_given_up_aside)
        self._store.retry(
            lambda: self._store.write(f"{_store_folder(checkpoint)}/{MANIFEST}", [content]), self._closing
        )
        self._held[checkpoint.name] = read_document(checkpoint)
        self._given_up.pop(checkpoint.name, None)
        with suppress(StoreError):  # the next commit tries again
            self._set_given_up_aside()
            self._remove_superseded(checkpoint.name)
            self._copy_log_files()

    def _retry(self, action: Callable[[], None]) -> None:
        self._store.retry(action, self._closing)

    def _take_over(self, given_up: Collection[str], listed: Collection[str] | None) -> None:
        """Become the mirror's writer, and list its checkpoints."""
        run_id = _read_owner(self._store).get("run") or _read_run_id(self._run) or secrets.token_hex(8)
        self._store.write(MIRROR_FILE, [_to_json(run=run_id, writer=self._token)])
        if _read_run_id(self._run) != run_id:
            write_atomic(self._run / MIRROR_FILE, _to_json(run=run_id))
        copies = read_copies(self._config.ckpt_mirror_path or "")
        complete = {name: copy.manifest for name, copy in copies.complete.items()}
        self.known = [*complete.values(), *copies.set_aside.values()]
        self._held = {name: each for name, each in complete.items() if each.step <= self._step and name not in given_up}
        self._given_up = {name: each for name, each in complete.items() if name not in self._held}
        unseen = [] if listed is None else sorted(self._given_up.keys() - {*listed})
        if unseen:
            raise DamagedError(
                f"holds newer checkpoints of another machine ({list_some(unseen, 4)})", path=self._store.address
            )
        if self._newest is not None and not self.lacks(self._newest):
            self._set_given_up_aside()

    def _set_given_up_aside(self) -> None:
        for name, manifest in list(self._given_up.items()):
            folder = f"{CHECKPOINTS}/{name}"
            self._store.write(f"{folder}/{SET_ASIDE_FILE}", [json.dumps(manifest.document()).encode()])
            self._store.remove(f"{folder}/{MANIFEST}")
            log.info("%s/%s is set aside, since the run has gone back from it", self._store.address, folder)
            del self._given_up[name]

    def _check_writer(self) -> None:
        if _read_owner(self._store).get("writer") != self._token:
            raise TakenOverError

    def _remove_superseded(self, newest: str) -> None:
        copies = sorted(
            (checkpoint_from(Path(name), manifest) for name, manifest in self._held.items()), key=lambda each: each.step
        )
        [own] = [each for each in copies if each.path.name == newest]
        copies = [each for each in copies if each.step <= own.step and each.has_save_name]
        for each in superseded(copies, own, best_of(copies), self._config.keep_last):
            folder = f"{CHECKPOINTS}/{each.path.name}"
            self._store.remove(f"{folder}/{MANIFEST}")  # first: without it, the rest is no checkpoint
            self._store.remove(folder)
            del self._held[each.path.name]

    def _copy_log_files(self) -> None:
        if monotonic() - self._log_files_copied >= LOG_FILES_SECONDS:
            self._log_files_copied = monotonic()
            for name in COPIED_FILES:
                if is_file(self._run / name):
                    self._store.write(name, [(self._run / name).read_bytes()])


def _store_folder(checkpoint: Path) -> str:
    return f"{CHECKPOINTS}/{checkpoint.name}"
