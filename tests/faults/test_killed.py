"""A killed rank takes the others with it, and a killed save leaves the checkpoint before it.

Processes are started without a launcher, which would end them together.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from faulty_runs import start_ranks, train_with_faults
from helpers import PATIENCE_SECONDS
from training_runs import assert_same_tensors, checkpoints_of, events_of, losses_of, status_of

SAVED_IN_STEP_3 = "checkpoint_interval=3"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def lost_peer(root: Path) -> list[tuple[int | None, str]]:
    """Exits code and last words of both ranks, of which rank 1 was killed in step 4."""
    flags = [f"ckpt_save_path={root}/killed", SAVED_IN_STEP_3]
    ranks = start_ranks(2, "killed", flags)
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[1] for rank in ranks]
    return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]


@pytest.fixture(scope="module")
def killed_in_the_save(root: Path) -> set[str]:
    """What lies in the folder of checkpoints after both ranks were killed in a save that was not getting anywhere."""
    ranks = start_ranks(2, "the save never ends", [f"ckpt_save_path={root}/grace", SAVED_IN_STEP_3])
    try:
        ranks[1].wait_for_line(lambda line: line.strip() == "hangs")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return checkpoints_of(root / "grace")


@pytest.fixture(scope="module")
def resumed(root: Path, lost_peer: object, killed_in_the_save: object) -> None:
    """Both runs were started again, and a third one has never been stopped."""
    runs = ("whole", "killed", "grace")
    train_with_faults(2, [("nothing", [f"ckpt_save_path={root}/{run}"]) for run in runs])


def test_the_peers_of_a_killed_rank_exit_and_name_the_reason(
    root: Path, lost_peer: list[tuple[int | None, str]]
) -> None:
    (code, words), (killed_code, _) = lost_peer
    assert (code, killed_code) == (1, -signal.SIGKILL)
    assert words.startswith("another process of the job exited")
    status = status_of(root / "killed")
    assert (status["status"], status["reason"]) == ("failed", words)
    assert status["starts_without_progress"] == 1


def test_a_killed_save_leaves_the_previous_checkpoint(killed_in_the_save: set[str]) -> None:
    assert {name for name in killed_in_the_save if not name.endswith(".tmp")} == {"step_3_ckp"}


@pytest.mark.thorough
def test_a_killed_rank_of_a_context_group_takes_the_others_with_it_and_the_run_is_repeated(tmp_path: Path) -> None:
    flags = {run: [f"ckpt_save_path={tmp_path / run}", "context_parallel_size=2"] for run in ("killed", "whole")}
    ranks = start_ranks(2, "killed", [*flags["killed"], SAVED_IN_STEP_3])
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert said[0].startswith("another process of the job exited")
    train_with_faults(2, [("nothing", run) for run in flags.values()])
    assert_same_tensors(*(tmp_path / run / "checkpoints" / "step_8_ckp" for run in flags))
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")


@pytest.mark.usefixtures("resumed")
@pytest.mark.parametrize("run", ["killed", "grace"])
def test_the_next_start_repeats_the_run_that_was_never_stopped_bit_for_bit(run: str, root: Path) -> None:
    assert_same_tensors(root / run / "checkpoints" / "step_8_ckp", root / "whole" / "checkpoints" / "step_8_ckp")
    assert losses_of(root / run) == losses_of(root / "whole")
    assert not any(name.endswith(".tmp") for name in checkpoints_of(root / run))


def test_the_event_log_of_a_killed_run_continues_at_its_next_start(root: Path, resumed: None) -> None:
    events = [event for event in events_of(root / "grace") if event["event"] in ("start", "restart", "end")]
    assert [event["event"] for event in events] == ["start", "restart", "end"]
    assert events[1]["previous_status"] == "killed" and events[2]["status"] == "finished"
