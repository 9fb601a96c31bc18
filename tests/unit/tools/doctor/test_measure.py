from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from pretraining.launch.machine import MachineMemory
from pretraining.tools.doctor import measure
from pretraining.tools.doctor.measure import copy_bytes, rounds_of_pairs, seconds_of

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
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: caches)
    monkeypatch.setattr(measure, "machine_memory", lambda: MachineMemory(memory, memory, "this machine"))
    assert copy_bytes(CPU, processes) == expected


@pytest.mark.parametrize(("free", "expected"), [(130 * GIB, GIB), (4 * GIB, GIB // 2)])
def test_a_gpu_that_others_use_is_left_room(free: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 * GIB))
    assert copy_bytes(torch.device("cuda"), 8) == expected


def test_stretches_are_as_long_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def work() -> None:
        nonlocal now, calls
        now, calls = now + 0.002, calls + 1

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert seconds_of(work, CPU) == pytest.approx(0.002)
    assert calls == 1 + (1 + 2 + 4 + 8 + 16) + 5 * 16  # the first stretch of more than 30 ms, five times


def hosts_of(world_size: int, machine: int) -> list[str]:
    return [f"node{rank // machine}" for rank in range(world_size)]


@pytest.mark.parametrize(("world_size", "machine"), [(2, 2), (3, 3), (8, 4), (9, 3), (7, 4), (16, 8), (64, 8), (20, 1)])
def test_in_a_round_no_rank_is_in_two_pairs_and_every_rank_is_in_some(world_size: int, machine: int) -> None:
    rounds = rounds_of_pairs(hosts_of(world_size, machine))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert pairs and len(ranks) == len(set(ranks)) and all(one < other for one, other in pairs)
    seen = [pair for pairs in rounds for pair in pairs]
    assert len(seen) == len(set(seen)) and {rank for pair in seen for rank in pair} == set(range(world_size))
    if world_size <= 16:
        assert len(seen) == world_size * (world_size - 1) // 2
    else:
        assert {(rank, rank + machine) for rank in range(world_size - machine)} <= set(seen)


@pytest.mark.parametrize(("world_size", "machine"), [(8, 4), (9, 3), (16, 8), (64, 8)])
def test_a_machine_sends_as_many_messages_at_once_in_all_rounds_of_a_kind(world_size: int, machine: int) -> None:
    for pairs in rounds_of_pairs(hosts_of(world_size, machine)):
        crossing = [pair for pair in pairs if pair[0] // machine != pair[1] // machine]
        assert crossing in ([], pairs)
        shares = Counter(number for pair in pairs for number in {rank // machine for rank in pair})
        assert set(shares.values()) == {machine if crossing else machine // 2}


def test_a_large_machine_is_measured_from_neighbour_to_neighbour() -> None:
    assert rounds_of_pairs(hosts_of(40, 20)) == [
        [(a, a + 1) for a in [*range(0, 19, 2), *range(20, 39, 2)]],
        [(a, a + 1) for a in [*range(1, 18, 2), *range(21, 38, 2)]],
        [(a, a + 20) for a in range(20)],
    ]


def test_one_rank_has_no_pairs() -> None:
    assert rounds_of_pairs(["node0"]) == []
