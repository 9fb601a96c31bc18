from __future__ import annotations

from collections import Counter

import pytest

from pretraining.tools.doctor.judgement import Link, find_slow, find_slow_links, rounds_of_pairs


def test_a_rank_is_slow_next_to_the_median_of_the_others() -> None:
    assert find_slow({0: 100.0, 1: 98.0, 2: 50.0, 3: 102.0}, 1.3) == {2: pytest.approx(2.0)}
    assert find_slow({0: 100.0, 1: 50.0}, 1.3) == {1: pytest.approx(2.0)}
    assert find_slow({0: 100.0, 1: 80.0, 2: 101.0}, 1.3) == {}
    assert find_slow({0: 0.0, 1: 80.0}, 1.3) == {0: float("inf")}
    assert find_slow({0: 1.0}, 1.3) == {}


def hosts_of(world_size: int, machine: int) -> list[str]:
    return [f"node{rank // machine}" for rank in range(world_size)]


def links_of(world_size: int, machine: int) -> list[Link]:
    pairs = [pair for round_ in rounds_of_pairs(hosts_of(world_size, machine)) for pair in round_]
    return [Link(a, b, a // machine == b // machine) for a, b in pairs]


def test_a_slow_link_is_named_and_links_between_machines_are_not_slow_for_being_that() -> None:
    rates = {link: 100.0 if link.is_inside else 20.0 for link in links_of(8, 4)}
    assert find_slow_links(rates, 1.3) == ({}, {})
    bad = next(link for link in rates if not link.is_inside)
    rates[bad] = 10.0
    assert find_slow_links(rates, 1.3) == ({}, {bad: pytest.approx(2.0)})


def test_a_rank_with_only_slow_links_is_named_in_place_of_its_links() -> None:
    rates = {link: 25.0 if 3 in (link.one, link.other) else 100.0 for link in links_of(6, 6)}
    assert find_slow_links(rates, 1.3) == ({3: pytest.approx(4.0)}, {})


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
