"""One run writes into a folder at a time: a file says which process, and a heartbeat that it is still there.

    <run>/lease.json     host, process, when it began; the file's time is renewed every ten seconds

A second start on the same folder is refused while the first one lives. The lease of a process of this machine (the same
boot, the same namespace of process ids) is free when no process has its id and start time. Any other lease is free once
it stayed unchanged for a minute of this process's own clock: no two machines' clocks are compared. Before each commit
the writer checks that the lease is still its own: a process that was stopped for long and wakes up commits nothing. A
damaged lease counts as unchanged.
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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import sleep

from pretraining.distributed.processes import Processes, on_rank_zero
from pretraining.errors import CheckpointError
from pretraining.files import checked_values, exists, read_json, with_checksum, writing_into

log = logging.getLogger(__name__)

LEASE = "lease.json"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60


@dataclass(frozen=True)
class Holder:
    """A process that writes into a run's folder.

    Attributes:
        machine: the boot and the namespace of process ids.
        process_start: tells the process from a later one with the same id.
        started: when it took the lease, for people.
    """

    host: str
    machine: str
    pid: int
    process_start: str
    started: str
    token: str

    @staticmethod
    def this_process() -> Holder:
        """Return this process, with a new token."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Holder(socket.gethostname(), _machine(), os.getpid(), _start_of(os.getpid()), now, secrets.token_hex(8))

    @property
    def lives(self) -> bool | None:
        """Whether the process lives; None if it is not of this machine, which cannot tell."""
        return _start_of(self.pid) == self.process_start if self.machine == _machine() else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class Lease:
    """The right to write into a run's folder."""

    def __init__(self, run: Path) -> None:
        self._run, self._path = run, run / LEASE
        self._own = Holder.this_process()
        self._ending = threading.Event()
        self._heartbeat = threading.Thread(target=self._renew, name="lease", daemon=True)

    def acquire(self) -> None:
        """Take the lease, and keep it alive until `release`.

        Raises:
            CheckpointError: another process holds it, or the folder cannot be written.
        """
        with writing_into(self._run):
            self._run.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._remove_free()
        self._heartbeat.start()

    def check(self) -> None:
        """Raise a CheckpointError if the lease is no longer this process's."""
        if not self._is_own():
            raise CheckpointError(
                f"belongs to this run no more: {LEASE} is gone, or of {_name(_holder_of(self._path))}. Nothing was "
                "changed; end this run",
                path=self._run,
            )

    def release(self) -> None:
        """Let others write, and leave no empty folder behind."""
        self._ending.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        with suppress(OSError):  # this process ends, so what is left of the lease is free
            if self._is_own():
                self._path.unlink()
                self._run.rmdir()  # succeeds only after a start that was refused before it wrote anything

    def _is_own(self) -> bool:
        try:
            is_filled = self._path.stat().st_size > 0  # otherwise another start is about to fill it
        except FileNotFoundError:
            return False
        return is_filled and _holder_of(self._path) in (self._own, None)

    def _create(self) -> bool:
        with suppress(FileExistsError), self._path.open("x", encoding="utf-8") as file:  # of two at once, one makes it
            file.write(json.dumps(with_checksum(asdict(self._own))))
            return True
        return False

    def _remove_free(self) -> None:
        """Wait until the lease is free, and remove it; a CheckpointError if its holder lives."""
        holder, before = _holder_of(self._path), _last_change(self._path)
        for _ in range(STALE_SECONDS if look_at_lease(self._run) else 0):
            sleep(1.0)
            now = _last_change(self._path)
            if now is None:
                return
            if now != before:
                raise _held_by(self._run, holder)
        if _holder_of(self._path) == holder:  # otherwise another start was faster
            self._path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._ending.wait(HEARTBEAT_SECONDS):
            try:
                if not self._is_own():
                    return  # the next commit says so
                os.utime(self._path)  # takes no space, so a full disk does not end it
            except OSError as error:
                log.warning("%s cannot be renewed: %s", self._path, error)


@contextmanager
def hold_lease(run: Path, processes: Processes) -> Iterator[Lease]:
    """Hold a run's lease, on rank 0 for all; a collective call. Raises as `acquire`."""
    lease = Lease(run)
    on_rank_zero(lease.acquire)
    try:
        yield lease
    finally:
        if processes.is_main:
            lease.release()


def look_at_lease(run: Path) -> bool:
    """Return whether a start has to wait for the end of a run's lease, and log so.

    Raises:
        CheckpointError: a process of this machine holds the lease, so `hold_lease` refuses at once.
    """
    if not exists(run / LEASE):
        return False
    holder = _holder_of(run / LEASE)
    lives = None if holder is None else holder.lives
    if lives:
        raise _held_by(run, holder)
    if lives is None:
        log.warning("%s belongs to %s: a start waits up to %d s for a sign of life", run, _name(holder), STALE_SECONDS)
    return lives is None


def _held_by(run: Path, holder: Holder | None) -> CheckpointError:
    return CheckpointError(
        f"another run is writing into it: {_name(holder)}. Stop it, or give another --ckpt_save_path. (If you are sure "
        f"that it is gone, remove {run / LEASE}.)",
        path=run,
    )


def _name(holder: Holder | None) -> str:
    return str(holder or f"an unknown process ({LEASE} is damaged)")


def _holder_of(path: Path) -> Holder | None:
    """Return who holds a lease; None if there is none, or it is damaged."""
    try:
        return Holder(**checked_values(read_json(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _last_change(path: Path) -> tuple[int, int] | None:
    """Return what changes with each renewal; None if there is no lease."""
    with suppress(FileNotFoundError), path.open("rb") as file:  # opened: a network file system asks its server then
        status = os.fstat(file.fileno())
        return status.st_mtime_ns, status.st_ino
    return None


def _machine() -> str:
    """Return this boot of this machine with its namespace of process ids; without a /proc what equals no other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(8)


def _start_of(pid: int) -> str:
    """Return when a process of this machine began, in the kernel's ticks; empty if there is none (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # ended, but not yet collected by its parent
