"""A copy of a run in an object store, so that the run outlives its machines: `--ckpt_mirror_path`.

    start      `fetch_start`: may this run write there? Fetch the newest copy if it is newer than the folder
    commit     `Mirror.copy`: each process uploads its files beside the training, then rank 0 the manifest
    each step  `Mirror.poll`: is every process done? No rank waits for another
    end        `Mirror.finish`: wait for the newest copy

`mirror.json` holds the id of the run, in its folder and in the store, and there the token of its writer as well: the
mirror of another run is refused, and a process that finds another token writes no manifest any more.
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
from pretraining.checkpoint.run_folder import CHECKPOINTS, committed_checkpoints, describe
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
"""Between two copies of the log files."""
PREEMPTED_SECONDS = 20.0
"""How long a run that has to stop waits for its last copy: launchers kill 30 seconds after SIGTERM."""
CLOSING_SECONDS = 30.0


class TakenOverError(CheckpointError):
    """Another process writes into the mirror of this run."""


# The start


def fetch_start(config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({})) -> Path | None:
    """Check that a run may write to its mirror, and fetch what it starts from if that is in a store alone.

    A mirror that is newer than the folder wins, since a run may have gone on elsewhere.

    In one process, which holds the lease of the run.

    Args:
        damaged: checkpoints of the run that are known not to be good.

    Returns:
        The checkpoint of the run that was fetched, if any.

    Raises:
        CheckpointError: a store cannot be used, the mirror is of another run, or what it holds is damaged.
    """
    run, own_step = config.folder, newest_good_step(config.folder, damaged)
    if config.ckpt_mirror_path is not None:
        store = open_mirror(config)
        copies = checkpoints_in(store, needed=own_step < 0)
        found = {folder: each for folder, each in copies.items() if folder and each.step > own_step}
        if found:
            _fetch_log_files(store, run)  # first: once the checkpoint is there, they are not asked for again
            fetched = fetch_newest(store, found, run / CHECKPOINTS)
            if fetched is None and own_step < 0:
                raise CheckpointError("holds checkpoints, and none is good", path=store.address)
            return fetched
    if own_step < 0 and is_address(config.ckpt_load_path) and newest_good_step(fetched_path(config)) < 0:
        source = Store(config.ckpt_load_path or "")
        if fetch_newest(source, checkpoints_in(source), fetched_path(config) / CHECKPOINTS) is None:
            raise CheckpointError("holds no complete checkpoint that is good", path=source.address)
    return None


def _fetch_log_files(store: Store, run: Path) -> None:
    """Fetch the log files that the run's folder lacks, or of which it has less."""
    for name in LOG_FILES:
        content = store.read(name) or b""
        if len(content) > ((run / name).stat().st_size if is_file(run / name) else 0):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(run / name, content)


def open_mirror(config: CheckpointConfig) -> Store:
    """Return the mirror of a run that may write there; raises as `fetch_start`."""
    store = Store(config.ckpt_mirror_path or "")
    name, content = f"probe.{secrets.token_hex(4)}", b"may this run write here?"
    store.write(name, content)
    if store.read(name) != content:
        raise StoreError("does not hold what was written", path=f"{store.address}/{name}")
    store.remove(name)
    _adopt_id(store, config.folder)
    return store


def newest_good_step(run: Path, damaged: Mapping[Path, str] = MappingProxyType({})) -> int:
    """Return the step of the newest checkpoint of a run that is not damaged; -1 without one."""
    for checkpoint in reversed(committed_checkpoints(run)):
        with suppress(CheckpointError):
            read_manifest(checkpoint.path)
            if checkpoint.path not in damaged:
                return checkpoint.step
    return -1


def _adopt_id(store: Store, run: Path) -> None:
    """Give a run the id of its mirror, or both a new one; a CheckpointError if the mirror is of another run."""
    own, there = _id_in(run), _owner(store).get("run")
    local = committed_checkpoints(run)
    if there is None:
        there = own or secrets.token_hex(8)
        store.write(MIRROR_FILE, _document(run=there, writer=""))
    # Without an id, since it was lost or the copies were made by hand, a checkpoint that both hold says as much.
    elif own != there and local and (own is not None or not any(_is_in(store, each.path) for each in local)):
        raise CheckpointError(
            f"is the mirror of another run than the one in {run}: give another --ckpt_mirror_path, or the "
            "--ckpt_save_path of its run",
            path=store.address,
        )
    if own != there:
        run.mkdir(parents=True, exist_ok=True)
        write_atomic(run / MIRROR_FILE, _document(run=there))


def _is_in(store: Store, path: Path) -> bool:
    manifest = path / MANIFEST
    return is_file(manifest) and store.read(f"{CHECKPOINTS}/{path.name}/{MANIFEST}") == manifest.read_bytes()


def _id_in(run: Path) -> str | None:
    try:
        return str(checked_values(parse_json((run / MIRROR_FILE).read_bytes()))["run"])
    except (OSError, ValueError, KeyError):
        return None


def _owner(store: Store) -> dict[str, Any]:
    """Return what the store says of the run and its writer; nothing without an owner."""
    content = store.read(MIRROR_FILE)
    try:
        return {} if content is None else checked_values(parse_json(content))
    except ValueError as error:
        raise CheckpointError(
            f"damaged ({error}). Remove it if no other run writes there", path=f"{store.address}/{MIRROR_FILE}"
        ) from None


def _document(**values: str) -> bytes:
    return json.dumps(with_checksum(values)).encode()


# Copies beside the training

TAKEN_OVER, UNDER_WAY, GONE, DONE = -1, 0, 1, 2
"""How a process is getting on with its part of a copy; the least of all processes counts."""


class Mirror:
    """Copies what a run commits; making one is a collective call, as are `copy`, `poll` and `finish`.

    Args:
        config: names the run's folder and its mirror.
        step: where the run begins, in whose mirror later checkpoints are those that it has gone back from: set aside.
        newest: the run's own checkpoint that it begins from; `start` copies it if the mirror lacks it.
        spare_cores: whether uploads rest most of the time until `finish`, since the run needs every core.

    Attributes:
        protected: the checkpoint that is being copied, and the one that waits: retention leaves them alone.
    """

    def __init__(
        self, config: CheckpointConfig, step: int, newest: Path | None = None, *, spare_cores: bool = False
    ) -> None:
        self._config, self._run, self._newest = config, config.folder, newest
        self._store = on_every_rank(lambda: Store(config.ckpt_mirror_path or ""))
        self._token = on_rank_zero(lambda: secrets.token_hex(8))
        self._held: dict[str, Manifest] = {}  # on rank 0: what is complete in the mirror
        self._ending, self._hurried = threading.Event(), threading.Event()
        if not spare_cores:
            self._hurried.set()
        self._agreement = DelayedMinimum()
        self._work: Future[int] | None = None
        self._is_uploaded = False
        self._lost: Path | None = None
        self._log_files_copied = -LOG_FILES_SECONDS
        self.protected: tuple[Path, ...] = ()
        on_rank_zero(lambda: self._store.persist(lambda: self._take_over(step), self._ending, TRIES_OF_START))

    def start(self) -> None:
        """Copy what the run begins from, if the mirror lacks it; a collective call."""
        newest = self._newest
        if newest is not None and on_rank_zero(lambda: self.lacks(newest)):
            self.copy(newest)

    def lacks(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint has no complete copy; on rank 0."""
        return self._held.get(_folder_of(checkpoint)) != read_document(checkpoint)

    def copy(self, checkpoint: Path) -> None:
        """Copy a committed checkpoint, after the copy under way; of those that wait, the newest alone is copied."""
        self.protected = (*self.protected[:1], checkpoint)
        if self._work is None:
            self._begin()

    def poll(self) -> None:
        """Take the next step of a copy once every rank is done with the last one; call it once a step.

        Raises:
            TakenOverError: another process writes into the mirror; on every rank alike.
        """
        if self._work is not None and (least := self._agreement.offer(self._status())) is not None:
            self._advance(int(least[0]))

    def finish(self, seconds: float) -> str | None:
        """Wait until all is copied; return what prevented it if that takes longer, on every rank alike.

        Raises:
            TakenOverError: as `poll`.
        """
        self._hurried.set()
        self._agreement.forget()
        self._log_files_copied = -LOG_FILES_SECONDS
        deadline = monotonic() + seconds
        while self._work is not None:
            with suppress(TimeoutError):
                self._work.result(max(0.0, deadline - monotonic()))
            found = gather_from_every_rank(lambda: (self._status(), self._store.problem))
            status = min(status for status, _ in found)
            if status == UNDER_WAY:
                return next((problem for _, problem in found if problem), "the store is slow")
            self._advance(status)
        return None if self._lost is None else f"{self._lost.name} could not be read; the log says why"

    def close(self, *, wait: bool) -> None:
        """End the copy under way; what it has uploaded is no checkpoint.

        Args:
            wait: until its thread has ended. Otherwise the process ends without it, also if the store hangs.
        """
        self._ending.set()
        self._hurried.set()
        if self._work is not None:
            with suppress(TimeoutError):
                self._work.result(CLOSING_SECONDS if wait else 0.0)
            if not self._work.done():
                skip_exit_handlers()  # pyarrow's would wait for the store

    def _status(self) -> int:
        return self._work.result() if self._work is not None and self._work.done() else UNDER_WAY

    def _begin(self) -> None:
        self._is_uploaded = False
        self._work = _in_background(partial(self._do, self._upload, self.protected[0]))

    def _advance(self, status: int) -> None:
        if status == TAKEN_OVER:
            raise TakenOverError(
                f"{self._store.address} belongs to another start of this run now: end this one. Its own checkpoints "
                f"are in {self._run / CHECKPOINTS}"
            )
        if status == UNDER_WAY:
            return
        checkpoint, *waiting = self.protected
        self._agreement.forget()
        if status == DONE and not self._is_uploaded:
            self._is_uploaded = True
            self._work = _in_background(partial(self._do, self._commit, checkpoint))
            return
        self._lost = checkpoint if status == GONE else None
        if status == DONE:
            log.info("%s is copied to %s", checkpoint.name, self._store.address)
        self.protected, self._work = tuple(waiting), None
        if waiting:
            self._begin()

    def _do(self, action: Callable[[Path], None], checkpoint: Path) -> int:
        """Do a part of a copy, and return how it ended."""
        try:
            action(checkpoint)
        except TakenOverError:
            return TAKEN_OVER
        except Exception as error:  # of the checkpoint: what a store says is tried again
            if not self._ending.is_set():
                reason = f"{type(error).__name__}: {error}"
                log.warning("%s is not copied to %s: %s", checkpoint, self._store.address, reason)
            return GONE
        return DONE

    def _upload(self, checkpoint: Path) -> None:
        """Upload the files that this process wrote, or would have written, in a thread.

        A step that is saved again has the same tensors, which are there already. If they differ, the manifest goes
        before the first of them does.
        """
        rank, world_size = rank_and_world_size()
        folder, before = _folder_of(checkpoint), dict[str, FileEntry]()
        content = self._store.persist(lambda: self._store.read(f"{folder}/{MANIFEST}"), self._ending)
        with suppress(CheckpointError, ValueError):
            before = dict(Manifest.parse(parse_json(content or b""), folder).files)
        for name, entry in read_document(checkpoint).files.items():
            number = re.match(r"shard-(\d+)-", name)
            if (int(number[1]) - 1 if number else 0) % world_size == rank and before.get(name) != entry:
                self._store.persist(self._check_writer, self._ending)
                if content is not None:
                    self._store.persist(partial(self._store.remove, f"{folder}/{MANIFEST}"), self._ending)
                target = f"{folder}/{name}"
                upload = partial(self._store.upload, checkpoint / name, target, entry, self._ending, self._hurried)
                self._store.persist(upload, self._ending)

    def _commit(self, checkpoint: Path) -> None:
        """Upload the manifest, remove what is superseded and copy the log files, in a thread of rank 0."""
        if rank_and_world_size()[0] != 0:
            return
        content, folder = (checkpoint / MANIFEST).read_bytes(), _folder_of(checkpoint)
        self._store.persist(self._check_writer, self._ending)
        self._store.persist(lambda: self._store.write(f"{folder}/{MANIFEST}", content), self._ending)
        self._held[folder] = read_document(checkpoint)
        with suppress(StoreError):  # the next copy tries again
            self._remove_superseded(folder)
            self._copy_log_files()

    def _take_over(self, step: int) -> None:
        """Become the writer, and set aside what the run has gone back from."""
        run_id = _owner(self._store).get("run", "")
        self._store.write(MIRROR_FILE, _document(run=run_id, writer=self._token))
        for folder, manifest in checkpoints_in(self._store).items():
            if manifest.step <= step:
                self._held[folder] = manifest
                continue
            self._store.write(f"{folder}/set_aside.json", self._store.read(f"{folder}/{MANIFEST}") or b"")
            self._store.remove(f"{folder}/{MANIFEST}")
            log.info("%s/%s is newer than step %d: set aside", self._store.address, folder, step)

    def _check_writer(self) -> None:
        if _owner(self._store).get("writer") != self._token:
            raise TakenOverError

    def _remove_superseded(self, newest: str) -> None:
        copies = sorted((describe(Path(each), self._held[each]) for each in self._held), key=lambda each: each.step)
        [own] = [each for each in copies if each.path == Path(newest)]
        copies = [each for each in copies if each.step <= own.step and each.is_as_saved]
        for each in superseded(copies, own, best_of(copies), self._config.keep_last):
            self._store.remove(f"{each.path}/{MANIFEST}")  # first: half a checkpoint is none
            self._store.remove(str(each.path))
            del self._held[str(each.path)]

    def _copy_log_files(self) -> None:
        if monotonic() - self._log_files_copied >= LOG_FILES_SECONDS:
            self._log_files_copied = monotonic()
            for name in LOG_FILES:
                if is_file(self._run / name):
                    self._store.write(name, (self._run / name).read_bytes())


def _folder_of(checkpoint: Path) -> str:
    """Return where a checkpoint is in the store."""
    return f"{CHECKPOINTS}/{checkpoint.name}"


def _in_background(action: Callable[[], int]) -> Future[int]:
    """Run something in a thread that no end of a process waits for."""
    future: Future[int] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # a mistake in here: `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name="mirror", daemon=True).start()
    return future
