"""The watchdog, which stops a hanging job and reports where it hangs.

    main thread --Activity--> watchdog, a thread that checks periodically --Heartbeats--> watchdogs of other processes

Progress is completed work of the main thread (a micro-batch, a batch of an evaluation), or bytes read or written. At
the start, while files are indexed and (on a CPU) models compiled, CPU time counts, too. A process without progress for
the timeout reads the heartbeats of the others, and waits while any of them makes progress, such as by writing a long
checkpoint. If none does, it notifies them. Each process then prints its stacks and the outliers (processes that are
dead, or do something else than the rest), and exits with `EXIT_HUNG`. The launcher kills stopped processes, which
cannot exit by themselves.

The watchdog is a Python thread, so a hang that holds Python's lock blocks it, too. Other processes detect that hang.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from pretraining.config.training import GuardConfig
from pretraining.distributed.processes import Activity, Processes
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT, in_background
from pretraining.distributed.torch_private import store_of_job
from pretraining.text import list_some

EXIT_HUNG = 124
"""The exit code of timeout(1)."""
LONGEST_PERIOD_SECONDS = 10.0
CHECKS_PER_TIMEOUT = 20
MOVED_BYTES = 1 << 20
"""Bytes between two checks that count as progress; heartbeats and logs are smaller."""
COMPUTING_SHARE = 0.1
"""Share of the time that a process and its children must compute to count as progress."""
MOST_NAMED = 16
STDERR = 2
STORE_TIMEOUT_SECONDS = 5.0
_HANG = "hang"


def collective_timeout(guard: GuardConfig) -> timedelta:
    """Return the timeout of collectives: longer than the watchdog's, whose report is better."""
    longest = max(guard.hang_timeout.amount, guard.first_step_timeout.amount)
    return max(COLLECTIVE_TIMEOUT, timedelta(seconds=longest) + timedelta(minutes=10))


class HangDetector:
    """The decision that a job hangs, from the time without progress.

    Args:
        read_others: returns the newest heartbeats of the other processes, by rank; None if the store does not answer.

    Attributes:
        earlier: heartbeats after half of the timeout.
    """

    def __init__(self, read_others: Callable[[], dict[int, Heartbeat] | None]) -> None:
        self._read_others = read_others
        self._progress: int | None = None
        self._seconds = 0.0
        self.earlier: dict[int, Heartbeat] | None = None

    def update(self, seconds: float, progress: int, timeout: float) -> float:
        """Count the seconds since the last check; return those without progress if the job hangs, else 0.

        A job hangs after `timeout` seconds (0 = never) without progress of this or any other process.
        """
        self._seconds += seconds
        if progress != self._progress or not timeout:
            self._progress, self._seconds, self.earlier = progress, 0.0, None
            return 0.0
        if self._seconds >= timeout / 2 and self.earlier is None:
            self.earlier = self._read_others()
        if self._seconds < timeout:
            return 0.0
        now, earlier = self._read_others() or {}, self.earlier
        if earlier is not None and any(
            rank not in earlier or beat.progress != earlier[rank].progress for rank, beat in now.items()
        ):
            self._seconds, self.earlier = timeout / 2, now  # others make progress: wait half a timeout more
            return 0.0
        return self._seconds


class Watchdog:
    """The watchdog of this process, as a context; `exit_process` is called with the exit code."""

    def __init__(
        self, guard: GuardConfig, processes: Processes, exit_process: Callable[[int], object] = os._exit
    ) -> None:
        self._processes = processes
        self._exit_process = exit_process
        self._timeout = float(guard.hang_timeout.amount)
        self._first_timeout = float(guard.first_step_timeout.amount)
        timeouts = [seconds for seconds in (self._timeout, self._first_timeout) if seconds]
        self._period = min([LONGEST_PERIOD_SECONDS, *(seconds / CHECKS_PER_TIMEOUT for seconds in timeouts)])
        self._is_on = bool(timeouts)
        self._stopped = threading.Event()
        self._heartbeats: Heartbeats | None = None
        self._threads: list[threading.Thread] = []
        self._progress = self._events = self._bytes = 0
        self._computed = 0.0
        self._hung_seconds = 0.0  # found by this or another process

    def __enter__(self) -> Watchdog:
        if self._is_on:
            self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
            if self._processes.world_size > 1:
                self._heartbeats = Heartbeats(self._processes.rank, self._processes.world_size)
                self._threads.append(threading.Thread(target=self._publish, name="heartbeat", daemon=True))
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._hung_seconds:
            threading.Event().wait()  # another process exited because of the hang: wait for the exit of this one
        self._stopped.set()
        for thread in self._threads:  # before their store is gone
            thread.join(STORE_TIMEOUT_SECONDS)  # the store may block a thread forever

    def _watch(self) -> None:
        read_others = dict if self._heartbeats is None else self._heartbeats.read_others
        detector = HangDetector(read_others)
        before = time.monotonic()
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            # A process that was suspended and continues did not hang in between.
            seconds, before = min(now - before, 2 * self._period), now
            timeout = self._timeout if self._processes.activity.warm else self._first_timeout
            hung_seconds = detector.update(seconds, self._measure_progress(seconds), timeout) or self._hung_seconds
            if hung_seconds and not self._stopped.is_set():
                self._hung_seconds = hung_seconds
                self._stop_job(describe(hung_seconds, detector.earlier or {}, read_others(), self._processes))

    def _publish(self) -> None:
        """Publish heartbeats, from a separate thread, since the store may block it."""
        assert self._heartbeats is not None
        while not self._stopped.is_set():
            activity = self._processes.activity
            try:
                self._heartbeats.publish(self._progress, activity.step, activity.doing)
                if hung_seconds := self._heartbeats.share_hang(self._hung_seconds):
                    self._hung_seconds = hung_seconds
            except RuntimeError:  # the process that serves the store exited
                return
            self._stopped.wait(self._period)

    def _measure_progress(self, seconds: float) -> int:
        """Return a number that grows if there was progress in the seconds since the last check."""
        activity, moved, computed = self._processes.activity, _bytes_moved(), sum(os.times()[:4])
        events = activity.events
        has_progress = events != self._events or moved - self._bytes >= MOVED_BYTES
        # CPU time counts for indexing, restoring and compiling only: a host that waits for its GPU spins, too.
        computing_counts = activity.doing == "starting" or (not activity.warm and self._processes.device.type == "cpu")
        has_progress |= computing_counts and computed - self._computed >= COMPUTING_SHARE * seconds
        self._progress += has_progress
        self._events, self._bytes, self._computed = events, moved, computed
        return self._progress

    def _stop_job(self, message: str) -> None:
        # Not through Python's buffers: the hanging thread may hold their locks.
        faulthandler.dump_traceback(STDERR, all_threads=True)
        os.write(STDERR, f"{message}\n".encode())
        # The exit of this process makes the other main threads fail. Their watchdogs must know of the hang before: the
        # news passes three threads (heartbeat here; heartbeat and watchdog there), each with a period.
        time.sleep(5 * self._period)
        self._exit_process(EXIT_HUNG)


def describe(
    seconds: float, earlier: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat] | None, processes: Processes
) -> str:
    """Return the error message about a hang, given earlier and present heartbeats of the other processes."""
    lines = [
        f"error: rank {processes.rank}: the job hangs: no process made progress for {seconds:.0f} s. This process is "
        f"{_state_of(processes.activity)}; its stacks are above."
    ]
    if now is None:
        lines.append("  The other processes' states are unknown: their store, in or beside rank 0, does not answer.")
    elif processes.world_size > 1:
        silent = [rank for rank, beat in now.items() if rank in earlier and beat.count == earlier[rank].count]
        lines += _outliers(now, silent, processes)
    lines.append(
        "  The same command resumes from the newest checkpoint; leave out a machine that is at fault. "
        "--hang_timeout and --first_step_timeout set the time limits."
    )
    return "\n".join(lines)


def _outliers(others: Mapping[int, Heartbeat], silent: list[int], processes: Processes) -> list[str]:
    """Return a line per process that is dead, or does something else than most."""
    states = {rank: _state_of(beat) for rank, beat in others.items()} | {processes.rank: _state_of(processes.activity)}
    lines = [
        f"  rank {rank} on {others[rank].host} sends no heartbeats any more; it was {states.pop(rank)}"
        for rank in sorted(silent)
    ]
    unknown = set(range(processes.world_size)) - states.keys() - set(silent)
    lines += [f"  rank {rank} never sent a heartbeat" for rank in sorted(unknown)]
    usual, count = Counter(states.values()).most_common(1)[0]
    odd = [rank for rank, state in states.items() if state != usual or 2 * count <= len(states)]
    lines += [f"  rank {rank} is {states[rank]}" for rank in sorted(odd)]
    return [list_some(lines or [f"  all processes are alive, and {usual}"], MOST_NAMED, "\n")]


def _state_of(process: Activity | Heartbeat) -> str:
    words = {"data": "waiting for data", "evaluation": "evaluating", "checkpoint": "saving a checkpoint"}
    return f"{words.get(process.doing, process.doing)} after step {process.step}"


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written; 0 if Linux does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counted = ("rchar", "wchar", "read_bytes", "write_bytes")
    return sum(int(value) for name, _, value in (line.partition(":") for line in lines) if name in counted)


@dataclass(frozen=True)
class Heartbeat:
    """The state of a process.

    Attributes:
        count: heartbeats so far; if the count stops growing, the process is dead.
        progress: grows with the work of the main thread.
        step, doing: as in `Activity`.
    """

    count: int
    progress: int
    step: int
    doing: str
    host: str


class Heartbeats:
    """Heartbeats of all processes, in the key-value store of the rendezvous; the constructor is a collective call.

    If the process that serves the store does not answer, an operation may block forever, and with it its connection.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._host = socket.gethostname()
        self._count = 0
        self._writer, self._reader = store_of_job("heartbeats"), store_of_job("heartbeats")
        for store in (self._writer, self._reader):
            store.set_timeout(timedelta(seconds=STORE_TIMEOUT_SECONDS))

    def publish(self, progress: int, step: int, doing: str) -> None:
        """Write this process's heartbeat; may block."""
        self._count += 1
        beat = Heartbeat(self._count, progress, step, doing, self._host)
        self._writer.set(str(self._rank), json.dumps(asdict(beat)))

    def share_hang(self, seconds: float) -> float:
        """Publish the seconds of a hang (0 = none found here); return the seconds that any process found. May block."""
        if seconds:
            self._writer.set(_HANG, str(seconds))
        return float(self._writer.get(_HANG)) if self._writer.check([_HANG]) else 0.0

    def read_others(self) -> dict[int, Heartbeat] | None:
        """Return the newest heartbeat of each other process that sent one; None if the store does not answer."""
        with suppress(TimeoutError, RuntimeError):  # it does not answer, or has exited
            return in_background(self._read, "heartbeats").result(STORE_TIMEOUT_SECONDS)
        return None

    def _read(self) -> dict[int, Heartbeat]:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        known = [rank for rank in others if self._reader.check([str(rank)])]
        found = self._reader.multi_get([str(rank) for rank in known])
        return {rank: Heartbeat(**json.loads(beat)) for rank, beat in zip(known, found, strict=True)}
