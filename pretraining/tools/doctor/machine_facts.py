"""Facts about the machine that a process runs on, and which of them are known to make training slow or fail."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from pretraining.launch.machine import machine_memory, read_text, usable_cores
from pretraining.launch.network import NCCL_INTERFACE, offered_address

OPEN_FILES_WANTED = 4096
SHARED_MEMORY_WANTED = 2**30
CLOCK_SKEW_SECONDS = 1.0
CORES_FOLDER = "/sys/devices/system/cpu"

SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs of a machine talk through its memory",
    "NCCL_SHM_DISABLE": "processes of a machine talk through the network",
    "NCCL_IB_DISABLE": "machines talk through plain sockets",
    "TORCH_NCCL_BLOCKING_WAIT": "each collective is waited for",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each allocation goes to the driver",
}
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


def warnings_of(device: torch.device, local_world_size: int, environment: Mapping[str, str]) -> list[str]:
    """What is known to be bad, a sentence each."""
    found = []
    soft_files, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_files != resource.RLIM_INFINITY and soft_files < OPEN_FILES_WANTED:
        found.append(
            f"only {soft_files} open files are allowed, and large datasets and many connections need more: "
            f"ulimit -n {max(OPEN_FILES_WANTED, hard_files)}"
        )
    shared = _shared_memory_bytes()
    if local_world_size > 1 and shared < SHARED_MEMORY_WANTED:
        found.append(
            f"/dev/shm has {_size(shared)}, which processes of a machine talk through: give a container --shm-size=8g"
        )
    soft_locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if device.type == "cuda" and soft_locked != resource.RLIM_INFINITY and soft_locked < 2**26:
        found.append(f"only {_size(soft_locked)} of memory may be locked; InfiniBand needs more: ulimit -l unlimited")
    threads = torch.get_num_threads() * local_world_size
    if local_world_size > 1 and threads > usable_cores():
        found.append(
            f"{local_world_size} processes of {torch.get_num_threads()} threads share {usable_cores()} cores: set "
            f"OMP_NUM_THREADS={max(1, usable_cores() // local_world_size)}"
        )
    if usable_cores() < local_world_size:
        found.append(f"{local_world_size} processes share {usable_cores()} cores: ask for more (--cpus-per-task)")
    governor = _text_of(f"{CORES_FOLDER}/cpu0/cpufreq/scaling_governor")
    if governor == "powersave" and _text_of(f"{CORES_FOLDER}/cpu0/cpufreq/scaling_driver") == "acpi-cpufreq":
        found.append("the cores are kept at their lowest clock: cpupower frequency-set -g performance")
    for name, consequence in SLOWING_VARIABLES.items():
        if environment.get(name, "0") not in ("", "0"):
            found.append(f"{name}={environment[name]} is set: {consequence}")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found.append("TORCH_DISTRIBUTED_DEBUG=DETAIL is set: each collective is checked by another one")
    return found


def warnings_across(facts: list[dict[str, str]], clocks: list[float]) -> list[str]:
    """What differs between ranks and should not.

    Args:
        facts: of each rank.
        clocks: of each rank's machine at the same moment, in seconds.
    """
    found = []
    for name in ("torch", "CUDA", "driver", "NCCL", "device"):
        values = [each.get(name, "none") for each in facts]
        if len(set(values)) > 1:
            first = (f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values))
            found.append(f"{name} differs: " + "; ".join(first))
    skew = max(clocks) - min(clocks)
    if skew > CLOCK_SKEW_SECONDS:
        late = clocks.index(min(clocks))
        found.append(
            f"the clocks of the machines differ by {skew:.1f} s (that of rank {late} is behind): file times and leases "
            "on the run's folder depend on them; use NTP"
        )
    return found


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
