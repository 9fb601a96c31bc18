"""How many threads of a process compute on a CPU: no more than it has cores for.

    --cpu_threads, or OMP_NUM_THREADS   what the user says
    else, without either                the cores that the process may use, of its affinity, of its control groups' CPU
                                        quota and of its SLURM job, shared with the other processes of its machine

Sums depend on the number of threads in their last bits. So nothing that comes and goes decides on it, as the load of a
machine does: checkpoints keep the number, and a run that goes on takes it again where it fits. How threads wait for
each other changes no sum, and follows the load (shared_cores.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from pretraining.launch.layout import ProcessLayout, read_text
from pretraining.launch.machine import allowed_cpus, cpu_quota, is_bound_by_parent, physical_cores

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class CpuThreads:
    """The number of threads that a process begins with.

    Attributes:
        fitting: the most that it has cores for.
        is_chosen: whether nobody has said another number, so that a run that goes on may take the one of before.
    """

    fitting: int
    is_chosen: bool


def set_threads(
    wanted: int | None, layout: ProcessLayout, environ: MutableMapping[str, str] = os.environ
) -> CpuThreads:
    """Have this process compute with as many threads as it should; called before torch is imported, which reads it.

    Afterwards it changes nothing.

    Args:
        wanted: by the user; None = decide.
    """
    fitting = cores_of_process(layout, environ)
    is_chosen = wanted is None and not _is_given(layout, environ)
    if torch_is_imported():
        return CpuThreads(fitting, is_chosen=False)
    if wanted is not None or is_chosen:
        environ[THREADS] = str(wanted or fitting)
    return CpuThreads(fitting, is_chosen)


def torch_is_imported() -> bool:
    """Return whether torch has read how many threads it has, as in a notebook, whose user may want another number."""
    return "torch" in sys.modules


def cores_of_process(layout: ProcessLayout, environ: Mapping[str, str] = os.environ) -> int:
    """Return the cores, at least one, that this process may keep busy beside the others of its job on this machine."""
    processes = layout.local_world_size
    cores = physical_cores(allowed_cpus())
    shares = [
        # A launcher may have given each process cores of its own.
        cores if processes > 1 and is_bound_by_parent() else cores / processes,
        cpu_quota() / processes,
    ]
    task, node = read_text(environ, "SLURM_CPUS_PER_TASK"), read_text(environ, "SLURM_CPUS_ON_NODE")
    if task is not None and task.isdecimal():
        # The task of torchrun is shared by its processes; one of srun is a process.
        shares.append(int(task) if layout.launcher == "slurm" else int(task) / processes)
    elif node is not None and node.isdecimal():
        shares.append(int(node) / processes)
    return max(1, int(min(shares)))


def _is_given(layout: ProcessLayout, environ: Mapping[str, str]) -> bool:
    """Return whether the user has said how many threads; torchrun says one where the user has not."""
    given = read_text(environ, THREADS)
    by_torchrun = layout.launcher == "torchrun" and layout.local_world_size > 1 and given == "1"
    return given is not None and not by_torchrun
