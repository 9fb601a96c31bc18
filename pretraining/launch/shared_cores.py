"""A watch that shortens the spinning of OpenMP threads while other programs want the same cores.

At the end of a parallel region, threads of GNU's OpenMP (part of torch) spin for some milliseconds, 300,000 iterations,
until the others are done, and sleep only then. This is fastest on idle cores. On shared cores, threads that spin take
cores from threads that compute: next to one busy loop on two cores, a run kept a third of its speed
(docs/performance.md).

    spin     every half second: how long did this process's threads wait for a core? -> too long: sleep
    sleep    for 20 seconds -> spin, and measure again

libgomp reads GOMP_SPINCOUNT and OMP_WAIT_POLICY only once, when torch is imported, but other programs come and go. One
rule is applied each time: while libgomp has more threads than the process has CPUs, threads spin only 100 iterations
(its manual, GOMP_SPINCOUNT). So an extra team of idle threads makes all other threads sleep early while it exists. Sums
stay the same, bit for bit: the threads that compute, and their work, do not change.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pretraining.launch import machine
from pretraining.launch.machine import allowed_cpus, read_text

log = logging.getLogger(__name__)

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables by which a user sets how threads wait."""

CHECK_SECONDS = 0.5
"""Interval of the measurement. It is valid only while threads spin: a thread that wakes up waits for a core, too."""
SLEEP_PHASE_SECONDS = 20.0
"""Time with little spinning before the next measurement; on cores that stay shared, threads spin 1 second in 41."""
CONTENDED = 0.30
"""Seconds per second that all threads together wait for a core; above, the cores are shared. On an idle machine the
run's own threads wait up to 0.2 s, while it reports; next to one busy loop they wait 0.7 s."""


@contextmanager
def leaving_cores_to_others(threads: int, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Within a `with` block, make threads spin only briefly while other programs want the cores.

    Does nothing if the user set how threads wait, or if the system does not report how long threads wait for a core.

    Args:
        threads: torch.get_num_threads(), read in the thread that computes: other threads read the number that any
            thread set last, such as a loader's 1. A single thread waits for no other.
    """
    openmp = find_openmp()
    if threads == 1 or openmp is None or not seconds_waited() or any(environ.get(name) for name in WAITING):
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(openmp, ended), name="shared cores", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def find_openmp() -> ctypes.CDLL | None:
    """Return GNU's OpenMP as loaded in this process, torch's if several packages brought one; None if not loaded."""
    lines = read_text(machine.PROC / "self" / "maps").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    path = min(paths, key=lambda path: ("/torch" not in path, path), default=None)
    return None if path is None else ctypes.CDLL(path)


def seconds_waited() -> float:
    """Return how long the threads of this process have waited for a core; 0 if Linux does not tell."""
    files = (machine.PROC / "self" / "task").glob("*/schedstat")
    waited = [read_text(file).split()[1:2] for file in files]  # nanoseconds on a core, waiting for one; slices
    return sum(int(each[0]) for each in waited if each) / 1e9


def _watch(openmp: ctypes.CDLL, ended: threading.Event) -> None:
    is_logged = False
    before, since = seconds_waited(), time.monotonic()
    while not ended.wait(CHECK_SECONDS):
        now, checked = seconds_waited(), time.monotonic()
        if now - before > CONTENDED * (checked - since):
            if not is_logged:
                log.info(
                    "other programs use these cores, too: while they do, waiting threads sleep instead of spinning "
                    "(OMP_WAIT_POLICY=ACTIVE makes them spin)"
                )
            is_logged = True
            team = threading.Thread(target=hold_idle_team, args=(openmp, ended), name="idle team", daemon=True)
            team.start()
            team.join()
            now, checked = seconds_waited(), time.monotonic()
        before, since = now, checked


def hold_idle_team(openmp: ctypes.CDLL, ended: threading.Event) -> None:
    """Start an idle OpenMP team for this thread, until the thread ends, so that libgomp has more threads than CPUs."""
    # Each thread of the team calls a function of libgomp that only returns a number, so none waits for Python's lock.
    # The calling thread is part of the team, but not one of libgomp's threads, hence the + 1.
    nothing = ctypes.cast(openmp.omp_get_num_threads, ctypes.c_void_p)
    openmp.GOMP_parallel(nothing, None, ctypes.c_uint(len(allowed_cpus()) + 1), ctypes.c_uint(0))
    ended.wait(SLEEP_PHASE_SECONDS)
