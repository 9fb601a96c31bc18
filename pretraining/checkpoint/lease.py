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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from pretraining.distributed.processes import Processes, on_rank_zero
from pretraining.errors import CheckpointError
from pretraining.files import checked_values, exists, read_json, run_not_writable, with_checksum

log = logging.getLogger(__name__)

LEASE = "lease.json"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


@dataclass(frozen=True)
class Holder:
    """A process that writes into a run's folder.

    Attributes:
        machine: the boot and the namespace of process ids; empty if the system does not tell.
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
    def is_here(self) -> bool:
        """Whether this machine can tell if the process lives."""
        return self.machine != "" and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether the process, of this machine, has ended."""
        return _start_of(self.pid) != self.process_start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class Lease:
    """The right to write into a run's folder.

    Args:
        pause: sleeps for some seconds.
        clock: this process's own, in seconds.
    """

    def __init__(
        self, run: Path, pause: Callable[[float], object] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._path = run, run / LEASE
        self._pause, self._clock = pause, clock
        self._own = Holder.this_process()
        self._ending = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="lease", daemon=True)

    def acquire(self) -> None:
        """Take the lease, and keep it alive until `release`.

        Raises:
            CheckpointError: another process holds it, or the folder cannot be written.
        """
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._await_end_of_holder()
        except OSError as error:
            raise run_not_writable(self._run, error) from None
        self._heartbeat.start()

    def check(self) -> None:
        """Raise a CheckpointError if the lease is no longer this process's."""
        if not self._is_own():
            holder = _read(self._path)
            how = f"now {holder} writes there" if holder else f"{LEASE} or the folder was removed"
            raise CheckpointError(
                f"does not belong to this run any more: {how}. Nothing was changed; end this run.", path=self._run
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
            if not self._path.read_bytes():  # another start is about to fill it
                return False
        except FileNotFoundError:
            return False
        return _read(self._path) in (self._own, None)

    def _create(self) -> bool:
        try:
            with self._path.open("x", encoding="utf-8") as file:  # of two starts at once, one makes it
                file.write(json.dumps(with_checksum(asdict(self._own))))
        except FileExistsError:
            return False
        return True

    def _await_end_of_holder(self) -> None:
        """Wait until the lease is free.

        Raises:
            CheckpointError: its holder lives.
        """
        holder, before, began = _read(self._path), _status(self._path), self._clock()
        if holder is not None and holder.is_here and not holder.is_gone:
            raise _refusal(self._run, holder)
        if holder is None or not holder.is_here:
            log.warning("%s belongs to %s: waiting up to %.0f s for a sign of life", self._run, *_waiting(holder))
            while self._clock() - began < STALE_SECONDS:
                self._pause(1.0)
                if (now := _status(self._path)) is None:
                    return
                if now != before:
                    raise _refusal(self._run, holder)
        removed = self._path.with_name(f"{LEASE}.{self._own.token}.stale")
        with suppress(FileNotFoundError):
            self._path.rename(removed)
            if _read(removed) == holder or exists(self._path):
                removed.unlink()
            else:  # another start was faster, and this lease is its own
                removed.rename(self._path)

    def _beat(self) -> None:
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


def look_at_lease(run: Path) -> None:
    """Refuse what `hold_lease` refuses at once, without taking the lease; log whether a start would wait.

    Raises:
        CheckpointError: a process of this machine holds the lease.
    """
    if not exists(run / LEASE):
        return
    holder = _read(run / LEASE)
    if holder is not None and holder.is_here and not holder.is_gone:
        raise _refusal(run, holder)
    if holder is None or not holder.is_here:
        log.info("%s belongs to %s: a start waits up to %.0f s for a sign of life", run, *_waiting(holder))


def _waiting(holder: Holder | None) -> tuple[Holder | str, float]:
    return holder or f"an unknown process ({LEASE} is damaged)", STALE_SECONDS


def _refusal(run: Path, holder: Holder | None) -> CheckpointError:
    return CheckpointError(
        f"another run is writing into it: {_waiting(holder)[0]}. Stop it, or give another --ckpt_save_path. (If you "
        f"are sure that it is gone, remove {run / LEASE}.)",
        path=run,
    )


def _read(path: Path) -> Holder | None:
    """Return who holds a lease; None if there is none, or it is damaged."""
    try:
        return Holder(**checked_values(read_json(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _status(path: Path) -> tuple[int, int] | None:
    """Return what changes with each renewal; None if there is no lease."""
    try:
        with path.open("rb") as file:  # opened: a network file system asks its server then
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino


def _machine() -> str:
    """Return this boot of this machine with the namespace of process ids; empty if there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """Return when a process of this machine began, in the kernel's ticks; empty if there is none (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # ended, but not yet collected by its parent
