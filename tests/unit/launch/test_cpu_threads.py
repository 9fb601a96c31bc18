from __future__ import annotations

import pytest

from pretraining.launch import cpu_threads
from pretraining.launch.cpu_threads import spin_briefly, threads_in_quota


def test_threads_wait_briefly_unless_the_user_has_set_them_up() -> None:
    plain: dict[str, str] = {"OMP_NUM_THREADS": ""}
    spin_briefly(plain)
    assert plain["GOMP_SPINCOUNT"] == "10000"
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        chosen = {name: "2"}
        spin_briefly(chosen)
        assert chosen == {name: "2"}


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "allowed_cores", lambda: 8)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("usable", "processes", "environ", "expected"),
    [
        (8, 1, {}, None),
        (8, 4, {}, None),
        (6, 1, {}, 6),
        (6, 4, {}, 1),
        (2, 4, {}, 1),
        (2, 1, {"OMP_NUM_THREADS": "8"}, None),
    ],
    ids=["no quota", "no quota, several", "a quota", "shared", "less than one each", "given"],
)
def test_a_quota_is_shared_and_without_one_the_number_of_threads_stays(
    usable: int, processes: int, environ: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads decides on the last bits of sums: it changes only where it must."""
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: usable)
    assert threads_in_quota(processes, environ) == expected
