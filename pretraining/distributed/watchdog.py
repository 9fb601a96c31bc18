"""Ends a job that hangs, and says where.

    main thread --Activity--> watchdog, a thread that looks now and then --Heartbeats--> watchdogs of other processes

Progress is what the main thread gets done (a micro-batch, a batch of an evaluation), bytes that the process reads or
writes, and at the start, when files are indexed and on a CPU models compiled, time that it computes. A process without
progress for the timeout asks how the others are, and waits while one gets on, such as one that writes a long
checkpoint. If none does, it tells them, and each prints its stacks and which processes stand out (not alive, or doing
something else than the rest), and ends with `EXIT_HUNG`. The launcher ends what is left: a process that is stopped
cannot end itself.

A watchdog is a Python thread, so it does not see a hang of its own process that holds Python's lock. The others do.
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from pretraining.config.training import GuardConfig
from pretraining.distributed.processes import Activity, Processes
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT
from pretraining.distributed.torch_private import store_of_job
from pretraining.text import list_some

EXIT_HUNG = 124
"""What timeout(1) returns for a program that took too long."""
LONGEST_PERIOD_SECONDS = 10.0
LOOKS_OF_A_TIMEOUT = 20
MOVED_BYTES = 1 << 20
"""Bytes between two looks that count as progress; heartbeats and logs are fewer."""
COMPUTING_SHARE = 0.1
"""Share of the time that a process, with its children, must compute for it to count as progress."""
MOST_NAMED = 16
STDERR = 2
PATIENCE_SECONDS = 5.0
"""How long to wait for an answer of the store."""
_HANG = "hang"


def collective_timeout(guard: GuardConfig) -> timedelta:
    """Return when processes that wait for others give up: later than the watchdog, which can say more."""
    longest = max(guard.hang_timeout.amount, guard.first_step_timeout.amount)
    return max(COLLECTIVE_TIMEOUT, timedelta(seconds=longest) + timedelta(minutes=10))


@dataclass(frozen=True)
class Hang:
    """What is known of a hang.

    Attributes:
        seconds: without progress.
        others: the newest heartbeats of the other processes; None if the store does not answer.
        silent: the ranks that gave none for half the timeout.
    """

    seconds: float
    others: dict[int, Heartbeat] | None
    silent: list[int]


class HangDetector:
    """Counts the time without progress and decides when it is a hang; `ask` returns `Hang.others`."""

    def __init__(self, ask: Callable[[], dict[int, Heartbeat] | None]) -> None:
        self._ask = ask
        self._progress: int | None = None
        self._seconds = 0.0
        self._earlier: dict[int, Heartbeat] | None = None

    def look(self, seconds: float, progress: int, timeout: float) -> Hang | None:
        """Take in this process's progress since the last look, `seconds` ago; return what is wrong if the job hangs.

        A job hangs after `timeout` seconds in which neither this process nor another makes progress; with 0, never.
        """
        self._seconds += seconds
        if progress != self._progress or not timeout:
            self._progress, self._seconds, self._earlier = progress, 0.0, None
            return None
        if self._seconds >= timeout / 2 and self._earlier is None:
            self._earlier = self._ask()
        if self._seconds < timeout:
            return None
        hang = self.describe(self._seconds)
        earlier, now = self._earlier, hang.others
        if earlier is None or now is None:
            return Hang(self._seconds, None, [])
        if any(rank not in earlier or beat.progress != earlier[rank].progress for rank, beat in now.items()):
            self._seconds, self._earlier = timeout / 2, now  # wait for those that get on, half a timeout at a time
            return None
        return hang

    def describe(self, seconds: float) -> Hang:
        """Return what is known of a hang of so many seconds, found here or by another process."""
        earlier, now = self._earlier or {}, self._ask()
        silent = [rank for rank, beat in (now or {}).items() if rank in earlier and beat.count == earlier[rank].count]
        return Hang(max(seconds, self._seconds), now, silent)


class Watchdog:
    """Watches over this process as a context; `end` ends it."""

    def __init__(self, guard: GuardConfig, processes: Processes, end: Callable[[int], object] = os._exit) -> None:
        self._processes = processes
        self._end = end
        self._timeout = float(guard.hang_timeout.amount)
        self._first_timeout = float(guard.first_step_timeout.amount)
        timeouts = [seconds for seconds in (self._timeout, self._first_timeout) if seconds]
        self._period = min([LONGEST_PERIOD_SECONDS, *(seconds / LOOKS_OF_A_TIMEOUT for seconds in timeouts)])
        self._is_on = bool(timeouts)
        self._stopped = threading.Event()
        self._heartbeats: Heartbeats | None = None
        self._threads: list[threading.Thread] = []
        self._progress = self._events = self._bytes = 0
        self._computed = 0.0
        self._hung_seconds = 0.0  # found here, or told by another process

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
            threading.Event().wait()  # the main thread lost a process that has ended already: this one is about to, too
        self._stopped.set()
        for thread in self._threads:  # before the store goes that they talk to
            thread.join(PATIENCE_SECONDS)  # one that it blocks is left behind

    def _watch(self) -> None:
        detector = HangDetector(dict if self._heartbeats is None else self._heartbeats.of_others)
        before = time.monotonic()
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            # A process that was stopped as a whole, and goes on, did not hang meanwhile.
            seconds, before = min(now - before, 2 * self._period), now
            timeout = self._timeout if self._processes.activity.warm else self._first_timeout
            hang = detector.look(seconds, self._measure_progress(seconds), timeout)
            if hang is None and self._hung_seconds:
                hang = detector.describe(self._hung_seconds)
            if hang is not None and not self._stopped.is_set():
                self._end_process(hang)

    def _publish(self) -> None:
        """Publish heartbeats, from a thread of its own, since the store may block it."""
        assert self._heartbeats is not None
        while not self._stopped.is_set():
            activity = self._processes.activity
            try:
                self._heartbeats.publish(self._progress, activity.step, activity.doing)
                if told := self._heartbeats.share_hang(self._hung_seconds):
                    self._hung_seconds = told
            except RuntimeError:  # the store is gone, and with it the process that serves it
                return
            self._stopped.wait(self._period)

    def _measure_progress(self, seconds: float) -> int:
        """Return a number that grows if something got done in the seconds since the last look."""
        activity, moved, computed = self._processes.activity, _bytes_moved(), sum(os.times()[:4])
        events = activity.events
        got_on = events != self._events or moved - self._bytes >= MOVED_BYTES
        # Indexing, restoring and compiling compute. A host that waits for its GPU does so, too: it spins.
        computing_counts = activity.doing == "starting" or (not activity.warm and self._processes.device.type == "cpu")
        got_on |= computing_counts and computed - self._computed >= COMPUTING_SHARE * seconds
        self._progress += got_on
        self._events, self._bytes, self._computed = events, moved, computed
        return self._progress

    def _end_process(self, hang: Hang) -> None:
        self._hung_seconds = hang.seconds
        # Past Python's buffers, whose locks the thread that hangs may hold.
        faulthandler.dump_traceback(STDERR, all_threads=True)
        os.write(STDERR, f"{describe(hang, self._processes)}\n".encode())
        # When this process ends, the main threads of the others fail, too. Each of the three threads between here and
        # there (this one's heartbeat, the other's heartbeat and watchdog) has a period to say it first.
        time.sleep(5 * self._period)
        self._end(EXIT_HUNG)


def describe(hang: Hang, processes: Processes) -> str:
    """Return the error that says what is known of a hang."""
    lines = [
        f"error: rank {processes.rank}: the job hangs: nothing has made progress for {hang.seconds:.0f} s. This "
        f"process is {_state_of(processes.activity)}; its stacks stand above."
    ]
    if hang.others is None:
        lines.append("  The other processes cannot be asked: the one that answers for all, with rank 0, does not.")
    elif processes.world_size > 1:
        lines += _outliers(hang.others, hang.silent, processes)
    lines.append(
        "  The same command goes on from the newest checkpoint; if the machine is at fault, without it. "
        "--hang_timeout and --first_step_timeout say how long is waited."
    )
    return "\n".join(lines)


def _outliers(others: Mapping[int, Heartbeat], silent: list[int], processes: Processes) -> list[str]:
    """Return a line for each process that is not alive, or does something else than most."""
    states = {rank: _state_of(beat) for rank, beat in others.items()} | {processes.rank: _state_of(processes.activity)}
    lines = [
        f"  rank {rank} on {others[rank].host} is not heard from any more; it was {states.pop(rank)}"
        for rank in sorted(silent)
    ]
    unknown = set(range(processes.world_size)) - states.keys() - set(silent)
    lines += [f"  rank {rank} was never heard from" for rank in sorted(unknown)]
    usual, holding = Counter(states.values()).most_common(1)[0]
    odd = [rank for rank, state in states.items() if state != usual or 2 * holding <= len(states)]
    lines += [f"  rank {rank} is {states[rank]}" for rank in sorted(odd)]
    return [list_some(lines or [f"  all processes are alive, and {usual}"], MOST_NAMED, "\n")]


def _state_of(process: Activity | Heartbeat) -> str:
    words = {"data": "waiting for data", "evaluation": "evaluating", "checkpoint": "saving a checkpoint"}
    return f"{words.get(process.doing, process.doing)} after step {process.step}"


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written so far; 0 if the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counted = ("rchar", "wchar", "read_bytes", "write_bytes")
    return sum(int(value) for name, _, value in (line.partition(":") for line in lines) if name in counted)


@dataclass(frozen=True)
class Heartbeat:
    """How a process is.

    Attributes:
        count: of its heartbeats so far; if it does not grow, the process is not alive.
        progress: grows with everything that the main thread gets done.
        step, doing: as in `Activity`.
    """

    count: int
    progress: int
    step: int
    doing: str
    host: str


class Heartbeats:
    """Heartbeats of all processes, in the key-value store of their rendezvous; making one is a collective call.

    If the process that serves the store does not answer, an operation may block for good, and with it all others of
    its connection.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._host = socket.gethostname()
        self._count = 0
        self._telling, self._asking = store_of_job("heartbeats"), store_of_job("heartbeats")
        for store in (self._telling, self._asking):
            store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))

    def publish(self, progress: int, step: int, doing: str) -> None:
        """Write this process's heartbeat; may block."""
        self._count += 1
        beat = Heartbeat(self._count, progress, step, doing, self._host)
        self._telling.set(str(self._rank), json.dumps(asdict(beat)))

    def share_hang(self, seconds: float) -> float:
        """Tell all processes for how long the job hangs, unless it is 0; return what any has told. May block."""
        if seconds:
            self._telling.set(_HANG, str(seconds))
        return float(self._telling.get(_HANG)) if self._telling.check([_HANG]) else 0.0

    def of_others(self) -> dict[int, Heartbeat] | None:
        """Return the newest heartbeat of each other process that gave one; None if the store does not answer."""
        answers: list[dict[int, Heartbeat]] = []
        asking = threading.Thread(target=lambda: answers.append(self._ask()), name="heartbeats", daemon=True)
        asking.start()
        asking.join(PATIENCE_SECONDS)
        return answers[0] if answers else None

    def _ask(self) -> dict[int, Heartbeat]:
        known = [rank for rank in range(self._world_size) if rank != self._rank]
        if not self._asking.check([str(rank) for rank in known]):  # one question for all, unless somebody is missing
            known = [rank for rank in known if self._asking.check([str(rank)])]
        found = self._asking.multi_get([str(rank) for rank in known])
        return {rank: Heartbeat(**json.loads(beat)) for rank, beat in zip(known, found, strict=True)}
