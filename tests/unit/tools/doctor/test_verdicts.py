from __future__ import annotations

from pretraining.tools.doctor.verdicts import Check, merged, summary, table, worst_of

GOOD = Check("memory", "good", "9 GiB")
LOOK = Check("open files", "look at", "only 64", "ulimit -n 4096")
BAD = Check("cores", "bad", "none", "ask for some")


def test_the_worst_verdict_speaks_for_all() -> None:
    assert worst_of([GOOD, LOOK, BAD, GOOD]) == "bad"
    assert worst_of([GOOD, LOOK]) == "look at"
    assert worst_of([]) == worst_of([GOOD]) == "good"


def test_a_check_of_all_ranks_stands_once_and_one_of_some_names_them() -> None:
    found = merged([[GOOD, LOOK], [GOOD], [GOOD, LOOK, LOOK]])
    assert [(check.item, check.ranks, check.place) for check in found] == [
        ("memory", (), ""),
        ("open files", (0, 2), "ranks 0, 2"),
    ]
    assert merged([[LOOK], []])[0].place == "rank 0"


def test_the_summary_is_the_worst_first_with_what_to_do() -> None:
    assert list(summary([GOOD, LOOK, BAD])) == [
        "bad: none: ask for some",
        "look at: only 64: ulimit -n 4096",
    ]
    assert list(summary([GOOD, GOOD])) == ["all good: 2 items"]


def test_what_is_not_known_is_neither_good_nor_bad() -> None:
    unknown = Check("clocks of cores", "not known", "the system does not say")
    assert worst_of([GOOD, unknown]) == "good" and worst_of([unknown, LOOK]) == "look at"
    assert list(summary([GOOD, unknown])) == ["all good: 1 items; 1 more not known"]
    assert list(summary([LOOK, unknown])) == ["look at: only 64: ulimit -n 4096"]
    good, other = table([GOOD, unknown])
    assert good == "  good      memory           9 GiB" and other.startswith("  not known clocks of cores  the")
