"""Leaves a CPU's cores to other programs while they want them: how threads that compute wait for each other.

At each end of a parallel region the threads of GNU's OpenMP, which torch comes with, look 300,000 times whether the
others are done, some milliseconds long, and only then sleep. That is fastest on cores of one's own. Where other
programs want the cores as well, threads that look keep those from them that still compute: beside one busy loop on two
cores, a run kept a third of its rate (docs/performance.md).

    awake    every half second: how long have this process's threads waited for a core? -> much: asleep
    asleep   20 seconds -> awake, to look again

libgomp reads its settings (GOMP_SPINCOUNT, OMP_WAIT_POLICY) once, when torch is imported, and a load comes and goes.
But it has a rule that it follows each time: while it has more threads than the process has CPUs, they look 100 times
(its manual, under GOMP_SPINCOUNT). So a team of threads that do nothing, but count, has all the others wait briefly for
as long as it is there. Sums stay the same, bit for bit: the team that computes is the same, and who computes what.
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
"""Variables by which a user says how threads wait."""

LOOK_SECONDS = 0.5
"""Between two looks at how long threads have waited for a core. They say something only while threads wait awake for
each other: each that sleeps waits for a core when it is woken, too."""
ASLEEP_SECONDS = 20.0
"""Of waiting asleep, until the next look: 1 second of 41 is awake where the cores are shared all the time."""
CONTENDED = 0.30
"""Seconds that all threads together wait for a core in a second; with more, the cores are shared. On a quiet machine a
run's own threads wait for each other up to 0.2, where it reports; beside one busy loop they wait 0.7."""


@contextmanager
def leaving_cores_to_others(threads: int, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """For the time of a `with` block, have threads wait briefly for each other while other programs want the cores.

    Does nothing if the user has said how threads wait, or if the system does not say how long they wait for a core.

    Args:
        threads: how many of this process compute together, torch.get_num_threads() of the thread that computes; in
            another one it is what any thread has set last, such as a loader's 1. One has none to wait for.
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
    """Return GNU's OpenMP as this process has loaded it, torch's own if there are several; None without it."""
    lines = read_text(machine.PROC / "self" / "maps").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    # Another package may have brought one of its own.
    path = min(paths, key=lambda path: ("/torch" not in path, path), default=None)
    return None if path is None else ctypes.CDLL(path)


def seconds_waited() -> dict[str, float]:
    """Return how long each thread of this process, by its id, has waited for a core; nothing if nothing says so."""
    waited = {}
    for folder in (machine.PROC / "self" / "task").glob("*"):
        fields = read_text(folder / "schedstat").split()  # nanoseconds on a core, waiting for one; slices
        if len(fields) == 3:
            waited[folder.name] = int(fields[1]) / 1e9
    return waited


def _watch(openmp: ctypes.CDLL, ended: threading.Event) -> None:
    is_logged = False
    before, began = seconds_waited(), time.monotonic()
    while not ended.wait(LOOK_SECONDS):
        now, looked = seconds_waited(), time.monotonic()
        waited = sum(now[thread] - before[thread] for thread in now.keys() & before.keys())
        if waited > CONTENDED * (looked - began):
            if not is_logged:
                log.info(
                    "others want these cores, too: while they do, threads that wait for each other sleep at once "
                    "(OMP_WAIT_POLICY=ACTIVE keeps them awake)"
                )
            is_logged = True
            team = threading.Thread(target=hold_idle_team, args=(openmp, ended), name="idle team", daemon=True)
            team.start()
            team.join()
            now, looked = seconds_waited(), time.monotonic()
        before, began = now, looked


def hold_idle_team(openmp: ctypes.CDLL, ended: threading.Event) -> None:
    """Give this thread a team that does nothing, until it ends: libgomp has more threads than there are CPUs."""
    # Each of the team calls a function of libgomp that only returns a number: none has to wait for Python's lock. The
    # thread that begins a parallel region is one of its team, and no thread of libgomp's.
    nothing = ctypes.cast(openmp.omp_get_num_threads, ctypes.c_void_p)
    openmp.GOMP_parallel(nothing, None, ctypes.c_uint(len(allowed_cpus()) + 1), ctypes.c_uint(0))
    ended.wait(ASLEEP_SECONDS)
