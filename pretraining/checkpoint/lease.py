"""One run writes into a folder at a time: a file says who, and a heartbeat that it is still there.

    <run>/lease.json     host, process, when it began; the file's time is renewed every ten seconds

A second start on the same folder is refused while the first one lives. A lease whose process is gone is taken over: at
once where its process was on this machine, otherwise when it was not renewed for a minute. Before each commit the
writer looks whether the lease is still its own; a process that was stopped for long and wakes up commits nothing. A
lease with a flipped bit says nothing: its holder writes it again, others wait whether somebody does.

The age of a lease is told by the file system's clock, never by those of two machines. Where that cannot be, as with a
time in the future, a lease is stale once it was unchanged for a minute of this process's own clock.
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
UNKNOWN = f"an unknown process ({LEASE} is damaged)"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


@dataclass(frozen=True)
class Holder:
    """A process that writes into a run's folder.

    Attributes:
        machine: tells apart boots and containers with the same host name.
        process_start: tells it from a later process with the same pid.
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
        """This process, with a new token."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Holder(socket.gethostname(), _machine(), os.getpid(), _start_of(os.getpid()), now, secrets.token_hex(8))

    def is_gone(self) -> bool:
        """Whether it has surely ended, which only its own machine can tell."""
        return self.machine == _machine() and _start_of(self.pid) != self.process_start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class Lease:
    """The right to write into a run's folder."""

    def __init__(
        self, run: Path, pause: Callable[[float], object] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._path = run / LEASE
        self._pause = pause
        self._clock = clock
        self._own = Holder.this_process()
        self._ending = threading.Event()
        self._mending = threading.Lock()
        self._heartbeat = threading.Thread(target=self._beat, name="lease", daemon=True)

    def acquire(self) -> None:
        """Takes the lease, and keeps it alive until `release`.

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
        """Raises a CheckpointError if the lease is no longer this process's."""
        holder = self._holder()
        if holder != self._own:
            raise CheckpointError(
                f"does not belong to this run any more: {self._how_it_was_lost(holder)}. Nothing was changed; end this "
                "run.",
                path=self._run,
            )

    def release(self) -> None:
        """Lets others write, and leaves no empty folder behind."""
        self._ending.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        with suppress(OSError):  # what is left of it is stale at once: this process ends
            if self._holder() == self._own:
                self._path.unlink()
                self._run.rmdir()  # only where a start was refused before it wrote anything

    def _how_it_was_lost(self, holder: Holder | None) -> str:
        if holder is not None:
            return f"now {holder} writes there, since this process was not heard of for {STALE_SECONDS:.0f} s"
        if not exists(self._run):
            return "the folder was removed or renamed while this run was writing into it"
        if not exists(self._path):
            return f"{self._path} is gone; somebody has removed it, and another run may write there"
        return f"{self._path} cannot be read any more"

    def _create(self) -> bool:
        try:
            with self._path.open("x", encoding="utf-8") as file:  # of two starts at once, one makes it
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _content(self) -> str:
        return json.dumps(with_checksum(asdict(self._own)))

    def _holder(self) -> Holder | None:
        """Returns who holds the lease, once this process has it; None where it is gone."""
        with self._mending:
            holder, content = _read(self._path), self._content().encode()
            # One that another start has made is whole, or still empty.
            if holder is None and self._size() == len(content):
                log.warning("%s is damaged: written again", self._path)
                with suppress(OSError), self._path.open("r+b") as file:  # in place, which takes no space
                    file.write(content)
                return self._own
            return holder

    def _size(self) -> int:
        with suppress(FileNotFoundError):
            return self._path.stat().st_size
        return 0

    def _await_end_of_holder(self) -> None:
        """Waits until the lease that is there is free; an error where its holder lives."""
        holder, renewed = _read(self._path), self._renewed()
        if holder is not None and holder.is_gone():
            return self._remove_stale(holder)
        whoever = holder or UNKNOWN
        refusal = _refusal(self._run, whoever)
        if holder is not None and holder.machine == _machine():
            raise refusal
        # Its time may lie in the future, where a clock was set or a machine has started again: that is no older lease.
        left = min(STALE_SECONDS - self._age(renewed), STALE_SECONDS)
        if left > 0:
            log.warning(
                "%s belongs to %s: waiting up to %.0f s whether it is still there",
                *(self._run, whoever, left),
            )
        elif holder is None and renewed is not None:
            log.warning("%s is damaged, and old: taken over", self._path)
        deadline = self._clock() + left
        while self._clock() < deadline:
            self._pause(1.0)
            if self._renewed() not in (renewed, None):
                raise refusal
            if self._renewed() is None:
                return None
        return self._remove_stale(holder)

    def _remove_stale(self, holder: Holder | None) -> None:
        """Removes a lease, unless another start was faster: then it is that one's, and stays."""
        removed = self._path.with_name(f"{LEASE}.{self._own.token}.stale")
        with suppress(FileNotFoundError):
            self._path.rename(removed)
            if _read(removed) == holder or exists(self._path):
                removed.unlink()
            else:
                removed.rename(self._path)

    def _renewed(self) -> int | None:
        """When the lease was renewed, on the file system's clock in nanoseconds; None where there is none."""
        try:
            with self._path.open("rb") as file:  # opened: a network file system asks its server then
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _age(self, renewed: int | None) -> float:
        if renewed is None:
            return STALE_SECONDS
        probe = self._path.with_name(f"{LEASE}.{self._own.token}.now")
        probe.touch()
        now = probe.stat().st_mtime_ns
        probe.unlink()
        return (now - renewed) / 1e9

    def _beat(self) -> None:
        while not self._ending.wait(HEARTBEAT_SECONDS):
            try:
                if self._holder() != self._own:
                    return  # taken over: the next commit says so
                os.utime(self._path)  # takes no space, so a full disk does not end it
            except OSError as error:
                log.warning("%s cannot be renewed: %s", self._path, error)


@contextmanager
def hold_lease(run: Path, processes: Processes) -> Iterator[Lease]:
    """Holds a run's lease, on rank 0 for all; a collective call. Raises as `acquire`."""
    lease = Lease(run)
    on_rank_zero(lease.acquire)
    try:
        yield lease
    finally:
        if processes.is_main:
            lease.release()


def look_at_lease(run: Path) -> None:
    """Refuses what `hold_lease` refuses at once, without taking the lease; a line says where a start would wait.

    Raises:
        CheckpointError: a process of this machine holds the lease.
    """
    path = run / LEASE
    if not exists(path):
        return
    holder = _read(path)
    if holder is not None and holder.machine == _machine() and not holder.is_gone():
        raise _refusal(run, holder)
    if holder is None or holder.machine != _machine():
        log.info(
            "%s belongs to %s: a start waits up to %.0f s whether it is still there",
            *(run, holder or UNKNOWN, STALE_SECONDS),
        )


def _refusal(run: Path, whoever: Holder | str) -> CheckpointError:
    return CheckpointError(
        f"another run is writing into it: {whoever}. Stop it, or give another --ckpt_save_path. (If you are sure that "
        f"it is gone, remove {run / LEASE}.)",
        path=run,
    )


def _read(path: Path) -> Holder | None:
    """Who holds a lease; None where there is none, or nobody can tell."""
    try:
        return Holder(**checked_values(read_json(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _machine() -> str:
    """This boot of this machine, and in it the space in which process ids are counted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return socket.gethostname()


def _start_of(pid: int) -> str:
    """When a process of this machine began, in whatever unit; empty where there is none (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() or not _is_alive(pid) else "alive"
    return "" if fields[0] in "ZX" else fields[19]  # ended, but not yet collected by its parent


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True
