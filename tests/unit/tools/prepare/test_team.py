"""Processes that meet in a folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS

from pretraining.errors import DataError
from pretraining.tools.prepare import team as team_module
from pretraining.tools.prepare.team import Team


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "POLL_SECONDS", 0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "team"


def together(folder: Path, *bodies: Callable[[Team], None]) -> list[BaseException | None]:
    """Runs a team, a thread a member, the last one first; what each raised."""
    errors: list[BaseException | None] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            with Team(folder, rank, len(bodies)) as team:
                bodies[rank](team)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in reversed(range(len(bodies)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def nothing(team: Team) -> None:
    """Only come and go."""


def wait_for_ever(team: Team) -> None:
    team.wait(lambda: False, lambda: "nothing")


def fail(team: Team) -> None:
    raise DataError("bad line")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_receive_what_rank_0_publishes_and_leave_nothing_behind(folder: Path, size: int) -> None:
    received = []
    errors = together(
        folder,
        lambda team: team.publish("plan", {"a": [1]}),
        *[lambda team: received.append(team.receive("plan"))] * (size - 1),
    )
    assert errors == [None] * size
    assert received == [{"a": [1]}] * (size - 1)
    assert not folder.exists()


def test_what_an_earlier_job_left_is_not_taken_for_this_one(folder: Path) -> None:
    folder.mkdir()
    (folder / "failed_1").write_text("long ago")
    (folder / "rank_1").write_text("somebody else")
    (folder / "rank_7").write_text("of a larger job")
    (folder / "joined.json").write_text(json.dumps({"1": "somebody else", "2": "another"}))
    (folder / "plan.json").write_text('"old"')
    received = []

    def lead(team: Team) -> None:
        team.publish("plan", "new")

    assert together(folder, lead, *[lambda team: received.append(team.receive("plan"))] * 2) == [None] * 3
    assert received == ["new", "new"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_that_fails_ends_all_and_only_its_own_error_is_its_own(folder: Path, failing: int) -> None:
    bodies = [wait_for_ever] * 3
    bodies[failing] = fail
    errors = together(folder, *bodies)
    for rank, error in enumerate(errors):
        assert isinstance(error, DataError)
        if rank == failing:
            assert (str(error), error.rank, error.is_everywhere) == ("bad line", rank or None, False)
        else:
            assert str(error) == f"rank {failing} has failed: bad line" and error.is_everywhere
    assert together(folder, *[nothing] * 3) == [None] * 3, "the next job is not disturbed"


def test_an_interruption_ends_all_too(folder: Path) -> None:
    def interrupt(team: Team) -> None:
        raise KeyboardInterrupt

    errors = together(folder, wait_for_ever, interrupt)
    assert str(errors[0]).startswith("rank 1 has failed: KeyboardInterrupt")
    assert isinstance(errors[1], KeyboardInterrupt)


def test_a_failure_is_noticed_in_the_middle_of_work(folder: Path) -> None:
    def work(team: Team) -> None:
        while True:
            team.check()

    assert "rank 1 has failed" in str(together(folder, work, fail)[0])


def test_one_that_was_killed_is_noticed_by_its_silence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "HEARTBEAT_SECONDS", 0.001)
    clock = iter(float(seconds) for seconds in range(0, 10**9, 20))
    noticed = threading.Event()

    def lead(team: Team) -> None:
        team._clock = clock.__next__
        try:
            wait_for_ever(team)
        finally:
            noticed.set()

    def fall_silent(team: Team) -> None:
        team._ended.set()
        noticed.wait(PATIENCE_SECONDS)

    assert str(together(folder, lead, fall_silent)[0]).startswith("rank 1 has given no sign of life for 300 s: was it")


def test_one_that_works_for_long_gives_signs_of_life(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "HEARTBEAT_SECONDS", 0.001)
    monkeypatch.setattr(team_module, "SILENT_SECONDS", 30.0)
    beats: set[int] = set()

    def watch(team: Team) -> None:
        def seen_often() -> bool:
            beats.add((folder / "rank_1").stat().st_mtime_ns)
            return len(beats) > 5

        team.wait(seen_often, lambda: "signs of life")
        team.publish("enough", True)

    assert together(folder, watch, lambda team: team.receive("enough")) == [None, None]


@pytest.mark.parametrize(("rank", "who"), [(0, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 more"), (3, "rank 0")])
def test_a_process_whose_fellows_do_not_come_says_so_and_ends(
    folder: Path, rank: int, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    now = iter(range(0, 10_000, 20))
    with (
        pytest.raises(DataError, match=rf"rank {rank} waited 600 s for {who} to begin, in vain.*--output_path"),
        Team(folder, rank, 10, clock=lambda: float(next(now))),
    ):
        pass
    assert f"waits for {who} to begin (in {folder})" in caplog.messages


def test_one_alone_needs_no_folder(folder: Path) -> None:
    with Team(folder, 0, 1) as team:
        team.publish("plan", None)
        team.check()
        team.wait(lambda: True, lambda: "nothing")
    with pytest.raises(ValueError), Team(folder, 0, 1):
        raise ValueError
    assert not folder.exists()


def test_a_folder_that_vanished_does_not_hide_an_error(folder: Path) -> None:
    def remove_and_fail(team: Team) -> None:
        team.wait(lambda: not (folder / "rank_1").exists(), lambda: "rank 1 to leave")
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        raise DataError("the true reason")

    assert str(together(folder, remove_and_fail, nothing)[0]) == "the true reason"


def test_a_name_that_is_cleared_away_while_it_is_written_is_written_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = team_module.write_atomic, 0

    def cleared_away(path: Path, text: str) -> None:
        nonlocal calls
        calls += path.name == "rank_1"
        if path.name == "rank_1" and calls == 1:
            raise FileNotFoundError(path)
        write(path, text)

    monkeypatch.setattr(team_module, "write_atomic", cleared_away)
    assert together(folder, nothing, nothing) == [None, None]
