from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretraining.tools.doctor import devices, environment, timing
from pretraining.tools.doctor.devices import copy_bytes
from pretraining.tools.doctor.environment import last_level_cache_bytes
from pretraining.tools.doctor.timing import seconds_of

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("caches", "memory", "processes", "expected"),
    [
        (0, 1024 * GIB, 8, 256 * MIB),  # the system does not say how large they are
        (32 * MIB, 64 * GIB, 1, 256 * MIB),
        (384 * MIB, 1024 * GIB, 8, 1536 * MIB),  # four times all of them
        (384 * MIB, 64 * GIB, 8, 512 * MIB),  # two buffers of each of 8 processes take an eighth of the memory
        (32 * MIB, GIB // 2, 1, 32 * MIB),
        (32 * MIB, MIB, 1, MIB),
    ],
)
def test_what_is_copied_is_larger_than_all_caches_where_there_is_memory_for_it(
    caches: int, memory: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "last_level_cache_bytes", lambda: caches)
    monkeypatch.setattr(devices, "memory_bytes", lambda: memory)
    assert copy_bytes(CPU, processes) == expected


@pytest.mark.parametrize(("free", "expected"), [(130 * GIB, GIB), (4 * GIB, GIB // 2)])
def test_a_gpu_that_others_use_is_left_room(free: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 * GIB))
    assert copy_bytes(torch.device("cuda"), 8) == expected


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
    monkeypatch.setattr(environment, "CORES_FOLDER", str(tmp_path))
    monkeypatch.setattr(environment, "_allowed_cores", lambda: {0, 1, 3, 6})
    assert last_level_cache_bytes() == 66 * MIB
    monkeypatch.setattr(environment, "CORES_FOLDER", str(tmp_path / "missing"))
    assert last_level_cache_bytes() == 0


def test_stretches_are_as_long_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def work() -> None:
        nonlocal now, calls
        now, calls = now + 0.002, calls + 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert seconds_of(work, CPU) == pytest.approx(0.002)
    assert calls == 1 + (1 + 2 + 4 + 8 + 16) + 5 * 16  # the first stretch of more than 30 ms, five times
