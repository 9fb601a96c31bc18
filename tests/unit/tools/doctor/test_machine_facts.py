from __future__ import annotations

import math
import os
import resource
from pathlib import Path

import pytest
import torch

from pretraining.launch.machine import MachineMemory
from pretraining.tools.doctor import machine_facts
from pretraining.tools.doctor.machine_facts import check_across, check_machine, facts_of, last_level_cache_bytes
from pretraining.tools.doctor.verdicts import Check

CPU = torch.device("cpu")


def not_good(checks: list[Check]) -> list[str]:
    return [check.sentence for check in checks if check.verdict in ("look at", "bad")]


def warnings_of(device: torch.device, local_world_size: int, environment: dict[str, str]) -> list[str]:
    return not_good(check_machine(device, local_world_size, environment))


def test_facts_name_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "3")
    facts = facts_of(CPU)
    assert facts["torch"] == torch.__version__ and facts["device"] == "cpu" and facts["SLURM_NNODES"] == "3"
    assert {"machine", "system", "cores", "memory", "open files", "locked memory", "/dev/shm"} <= facts.keys()


@pytest.fixture
def good_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(machine_facts, "_shared_memory_bytes", lambda: 2**34)
    monkeypatch.setattr(machine_facts, "usable_cores", lambda: 64)
    monkeypatch.setattr(machine_facts, "cpu_quota", lambda: math.inf)
    monkeypatch.setattr(machine_facts, "machine_memory", lambda: MachineMemory(2**36, 2**36, "this machine"))
    monkeypatch.setattr(machine_facts, "_text_of", lambda path: "performance" if "governor" in path else "")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))


@pytest.mark.usefixtures("good_machine")
def test_every_item_of_a_good_machine_is_good() -> None:
    checks = check_machine(CPU, 8, {})
    assert {check.verdict for check in checks} == {"good"} and all(check.found for check in checks)
    items = {"open files", "memory maps", "memory", "/dev/shm", "cores", "clocks of cores", "load", "NCCL and gloo"}
    assert {check.item for check in checks} == items


@pytest.mark.usefixtures("good_machine")
def test_cores_that_other_programs_use_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (13.1, 2.0, 2.0))
    (warning,) = warnings_of(CPU, 1, {})
    assert warning.startswith(
        "13 busy threads in the last minute, on 2 cores: other programs use these cores: end them"
    )


@pytest.mark.usefixtures("good_machine")
def test_what_the_system_does_not_say_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    monkeypatch.setattr(machine_facts, "_text_of", lambda path: "")
    verdicts = {check.item: check.verdict for check in check_machine(CPU, 1, {})}
    assert verdicts["load"] == verdicts["clocks of cores"] == "not known"


@pytest.mark.usefixtures("good_machine")
def test_a_good_machine_has_no_warnings() -> None:
    assert warnings_of(CPU, 8, {"NCCL_P2P_DISABLE": "0"}) == []


@pytest.mark.usefixtures("good_machine")
@pytest.mark.parametrize(
    ("name", "value", "warning"),
    [
        ("_shared_memory_bytes", lambda: 2**26, "/dev/shm has 64.0 MiB"),
        ("usable_cores", lambda: 4, "8 processes share 4 cores"),
        ("usable_cores", lambda: 12, "8 processes of 2 threads share 12 cores"),
        ("cpu_quota", lambda: 2.5, "8 processes share 2 cores, by a quota of 2.5 cores' time"),
        ("machine_memory", lambda: MachineMemory(2**30, 2**36, "this machine"), "1.0 GiB of 64.0 GiB available"),
        ("machine_memory", lambda: MachineMemory(2**32, 2**36, "this machine"), "4.0 GiB of 64.0 GiB available"),
        ("_text_of", lambda path: "1024" if path.endswith("max_map_count") else "", "only 1024 maps of a process"),
        (
            "_text_of",
            lambda path: "powersave" if path.endswith("governor") else "acpi-cpufreq",
            "the cores are kept at their lowest clock",
        ),
    ],
)
def test_what_is_bad_on_a_machine_is_named(
    name: str, value: object, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_facts, name, value)
    if name == "cpu_quota":
        monkeypatch.setattr(machine_facts, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if "threads" in warning else 1)
    assert any(sentence.startswith(warning) for sentence in warnings_of(CPU, 8, {}))


@pytest.mark.usefixtures("good_machine")
def test_limits_that_are_too_low_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 65536))
    assert warnings_of(CPU, 1, {}) == [
        "only 1024 open files are allowed, and large datasets and many connections need more: ulimit -n 65536"
    ]
    on_gpu = warnings_of(torch.device("cuda"), 1, {})
    assert any("of memory may be locked" in sentence for sentence in on_gpu)


@pytest.mark.usefixtures("good_machine")
def test_variables_that_slow_training_are_named() -> None:
    found = warnings_of(torch.device("cuda"), 1, {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "detail"})
    assert found == [
        "CUDA_LAUNCH_BLOCKING=1 is set: each kernel is waited for: unset it",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL is set: each collective is checked by another one: unset it",
    ]


def test_what_differs_between_ranks_is_named() -> None:
    facts = [{"torch": "2.13.0"}, {"torch": "2.13.0"}, {"torch": "2.11.0"}]
    (differs,) = not_good(check_across(facts, [5.0, 5.1, 5.0]))
    assert differs.startswith("torch differs: 2.13.0 on rank 0; 2.11.0 on rank 2")
    (skewed,) = not_good(check_across(facts[:2], [100.0, 90.0]))
    assert "differ by 10.0 s (that of rank 1 is behind)" in skewed
    assert [check.verdict for check in check_across(facts[:2], [100.0, 50.0])] == ["good", "bad"]
    assert [check.verdict for check in check_across(facts[:2], [5.0, 5.1])] == ["good", "good"]
    assert check_across(facts[:1], [5.0]) == []


def write_cache(core: Path, index: int, level: int, size: str, shared: str) -> None:
    folder = core / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, value in {"level": str(level), "size": size, "shared_cpu_list": shared}.items():
        (folder / name).write_text(f"{value}\n")


def test_a_cache_that_cores_share_counts_once_and_only_those_of_cores_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3", "4-5", "4-5")):
        write_cache(tmp_path / f"cpu{core}", 0, 1, "48K", str(core))
        write_cache(tmp_path / f"cpu{core}", 1, 1, "32K", str(core))
        write_cache(tmp_path / f"cpu{core}", 2, 2, "1024K", str(core))
        write_cache(tmp_path / f"cpu{core}", 3, 3, "32768K", shared)
    write_cache(tmp_path / "cpu6", 0, 2, "2048K", "6")  # a small core, without the large cache
    monkeypatch.setattr(machine_facts, "CORES_FOLDER", str(tmp_path))
    monkeypatch.setattr(machine_facts, "_allowed_cores", lambda: {0, 1, 3, 6})
    assert last_level_cache_bytes() == 66 * 2**20
    monkeypatch.setattr(machine_facts, "CORES_FOLDER", str(tmp_path / "missing"))
    assert last_level_cache_bytes() == 0
