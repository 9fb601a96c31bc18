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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pretraining.config.training import GuardConfig
from pretraining.distributed.processes import Processes
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
    """Returns when processes that wait for others give up: later than the watchdog, which can say more."""
    longest = max(guard.hang_timeout.amount, guard.first_step_timeout.amount)
    return max(COLLECTIVE_TIMEOUT, timedelta(seconds=longest) + timedelta(minutes=10))


@dataclass(frozen=True)
class Hang:
    """What is known of a hang: `seconds` without progress, and how the other processes are.

    Attributes:
        others: the newest heartbeats; None where the store does not answer.
        silent: the ranks that gave none for half the timeout.
    """

    seconds: float
    others: dict[int, Heartbeat] | None
    silent: list[int]


class HangDetector:
    """Counts the time without progress and decides when it is a hang; `ask` returns `Hang.others`."""

    def __init__(self, world_size: int, ask: Callable[[], dict[int, Heartbeat] | None]) -> None:
        self._world_size = world_size
        self._ask = ask
        self._progress: int | None = None
        self._seconds = 0.0
        self._earlier: dict[int, Heartbeat] | None = None

    def look(self, seconds: float, progress: int, timeout: float) -> Hang | None:
        """Notes this process's progress since the last look, `seconds` ago; returns what is wrong if the job hangs.

        A job hangs after `timeout` seconds without progress; with 0, never.
        """
        self._seconds += seconds
        if progress != self._progress or not timeout:
            self._progress, self._seconds, self._earlier = progress, 0.0, None
            return None
        if self._world_size == 1:
            return Hang(self._seconds, {}, []) if self._seconds >= timeout else None
        if self._seconds >= timeout / 2 and self._earlier is None:
            self._earlier = self._ask()
        if self._seconds < timeout:
            return None
        earlier, now = self._earlier, self._ask()
        if earlier is None or now is None:
            return Hang(self._seconds, None, [])
        if any(rank not in earlier or beat.progress != earlier[rank].progress for rank, beat in now.items()):
            self._seconds, self._earlier = timeout / 2, now  # somebody gets on: wait for them, half a timeout at a time
            return None
        return Hang(self._seconds, now, _silent(earlier, now))

    def hear_of_hang(self, seconds: float) -> Hang:
        """Returns what is wrong where another process has found that the job hangs, for so many seconds."""
        now = self._ask()
        return Hang(max(seconds, self._seconds), now, _silent(self._earlier or {}, now or {}))


def _silent(earlier: dict[int, Heartbeat], now: dict[int, Heartbeat]) -> list[int]:
    return [rank for rank, beat in now.items() if rank in earlier and beat.count == earlier[rank].count]


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
        self._stopped, self._ending, self._heard = (threading.Event() for _ in range(3))
        self._heartbeats: Heartbeats | None = None
        self._threads: list[threading.Thread] = []
        self._progress = self._events = self._bytes = 0
        self._computed = self._hung_seconds = 0.0

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
        if self._ending.is_set() or self._heard.is_set():
            threading.Event().wait()  # the main thread lost a process that has ended already: this one is about to, too
        self._stopped.set()
        for thread in self._threads:  # before the store goes that they talk to
            thread.join(PATIENCE_SECONDS)  # one that it blocks is left behind

    def _watch(self) -> None:
        detector = HangDetector(self._processes.world_size, self._ask)
        before = time.monotonic()
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            # A process that was stopped as a whole, and goes on, did not hang meanwhile.
            seconds, before = min(now - before, 2 * self._period), now
            timeout = self._timeout if self._processes.activity.warm else self._first_timeout
            hang = detector.look(seconds, self._measure_progress(seconds), timeout)
            if hang is None and self._heard.is_set():
                hang = detector.hear_of_hang(self._hung_seconds)
            if hang is not None and not self._stopped.is_set():
                self._end_process(hang)

    def _publish(self) -> None:
        """Publishes heartbeats, from a thread of its own, since the store may block it."""
        assert self._heartbeats is not None
        while not self._stopped.is_set():
            activity = self._processes.activity
            try:
                self._heartbeats.publish(self._progress, activity.step, activity.doing)
                if self._ending.is_set():
                    self._heartbeats.tell_of_hang(self._hung_seconds)
                elif (told := self._heartbeats.told_of_hang()) is not None:
                    self._hung_seconds = told
                    self._heard.set()
            except RuntimeError:  # the store is gone, and with it the process that serves it
                return
            self._stopped.wait(self._period)

    def _ask(self) -> dict[int, Heartbeat] | None:
        assert self._heartbeats is not None
        return self._heartbeats.of_others()

    def _measure_progress(self, seconds: float) -> int:
        """Returns a number that grows if something got done in the seconds since the last look."""
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
        self._ending.set()
        # Past Python's buffers, whose locks the thread that hangs may hold.
        faulthandler.dump_traceback(STDERR, all_threads=True)
        os.write(STDERR, f"{describe(hang, self._processes)}\n".encode())
        # When this process ends, the main threads of the others fail, too. Each of the three threads between here and
        # there (this one's heartbeat, the other's heartbeat and watchdog) has a period to say it first.
        time.sleep(5 * self._period)
        self._end(EXIT_HUNG)


def describe(hang: Hang, processes: Processes) -> str:
    """Says what is known of a hang, in the words of an error."""
    activity = processes.activity
    lines = [
        f"error: rank {processes.rank}: the job hangs: nothing has made progress for {hang.seconds:.0f} s. This "
        f"process is {_place(activity.step, activity.doing)}; its stacks stand above."
    ]
    if hang.others is None:
        lines.append("  The other processes cannot be asked: the one that answers for all, with rank 0, does not.")
    elif processes.world_size > 1:
        lines += _those_that_stand_out(hang, processes)
    lines.append(
        "  The same command goes on from the newest checkpoint; where the machine is at fault, without it. "
        "--hang_timeout and --first_step_timeout say how long is waited."
    )
    return "\n".join(lines)


def _those_that_stand_out(hang: Hang, processes: Processes) -> list[str]:
    """Names the processes that are not alive, or are not where most are."""
    others = hang.others or {}
    lines = []
    for rank in sorted(set(range(processes.world_size)) - {processes.rank}):
        if rank not in others:
            lines.append(f"  rank {rank} was never heard from")
        elif rank in hang.silent:
            place = _place(others[rank].step, others[rank].doing)
            lines.append(f"  rank {rank} on {others[rank].host} is not heard from any more; it was {place}")
    places = {rank: _place(beat.step, beat.doing) for rank, beat in others.items() if rank not in hang.silent}
    places[processes.rank] = _place(processes.activity.step, processes.activity.doing)
    usual, holding = Counter(places.values()).most_common(1)[0]
    odd = [rank for rank, place in places.items() if place != usual or 2 * holding <= len(places)]
    lines += [f"  rank {rank} is {places[rank]}" for rank in sorted(odd)]
    if not lines:
        lines = [f"  all processes are alive, and {usual}"]
    return [list_some(lines, MOST_NAMED, "\n")]


def _place(step: int, doing: str) -> str:
    words = {"data": "waiting for data", "evaluation": "evaluating", "checkpoint": "saving a checkpoint"}
    return f"{words.get(doing, doing)} after step {step}"


def _bytes_moved() -> int:
    """Returns the bytes that this process has read and written so far; 0 where the system does not tell."""
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
        count: of its heartbeats so far; where it does not grow, the process is not alive.
        progress: grows with everything that the main thread gets done.
        step, doing: as in `Activity`.
    """

    count: int
    progress: int
    step: int
    doing: str
    host: str


class Heartbeats:
    """Heartbeats of all processes, in the key-value store that they met in; making one is a collective call.

    Where the process that serves the store does not answer, an operation may block for good.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._host = socket.gethostname()
        self._count = 0
        self._telling, self._asking = (_connect() for _ in range(2))

    def publish(self, progress: int, step: int, doing: str) -> None:
        """Writes this process's heartbeat; may block where the store does not answer."""
        self._count += 1
        beat = Heartbeat(self._count, progress, step, doing, self._host)
        self._telling.set(str(self._rank), json.dumps(asdict(beat)))

    def tell_of_hang(self, seconds: float) -> None:
        """Tells all processes that the job hangs, for so long; may block as `publish` does."""
        self._telling.set(_HANG, str(seconds))

    def told_of_hang(self) -> float | None:
        """Returns for how many seconds the job hangs, if a process has told so; may block as `publish` does."""
        return float(self._telling.get(_HANG)) if self._telling.check([_HANG]) else None

    def of_others(self) -> dict[int, Heartbeat] | None:
        """Returns the newest heartbeat of each other process that gave one; None where the store does not answer."""
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


def _connect() -> dist.Store:
    store = store_of_job("heartbeats")
    store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
    return store
