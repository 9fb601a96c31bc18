"""Facts about the machine that a process runs on, and verdicts on those that make training slow or fail."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from pretraining.launch.machine import cpu_quota, machine_memory, read_text, usable_cores
from pretraining.launch.network import NCCL_INTERFACE, interfaces_here, offered_address
from pretraining.tools.doctor.communication import check_variables
from pretraining.tools.doctor.verdicts import Check

OPEN_FILES_WANTED = 4096
SHARED_MEMORY_WANTED = 2**30
LOCKED_MEMORY_WANTED = 2**26
MAPS_WANTED = 65530
"""The kernel's own default."""
BAD_MEMORY = 2**28
"""Of a process: less does not hold Python and PyTorch."""
BUSY_SHARE = 0.5
"""Of the machine's cores, by its load: what others may use before training and measurements are slower."""
CLOCK_SKEW_SECONDS = 1.0
BAD_SKEW_SECONDS = 30.0
"""Half of the time after which a lease is stale."""
MAPS_FILE = "/proc/sys/vm/max_map_count"
CORES_FOLDER = "/sys/devices/system/cpu"

SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")


def facts_of(device: torch.device) -> dict[str, str]:
    """What is worth knowing about this process's machine, in words, by name."""
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts = {
        "machine": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "device": device.type,
        "cores": f"{usable_cores()}, {torch.get_num_threads()} threads a process",
        "memory": _size(machine_memory().total),
        "last-level cache": _size(cache) if (cache := last_level_cache_bytes()) else "unknown",
        "open files": "any number" if soft_files == resource.RLIM_INFINITY else str(soft_files),
        "locked memory": "any amount" if soft_locked == resource.RLIM_INFINITY else _size(soft_locked),
        "/dev/shm": _size(_shared_memory_bytes()),
    }
    facts["gloo listens at"] = offered_address(os.environ)
    facts["NCCL listens at"] = os.environ.get(NCCL_INTERFACE) or f"what NCCL finds ({NCCL_INTERFACE} is not set)"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = f"{properties.name}, {_size(properties.total_memory)}"
        facts["CUDA"] = str(torch.version.cuda or torch.version.hip)
        facts["driver"] = _driver()
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts |= {name: os.environ[name] for name in SLURM_VARIABLES if name in os.environ}
    return facts


def check_machine(device: torch.device, local_world_size: int, environment: Mapping[str, str]) -> list[Check]:
    """A verdict for each limit of this process's machine, and for each variable that libraries read."""
    checks = [
        _check_open_files(),
        _check_maps(),
        _check_memory(local_world_size),
        _check_shared_memory(local_world_size),
        *_check_cores(local_world_size),
        _check_load(),
        *check_variables(environment, interfaces_here(), device.type == "cuda"),
    ]
    soft_locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if device.type == "cuda" and soft_locked != resource.RLIM_INFINITY and soft_locked < LOCKED_MEMORY_WANTED:
        found = f"only {_size(soft_locked)} of memory may be locked; InfiniBand needs more"
        checks.append(Check("locked memory", "look at", found, "ulimit -l unlimited"))
    return checks


def _check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_WANTED:
        return Check("open files", "good", "any number" if soft == resource.RLIM_INFINITY else f"{soft} are allowed")
    found = f"only {soft} open files are allowed, and large datasets and many connections need more"
    return Check("open files", "look at", found, f"ulimit -n {max(OPEN_FILES_WANTED, hard)}")


def _check_maps() -> Check:
    text = _text_of(MAPS_FILE)
    if not text.isdigit() or int(text) >= MAPS_WANTED:
        return Check("memory maps", "good", f"{text} are allowed" if text else "not limited here")
    found = f"only {text} maps of a process are allowed, and each open token file is one"
    return Check("memory maps", "look at", found, "sysctl -w vm.max_map_count=262144")


def _check_memory(local_world_size: int) -> Check:
    memory = machine_memory()
    found = f"{_size(memory.available)} of {_size(memory.total)} available in {memory.limited_by}"
    if memory.available < BAD_MEMORY * local_world_size:
        advice = "end what else runs here, or ask for more (sbatch --mem)"
        return Check("memory", "bad", f"{found}, for {local_world_size} processes", advice)
    if memory.available < memory.total // 10:
        return Check("memory", "look at", f"{found}: others hold the rest", "ps aux --sort=-rss names them")
    return Check("memory", "good", found)


def _check_shared_memory(local_world_size: int) -> Check:
    shared = _shared_memory_bytes()
    if local_world_size > 1 and shared < SHARED_MEMORY_WANTED:
        found = f"/dev/shm has {_size(shared)}, which processes of a machine talk through"
        return Check("/dev/shm", "look at", found, "give a container --shm-size=8g")
    return Check("/dev/shm", "good", _size(shared))


def _check_cores(local_world_size: int) -> Iterator[Check]:
    cores, threads = usable_cores(), torch.get_num_threads()
    quota = cpu_quota()
    of_quota = "" if math.isinf(quota) else f", by a quota of {quota:g} cores' time"
    if cores < local_world_size:
        found = f"{local_world_size} processes share {cores} cores{of_quota}"
        yield Check("cores", "bad", found, "ask for more (--cpus-per-task)")
    elif local_world_size > 1 and threads * local_world_size > cores:
        found = f"{local_world_size} processes of {threads} threads share {cores} cores{of_quota}"
        yield Check("cores", "look at", found, f"set OMP_NUM_THREADS={cores // local_world_size}")
    else:
        yield Check("cores", "good", f"{cores}, for {local_world_size} x {threads} threads{of_quota}")
    governor = _text_of(f"{CORES_FOLDER}/cpu0/cpufreq/scaling_governor")
    if governor == "powersave" and _text_of(f"{CORES_FOLDER}/cpu0/cpufreq/scaling_driver") == "acpi-cpufreq":
        found = "the cores are kept at their lowest clock"
        yield Check("clocks of cores", "look at", found, "cpupower frequency-set -g performance")
    elif not governor:
        yield Check("clocks of cores", "not known", "the system does not say how they are chosen")
    else:
        yield Check("clocks of cores", "good", governor)


def _check_load() -> Check:
    """Compares the load of the last minute with all cores of the machine, which it is of."""
    cores = os.cpu_count() or 1
    try:
        load = os.getloadavg()[0]
    except OSError:
        return Check("load", "not known", "the system does not say")
    found = f"{load:.0f} busy threads in the last minute, on {cores} cores"
    if load > BUSY_SHARE * cores:
        advice = "end them (top names them), or measure and train when they are done"
        return Check("load", "look at", f"{found}: other programs use these cores", advice)
    return Check("load", "good", found)


def check_across(facts: list[dict[str, str]], clocks: list[float]) -> list[Check]:
    """A verdict for what should be the same on all ranks.

    Args:
        facts: of each rank.
        clocks: of each rank's machine at the same moment, in seconds.
    """
    if len(facts) == 1:
        return []
    checks = []
    for name in ("torch", "CUDA", "driver", "NCCL", "device"):
        values = [each.get(name, "none") for each in facts]
        if len(set(values)) > 1:
            first = (f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values))
            checks.append(Check(f"same {name}", "bad", f"{name} differs: " + "; ".join(first), "make them the same"))
    if not checks:
        checks.append(Check("same software", "good", f"{len(facts)} ranks have the same versions and devices"))
    skew = max(clocks) - min(clocks)
    if skew <= CLOCK_SKEW_SECONDS:
        checks.append(Check("clock", "good", f"{skew * 1e3:.0f} ms between ranks"))
        return checks
    late = clocks.index(min(clocks))
    found = (
        f"the clocks of the machines differ by {skew:.1f} s (that of rank {late} is behind): file times and leases "
        "on the run's folder depend on them"
    )
    checks.append(Check("clock", "bad" if skew > BAD_SKEW_SECONDS else "look at", found, "use NTP"))
    return checks


def last_level_cache_bytes() -> int:
    """Caches right before the memory, of all cores that this process may use; 0 where the system does not say."""
    sizes: dict[tuple[str, str], int] = {}  # by level and the cores that share it
    for core in _allowed_cores():
        by_level = {_text_of(f"{each}/level"): each for each in Path(CORES_FOLDER).glob(f"cpu{core}/cache/index*")}
        if by_level:
            last = max(by_level)
            size = _text_of(f"{by_level[last]}/size").removesuffix("K")
            sizes[last, _text_of(f"{by_level[last]}/shared_cpu_list")] = int(size) * 2**10 if size.isdigit() else 0
    return sum(sizes.values())


def _allowed_cores() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _shared_memory_bytes() -> int:
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0


def _driver() -> str:
    words = _text_of("/proc/driver/nvidia/version").split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _text_of(path: str) -> str:
    return read_text(Path(path)).strip()


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
