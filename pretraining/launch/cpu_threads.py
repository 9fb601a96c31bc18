"""The number of compute threads of a process on a CPU.

    --cpu_threads, else OMP_NUM_THREADS   the user's choice
    else                                  one per core that the process may use: by affinity, CPU quota of its control
                                          groups and SLURM job, divided among the job's processes on the machine

The number of threads changes the last bits of sums, so it must not depend on the machine's load. Checkpoints store the
number, and a resumed run uses it again if it fits.

At the end of a parallel region, threads of GNU's OpenMP (part of torch) spin until the others are done, by default
300,000 iterations. Beside another program that wants the same cores, threads that spin take the cores from threads that
compute, so here they spin 2,000 iterations and then sleep (docs/performance.md). Sums stay the same, bit for bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from pretraining.launch.layout import ProcessLayout, read_variable
from pretraining.launch.machine import allowed_cpus, cpu_quota, is_bound_by_parent, physical_cores

THREADS = "OMP_NUM_THREADS"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which a user sets how threads wait; GNU's OpenMP reads them when torch is imported."""
SPIN_COUNT = "2000"


@dataclass(frozen=True)
class CpuThreads:
    """The number of threads that a process starts with.

    Attributes:
        fitting: one per core of the process.
        is_chosen: whether the program chose the number, so that a resumed run may use the checkpoint's instead.
    """

    fitting: int
    is_chosen: bool


def set_threads(
    wanted: int | None, layout: ProcessLayout, environ: MutableMapping[str, str] = os.environ
) -> CpuThreads:
    """Set the number of compute threads and how they wait, before torch is imported; without effect afterwards.

    Args:
        wanted: the user's `--cpu_threads`; None = decide.
    """
    fitting = cores_of_process(layout, environ)
    is_chosen = wanted is None and not _is_given(layout, environ)
    if torch_is_imported():
        return CpuThreads(fitting, is_chosen=False)
    if wanted is not None or is_chosen:
        environ[THREADS] = str(wanted or fitting)
    if not any(environ.get(name) for name in WAITING):
        environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return CpuThreads(fitting, is_chosen)


def torch_is_imported() -> bool:
    """Return whether torch has set its number of threads already, as in a notebook."""
    return "torch" in sys.modules


def cores_of_process(layout: ProcessLayout, environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's share of the machine's cores, at least one."""
    processes = layout.local_world_size
    cores = physical_cores(allowed_cpus())
    shares = [
        # A launcher may have bound each process to its own cores.
        cores if processes > 1 and is_bound_by_parent() else cores / processes,
        cpu_quota() / processes,
    ]
    task, node = read_variable(environ, "SLURM_CPUS_PER_TASK"), read_variable(environ, "SLURM_CPUS_ON_NODE")
    if task is not None and task.isdecimal():
        # Under srun a task is one process; torchrun's processes share one task.
        shares.append(int(task) if layout.launcher == "slurm" else int(task) / processes)
    elif node is not None and node.isdecimal():
        shares.append(int(node) / processes)
    return max(1, int(min(shares)))


def _is_given(layout: ProcessLayout, environ: Mapping[str, str]) -> bool:
    """Return whether the user set OMP_NUM_THREADS; torchrun sets 1 if the user did not."""
    given = read_variable(environ, THREADS)
    by_torchrun = layout.launcher == "torchrun" and layout.local_world_size > 1 and given == "1"
    return given is not None and not by_torchrun
