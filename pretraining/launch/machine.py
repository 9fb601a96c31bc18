"""The cores and the memory that a process may use, given hardware, affinity and container limits.

The values come from Linux's files in /proc and /sys. Without these files, as on macOS, only the hardware counts.
"""

from __future__ import annotations

import getpass
import math
import os
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class MachineMemory:
    """Memory of the machine or of this process's control group, in bytes.

    Attributes:
        available: free without swapping.
        limited_by: origin of the total: "this machine" or "this control group".
    """

    available: int
    total: int
    limited_by: str


def usable_cores() -> int:
    """Return the cores that this process may use, by its affinity and the CPU quota of its control groups."""
    return max(1, int(min(len(allowed_cpus()), cpu_quota())))


def allowed_cpus() -> set[int]:
    """Return the CPUs in this process's affinity, whatever share of their time it gets."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int]) -> int:
    """Return the number of cores behind some CPUs: the hyper-threads of a core count once."""
    siblings = [read_text(CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus]
    return len(set(siblings))


def cpu_quota() -> float:
    """Return the CPU quota of the control groups, in cores; infinite without a quota."""
    return min(_cpu_quotas(), default=math.inf)


def is_bound_by_parent() -> bool:
    """Return whether the parent may run on more CPUs: a launcher then bound this process to its own CPUs."""
    try:
        return os.sched_getaffinity(os.getppid()) > allowed_cpus()
    except (AttributeError, OSError):  # a system without affinities; a parent that has exited
        return False


def machine_memory() -> MachineMemory:
    """Return the memory that processes here may use: the machine's, or less if a control group limits it."""
    fields = dict(line.split(":", 1) for line in read_text(PROC / "meminfo").splitlines())
    if "MemTotal" in fields:
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    else:
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = MachineMemory(available, total, "this machine")
    for limit, used in _memory_limits():
        if limit < found.total:
            found = MachineMemory(min(found.available, max(0, limit - used)), limit, "this control group")
    return found


def read_text(path: Path) -> str:
    """Return the content of a system file; "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _cpu_quotas() -> Iterator[float]:
    """Yield the CPU quota of each control group with a quota, in cores."""
    for folder in _control_groups("cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))  # version 1
        if quota.strip().isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group with a limit, in bytes; reclaimable file cache does not count."""
    for folder in _control_groups("memory"):
        for limit, used, reclaimable in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
        ):
            texts = [read_text(folder / name).strip() for name in (limit, used)]
            if all(text.isdigit() for text in texts):
                statistics = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
                yield int(texts[0]), int(texts[1]) - int(statistics.get(reclaimable, 0))


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups for a controller, innermost first."""
    for line in read_text(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controllers if controllers else CGROUPS
        # In a container the path is often the host's, while the container's own group is mounted as the root.
        inner = root / path.strip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def name_user(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give a user without a name one: in a container without a passwd entry, the compiler of PyTorch would fail."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environ["USER"] = str(os.getuid())
