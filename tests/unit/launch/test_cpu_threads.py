"""The number of threads of a process: the user's, else by cores, quotas and launcher."""

from __future__ import annotations

import math
import sys

import pytest

from pretraining.launch import cpu_threads
from pretraining.launch.cpu_threads import CpuThreads, cores_of_process, set_threads
from pretraining.launch.layout import LOCALHOST, ProcessLayout


def layout_of(launcher: str = "single", processes: int = 1) -> ProcessLayout:
    return ProcessLayout(0, processes, 0, processes, launcher, LOCALHOST, 29500)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Eight cores, without a quota; torch is not imported yet."""
    monkeypatch.setattr(cpu_threads, "physical_cores", lambda cpus: 8)
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: math.inf)
    monkeypatch.setattr(cpu_threads, "is_bound_by_parent", lambda: False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("quota", "launcher", "processes", "environ", "expected"),
    [
        (math.inf, "single", 1, {}, 8),
        (math.inf, "torchrun", 4, {}, 2),
        (math.inf, "torchrun", 100, {}, 1),
        (6.0, "single", 1, {}, 6),
        (0.5, "single", 1, {}, 1),
        (math.inf, "slurm", 2, {"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "8"}, 3),
        (math.inf, "torchrun", 2, {"SLURM_CPUS_PER_TASK": "4"}, 2),
        (math.inf, "slurm", 2, {"SLURM_CPUS_ON_NODE": "4"}, 2),
        (math.inf, "single", 1, {"SLURM_CPUS_ON_NODE": "many"}, 8),
    ],
)
def test_the_processes_of_a_node_share_its_cores(
    quota: float, launcher: str, processes: int, environ: dict[str, str], expected: int, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(cpu_threads, "cpu_quota", lambda: quota)
    assert cores_of_process(layout_of(launcher, processes), environ) == expected


def test_cores_that_a_launcher_bound_to_a_process_are_not_shared(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cpu_threads, "physical_cores", lambda cpus: 4)
    machine.setattr(cpu_threads, "is_bound_by_parent", lambda: True)
    assert cores_of_process(layout_of("openmpi", 2), {}) == 4


@pytest.mark.parametrize(
    ("wanted", "environ", "launcher", "processes", "number", "is_chosen"),
    [
        (None, {}, "single", 1, "8", True),
        (None, {"OMP_NUM_THREADS": " "}, "single", 1, "8", True),
        (None, {"OMP_NUM_THREADS": "3"}, "single", 1, "3", False),
        (None, {"OMP_NUM_THREADS": "1"}, "torchrun", 2, "4", True),
        (None, {"OMP_NUM_THREADS": "1"}, "torchrun", 1, "1", False),
        (16, {"OMP_NUM_THREADS": "3"}, "single", 1, "16", False),
    ],
)
def test_the_user_decides_and_a_value_of_torchrun_is_ignored(
    wanted: int | None, environ: dict[str, str], launcher: str, processes: int, number: str, is_chosen: bool
) -> None:
    threads = set_threads(wanted, layout_of(launcher, processes), environ)
    assert environ["OMP_NUM_THREADS"] == number
    assert threads == CpuThreads(8 // processes, is_chosen)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, "2000"),
        ({"GOMP_SPINCOUNT": ""}, "2000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, None),
    ],
)
def test_waiting_threads_spin_briefly_unless_the_user_decides(environ: dict[str, str], count: str | None) -> None:
    set_threads(None, layout_of(), environ)
    assert environ.get("GOMP_SPINCOUNT") == count


def test_an_imported_torch_keeps_its_threads(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "torch", sys)
    environ: dict[str, str] = {}
    assert not set_threads(4, layout_of(), environ).is_chosen and environ == {}
