"""Cores and memory of a process by Linux's files, in containers of both versions, and without such files."""

from __future__ import annotations

import getpass
import os
import pwd
from pathlib import Path

import pytest

from pretraining.launch import machine
from pretraining.launch.machine import MachineMemory, machine_memory, name_user, usable_cores

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake /proc and /sys/fs/cgroup with eight cores."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    write(tmp_path, {"proc/meminfo": MEMINFO})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "cgroup/job/memory.max": f"{16 * GIB}\n",
    "cgroup/job/memory.current": f"{6 * GIB}\n",
    "cgroup/job/memory.stat": f"anon {4 * GIB}\ninactive_file {2 * GIB}\n",
    "cgroup/job/step/memory.max": "max\n",
    "cgroup/job/step/cpu.max": "250000 100000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n",
    "cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",  # the container's own group is mounted as the root
    "cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
    "cgroup/memory/memory.stat": f"total_inactive_file {1 * GIB}\n",
    "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
    "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
UNLIMITED = {**VERSION_1, "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1"}
MACHINE = MachineMemory(48 * GIB, 64 * GIB, "this machine")


@pytest.mark.parametrize(
    ("files", "memory", "cores"),
    [
        (VERSION_2, MachineMemory(12 * GIB, 16 * GIB, "this control group"), 2),
        (VERSION_1, MachineMemory(6 * GIB, 8 * GIB, "this control group"), 1),  # half a core counts as one
        ({**UNLIMITED, "cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE, 8),
        ({**UNLIMITED, "cgroup/memory/memory.limit_in_bytes": ""}, MACHINE, 8),
    ],
)
def test_a_control_group_is_a_limit(files: dict[str, str], memory: MachineMemory, cores: int, system: Path) -> None:
    write(system, files)
    assert (machine_memory(), usable_cores()) == (memory, cores)


def test_without_proc_the_hardware_counts(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "proc/meminfo").unlink()
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 2**14}[name])
    assert machine_memory() == MachineMemory(16 * GIB, 16 * GIB, "this machine")
    assert usable_cores() == 10


def test_a_user_without_a_passwd_entry_has_a_name_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_entry(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", find_no_entry)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER", "")
    name_user(os.environ)
    assert getpass.getuser() == str(os.getuid())
    monkeypatch.setenv("USER", "me")
    name_user(os.environ)
    assert getpass.getuser() == "me"
