"""Lease of a run's folder: only one run writes into it at a time.

    <run>/lease.json     host, process, start time; a heartbeat renews the file's time every ten seconds

A second start on the same folder is refused while the first one lives. A lease of this machine (same boot, same process
id namespace) is free when no process has its id and start time. Any other lease is free once the file stayed unchanged
for a minute of this process's clock; clocks of two machines are never compared. Before each commit the writer checks
that it still has the lease, so a process that wakes up after a long stop commits nothing. A damaged lease counts as
unchanged. A lease that came with a copy of the folder is free: it names another folder, and is another file than its
holder made. (The path alone does not tell, since machines may mount one folder at several paths.)
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import sleep

from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.errors import CheckpointError
from pretraining.files import checked_values, exists, read_json, real_path, with_checksum, writing_into

log = logging.getLogger(__name__)

LEASE = "lease.json"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60
SHARED_SECONDS = 60


@dataclass(frozen=True)
class Holder:
    """Process that writes into a run's folder.

    Attributes:
        machine: boot and process id namespace.
        process_start: start time; a later process with the same id has another.
        started: time when the lease was taken, for people.
        folder: real path of the run's folder; empty before the lease is taken.
        inode: number of the lease's file.
    """

    host: str
    machine: str
    pid: int
    process_start: str
    started: str
    token: str
    folder: str
    inode: int

    @staticmethod
    def this_process() -> Holder:
        """Return this process, with a new token, before it has the lease."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return Holder(socket.gethostname(), _machine_id(), pid, _process_start(pid), now, secrets.token_hex(8), "", 0)

    @property
    def is_alive(self) -> bool | None:
        """Whether the process is alive; None if it runs on another machine."""
        return _process_start(self.pid) == self.process_start if self.machine == _machine_id() else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class Lease:
    """Right to write into a run's folder."""

    def __init__(self, run: Path) -> None:
        self._run, self._path = run, run / LEASE
        self._own = Holder.this_process()
        self._stopping = threading.Event()
        self._heartbeat = threading.Thread(target=self._renew, name="lease", daemon=True)

    def acquire(self) -> str:
        """Take the lease, and renew it until `release`; return random text that tells it from all others.

        Raises:
            CheckpointError: another process holds it, or the folder cannot be written.
        """
        with writing_into(self._run):
            self._run.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._remove_free()
        self._heartbeat.start()
        return self._own.token

    def check(self) -> None:
        """Raise a CheckpointError if this process has lost the lease."""
        if not self._is_own():
            raise CheckpointError(
                f"its {LEASE} is missing, or of {_format_holder(_read_holder(self._path))}: stop this run",
                path=self._run,
            )

    def release(self) -> None:
        """Free the folder for other runs, and remove it if it is empty."""
        self._stopping.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        with suppress(OSError):  # a leftover lease is free once this process has exited
            if self._is_own():
                self._path.unlink()
                self._run.rmdir()  # succeeds only after a refused start that wrote nothing

    def _is_own(self) -> bool:
        try:
            is_filled = self._path.stat().st_size > 0  # an empty lease is being written by another start
        except FileNotFoundError:
            return False
        return is_filled and _read_holder(self._path) in (self._own, None)

    def _create(self) -> bool:
        with suppress(FileExistsError), self._path.open("x", encoding="utf-8") as file:  # only one process creates it
            self._own = replace(self._own, folder=str(real_path(self._run)), inode=os.fstat(file.fileno()).st_ino)
            file.write(json.dumps(with_checksum(asdict(self._own))))
            return True
        return False

    def _remove_free(self) -> None:
        """Wait until the lease is free, and remove it; raise a CheckpointError if its holder is alive."""
        holder, before = _read_holder(self._path), _last_change(self._path)
        for _ in range(STALE_SECONDS if must_wait_for_lease(self._run) else 0):
            sleep(1.0)
            now = _last_change(self._path)
            if now is None:
                return
            if now != before:
                raise _held_error(self._run, holder)
        if _read_holder(self._path) == holder:  # otherwise another start has taken it
            self._path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            try:
                if not self._is_own():
                    return  # the next commit raises the error
                os.utime(self._path)  # needs no space, so a full disk does not stop the heartbeat
            except OSError as error:
                log.warning("%s cannot be renewed: %s", self._path, error)


@contextmanager
def hold_lease(run: Path, processes: Processes) -> Iterator[Lease]:
    """Hold a run's lease on rank 0 for all ranks; a collective call that raises as `Lease.acquire`."""
    lease = Lease(run)
    token = on_rank_zero(lease.acquire)
    try:
        on_every_rank(lambda: _check_shared(run, token))
        yield lease
    finally:
        if processes.is_main:
            lease.release()


def _check_shared(run: Path, token: str) -> None:
    """Raise a CheckpointError if this process does not see the lease that rank 0 has just taken in the run's folder.

    A network file system may show an older state of the folder for as long as `SHARED_SECONDS`.
    """
    for _ in range(SHARED_SECONDS):
        holder = _read_holder(run / LEASE)
        if holder is not None and holder.token == token:
            return
        sleep(1.0)
    raise CheckpointError(
        f"is not the folder that rank 0 writes into: {socket.gethostname()} does not see the {LEASE} of this start. "
        "All processes of a job save there and read it, so give a --ckpt_save_path on a disk that all nodes share",
        path=real_path(run),
    )


def must_wait_for_lease(run: Path) -> bool:
    """Return whether a start must wait until a run's lease is stale; log a line if so.

    Raises:
        CheckpointError: a live process of this machine holds the lease.
    """
    if not exists(run / LEASE):
        return False
    holder = _read_holder(run / LEASE)
    if holder is not None and _is_copied(run, holder):
        return False
    is_alive = None if holder is None else holder.is_alive
    if is_alive:
        raise _held_error(run, holder)
    if is_alive is None:
        holder_text = _format_holder(holder)
        log.warning("%s belongs to %s: a start waits up to %d s for a heartbeat", run, holder_text, STALE_SECONDS)
    return is_alive is None


def _is_copied(run: Path, holder: Holder) -> bool:
    """Return whether a lease was copied together with its folder."""
    change = _last_change(run / LEASE)
    is_other_file = change is not None and change[1] != holder.inode
    return holder.folder not in ("", str(real_path(run))) and is_other_file


def _held_error(run: Path, holder: Holder | None) -> CheckpointError:
    return CheckpointError(
        f"another run writes into it: {_format_holder(holder)}. Stop that run, or give another --ckpt_save_path. (If "
        f"that run is certainly gone, remove {run / LEASE}.)",
        path=run,
    )


def _format_holder(holder: Holder | None) -> str:
    return str(holder or f"an unknown process ({LEASE} is damaged)")


def _read_holder(path: Path) -> Holder | None:
    """Return the holder of a lease; None if the lease is missing or damaged."""
    try:
        return Holder(**checked_values(read_json(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _last_change(path: Path) -> tuple[int, int] | None:
    """Return a value that each renewal changes; None without a lease."""
    with suppress(FileNotFoundError), path.open("rb") as file:  # opening makes a network file system ask its server
        status = os.fstat(file.fileno())
        return status.st_mtime_ns, status.st_ino
    return None


def _machine_id() -> str:
    """Return an id of this boot and process id namespace; without /proc, a random one that equals no other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(8)


def _process_start(pid: int) -> str:
    """Return the start time of a process of this machine, in kernel ticks; empty if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # Z, X: exited, but not yet collected by its parent
