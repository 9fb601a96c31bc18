"""Threads that compute on a CPU: no more than it has time for, and how they wait for each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from pretraining.launch.machine import allowed_cores, usable_cores

THREADS, WAITING, SPINNING = "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
SPINS = "10000"


def spin_briefly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Has threads that wait for each other sleep soon, unless the user has set them up; before torch is imported.

    At each end of a parallel region the threads of GNU's OpenMP look again and again whether the others are done, some
    milliseconds long. That is fastest on cores of one's own. Where other programs want the cores as well, those that
    look keep those from them that still compute: beside one busy loop on two cores, a run kept a third of its rate
    (docs/performance.md). The results are the same, bit for bit.
    """
    if not any(environ.get(name) for name in (THREADS, WAITING, SPINNING)):
        environ[SPINNING] = SPINS


def threads_in_quota(processes: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns how many threads each process has time for where a control group allows less than all of the cores.

    None where it does not, or where the user has said how many: sums depend on the number of threads in their last
    bits, so it changes only where it must.

    Args:
        processes: that share this machine's quota.
    """
    if environ.get(THREADS) or usable_cores() >= allowed_cores():
        return None
    return max(1, usable_cores() // processes)
