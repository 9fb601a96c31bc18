from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from pretraining.tools.doctor import machine_facts
from pretraining.tools.doctor.machine_facts import facts_of, last_level_cache_bytes, warnings_across, warnings_of

CPU = torch.device("cpu")


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
    monkeypatch.setattr(machine_facts, "_text_of", lambda path: "")


@pytest.mark.usefixtures("good_machine")
def test_a_good_machine_has_no_warnings() -> None:
    assert warnings_of(CPU, 8, {"NCCL_P2P_DISABLE": "0"}) == []


@pytest.mark.usefixtures("good_machine")
@pytest.mark.parametrize(
    ("name", "value", "warning"),
    [
        ("_shared_memory_bytes", lambda: 2**26, "/dev/shm has 64.0 MiB"),
        ("usable_cores", lambda: 4, "8 processes share 4 cores"),
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
    found = warnings_of(CPU, 1, {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "detail"})
    assert found[0] == "CUDA_LAUNCH_BLOCKING=1 is set: each kernel is waited for"
    assert found[1].startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL is set")


def test_what_differs_between_ranks_is_named() -> None:
    facts = [{"torch": "2.13.0"}, {"torch": "2.13.0"}, {"torch": "2.11.0"}]
    assert warnings_across(facts, [5.0, 5.1, 5.0]) == ["torch differs: 2.13.0 on rank 0; 2.11.0 on rank 2"]
    (skewed,) = warnings_across(facts[:2], [100.0, 90.0])
    assert "differ by 10.0 s (that of rank 1 is behind)" in skewed


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
