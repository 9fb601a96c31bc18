from __future__ import annotations

import json

import pytest

from pretraining.tools.doctor.diagnosis import (
    Diagnosis,
    RankReport,
    as_object,
    as_text,
    check_rates,
    check_speed,
    find_slow,
    find_slow_links,
    find_what_is_slow,
    slow_bfloat16,
)
from pretraining.tools.doctor.measure import CollectiveTime, Link, Rate, rounds_of_pairs
from pretraining.tools.doctor.verdicts import Check


def rank(number: int, tflops: float, host: str = "node0") -> RankReport:
    facts = {"machine": host, "device": "NVIDIA H200, 139.8 GiB", "torch": "2.13.0"}
    return RankReport(host, facts, [], [Rate("matmul bfloat16 8192", tflops, "TFLOP/s")], float(number))


RANKS = [rank(0, 700.0), rank(1, 710.0), rank(2, 300.0, "node1"), rank(3, 705.0, "node1")]
LINKS = {
    **{Link(0, 1, True): 300.0, Link(2, 3, True): 310.0},
    **{Link(0, 2, False): 40.0, Link(0, 3, False): 41.0, Link(1, 2, False): 39.0, Link(1, 3, False): 10.0},
}


def test_what_is_slow_is_said_with_its_machine_its_number_and_how_many_times() -> None:
    assert find_what_is_slow(RANKS, LINKS, 1.3) == [
        "rank 2 on node1 is slow: matmul bfloat16 8192 300 TFLOP/s, 2.4 times slower than the median of the others",
        "the link between rank 1 and rank 3 (node0 to node1) is slow: 10 GiB/s, 4.0 times slower than the median of "
        "the others",
    ]


def test_the_tables_show_rates_beside_the_peak_collectives_and_links_by_kind() -> None:
    collectives = [CollectiveTime("all-reduce", 2**20, 0.001, 1.5), CollectiveTime("all-gather", 2048, 1e-5, 0.1)]
    slow = Check("speed", "bad", "rank 2 is slow", "leave it out")
    few = Check("open files", "look at", "only 64 open files", "ulimit -n 4096", (1, 3))
    text = as_text(Diagnosis(RANKS, collectives, LINKS, [Check("memory", "good", "9 GiB"), few, slow]))
    for part in (
        "4 processes on 2 machines; that of rank 0:",
        "702       300       710 TFLOP/s, 71% of the peak of 989.4 (slowest: rank 2)",
        "1 MiB  1.000 ms       1.5 GiB/s",
        "2 KiB  0.010 ms       0.1 GiB/s",
        "links inside machines",
        "pairs of ranks: 4           39.5        10        41 GiB/s each way",
        "  good      memory      9 GiB\n",
        "  look at   open files  only 64 open files (ranks 1, 3)\n",
        "bad: rank 2 is slow: leave it out\nlook at: ranks 1, 3: only 64 open files: ulimit -n 4096",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("is_chosen", "advice"),
    [(True, "give --mixed_precision=false"), (False, "as a run does unless --mixed_precision=true is given")],
)
def test_bfloat16_that_is_emulated_is_named_with_how_many_times(is_chosen: bool, advice: str) -> None:
    def rates(*tflops: float) -> list[Rate]:
        names = (
            "matmul bfloat16 512",
            "matmul bfloat16 1024",
            "matmul float32 512",
            "matmul float32 1024",
            "memory copy",
        )
        return [Rate(name, value, "TFLOP/s") for name, value in zip(names, (*tflops, 1.0), strict=True)]

    sentence = f"bfloat16 is 80 times slower than float32 here: compute in float32, {advice}"
    assert list(slow_bfloat16(rates(0.002, 0.002, 0.16, 0.16), is_chosen)) == [sentence]
    assert not list(slow_bfloat16(rates(0.15, 0.14, 0.16, 0.16), is_chosen))
    assert not list(slow_bfloat16(rates(0.3, 0.3, 0.16, 0.16), is_chosen))


def test_what_a_copy_counts_stands_beside_its_rate() -> None:
    copies = [Rate("memory copy", 20.0, "GiB/s", "256 MiB read, 256 MiB written a copy")]
    text = as_text(Diagnosis([RankReport("node0", {"device": "cpu"}, [], copies, 0.0)], [], {}, []))
    assert "  memory copy                   20        20        20 GiB/s; 256 MiB read, 256 MiB written a copy" in text


def test_nothing_stands_out_where_nothing_does() -> None:
    text = as_text(Diagnosis([rank(0, 700.0)], [], {}, [Check("memory", "good", "9 GiB")]))
    assert text.startswith("1 process on 1 machine") and text.endswith("all good: 1 items")
    assert "collectives" not in text and "links" not in text


def test_the_object_is_json() -> None:
    slow, few = Check("speed", "look at", "rank 2 is slow", "leave it out"), Check("open files", "look at", "64")
    found = json.loads(json.dumps(as_object(Diagnosis(RANKS, [], LINKS, [slow, few, Check("memory", "good", "9")]))))
    assert (found["slow"], found["warnings"], found["verdict"]) == (["rank 2 is slow"], ["64"], "look at")
    assert found["checks"][1] == {"item": "open files", "verdict": "look at", "found": "64", "advice": "", "ranks": []}
    assert found["links"][0] == {"one": 0, "other": 1, "is_inside": True, "gib_per_second": 300.0}
    assert found["ranks"][2]["rates"][0]["value"] == 300.0


def test_a_rank_is_slow_next_to_the_median_of_the_others() -> None:
    assert find_slow({0: 100.0, 1: 98.0, 2: 50.0, 3: 102.0}, 1.3) == {2: pytest.approx(2.0)}
    assert find_slow({0: 100.0, 1: 50.0}, 1.3) == {1: pytest.approx(2.0)}
    assert find_slow({0: 100.0, 1: 80.0, 2: 101.0}, 1.3) == {}
    assert find_slow({0: 0.0, 1: 80.0}, 1.3) == {0: float("inf")}
    assert find_slow({0: 1.0}, 1.3) == {}


def links_of(world_size: int, machine: int) -> list[Link]:
    pairs = [
        pair for round_ in rounds_of_pairs([f"node{rank // machine}" for rank in range(world_size)]) for pair in round_
    ]
    return [Link(a, b, a // machine == b // machine) for a, b in pairs]


def test_a_slow_link_is_named_and_links_between_machines_are_not_slow_for_being_that() -> None:
    rates = {link: 100.0 if link.is_inside else 20.0 for link in links_of(8, 4)}
    assert find_slow_links(rates, 1.3) == ({}, {})
    bad = next(link for link in rates if not link.is_inside)
    rates[bad] = 10.0
    ranks, links = find_slow_links(rates, 1.3)
    assert ranks == {} and links == pytest.approx({bad: 2.0})


def test_a_rank_with_only_slow_links_is_named_in_place_of_its_links() -> None:
    rates = {link: 25.0 if 3 in (link.one, link.other) else 100.0 for link in links_of(6, 6)}
    ranks, links = find_slow_links(rates, 1.3)
    assert ranks == pytest.approx({3: 4.0}) and links == {}


def test_what_is_three_times_slower_is_bad_and_what_is_slower_is_looked_at() -> None:
    checks = check_speed([RANKS[0], rank(1, 100.0), *RANKS[2:]], {}, 1.3)
    assert [(check.verdict, check.found.split(" on ")[0]) for check in checks] == [
        ("bad", "rank 1"),
        ("look at", "rank 2"),
    ]
    assert all(check.advice for check in checks)
    (good,) = check_speed(RANKS[:2], {}, 1.3)
    assert good.verdict == "good" and check_speed(RANKS[:1], {}, 1.3) == []


@pytest.mark.parametrize(("tflops", "verdict"), [(700.0, "good"), (300.0, "look at")])
def test_products_are_measured_by_the_peak_of_the_device(tflops: float, verdict: str) -> None:
    (check,) = check_rates([Rate("matmul bfloat16 8192", tflops, "TFLOP/s")], "NVIDIA H200, 139.8 GiB")
    assert check.verdict == verdict and "of the peak of 989.4" in check.found and bool(check.advice) is (tflops == 300)


def test_products_of_a_device_whose_peak_is_not_known_are_not_called_good() -> None:
    (check,) = check_rates([Rate("matmul bfloat16 1024", 0.3, "TFLOP/s")], "cpu")
    assert check.verdict == "not known" and "the peak of this device is not known" in check.found


def test_a_slow_disk_is_looked_at() -> None:
    rates = [Rate("disk write + fsync", 0.02, "GiB/s"), Rate("disk read", 2.0, "GiB/s")]
    assert [check.verdict for check in check_rates(rates, "cpu")] == ["look at", "good"]
