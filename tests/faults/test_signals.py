"""Signals to one rank, wherever it is, stop all ranks after the same step, saved and resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faulty_runs import train_with_faults
from training_runs import assert_same_tensors, checkpoints_of, losses_of, metrics_of, status_of

# What happens to rank 1 -> the step after which all ranks stop: they know of it one step later.
FAULTS = {
    "SIGTERM": 5,
    "SIGUSR1": 5,
    "SIGHUP": 5,
    "time limit": 3,
    "in the first step": 2,
    "in an evaluation": 3,
    "at the end of an evaluation's step": 3,
    "in a wait for data": 3,
    "in the save": 5,
    "before training": 0,
    "in the last step but one": 8,  # trained to the end, but not evaluated
}
REASONS = {"SIGUSR1": "SIGUSR1", "SIGHUP": "SIGHUP", "time limit": "the time limit is near"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def preempted(root: Path) -> dict[str, list[dict[str, Any]]]:
    """What each run came to on both ranks; in the folder "whole" nothing has happened."""
    runs = [("nothing", [f"ckpt_save_path={root}/whole"])]
    runs += [(fault, [f"ckpt_save_path={root}/{fault}"]) for fault in FAULTS]
    results: dict[str, list[dict[str, Any]]] = {}
    for outcome in train_with_faults(2, runs):
        results.setdefault(outcome["fault"], []).append(outcome)
    return results


@pytest.fixture(scope="module")
def statuses(root: Path, preempted: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """run_status.json and the checkpoints of each run as the signal has left them."""
    return {
        fault: {**status_of(root / fault), "checkpoints": checkpoints_of(root / fault)} for fault in ("whole", *FAULTS)
    }


@pytest.fixture(scope="module")
def resumed(root: Path, statuses: dict[str, dict[str, Any]]) -> None:
    """Every run has been started once more."""
    train_with_faults(2, [("nothing", [f"ckpt_save_path={root}/{fault}"]) for fault in FAULTS])


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_stop_after_the_same_step_saved_and_with_the_resumable_exit_code(
    fault: str, preempted: dict[str, list[dict[str, Any]]], statuses: dict[str, dict[str, Any]]
) -> None:
    step = FAULTS[fault]
    assert [outcome["exit_code"] for outcome in preempted[fault]] == [75, 75]
    status = statuses[fault]
    assert (status["status"], status["step"], status["starts_without_progress"]) == ("preempted", step, 0)
    assert REASONS.get(fault, "SIGTERM") in status["reason"]
    name = "step_8_ckp" if step == 8 else f"step_{step}_ckp.preempt"
    assert status["checkpoints"] == ({name} if step else set())


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("resumed")
def test_the_next_start_resumes_bit_for_bit(fault: str, root: Path) -> None:
    assert status_of(root / fault)["status"] == "finished"
    assert checkpoints_of(root / fault) == {"step_8_ckp"}
    assert_same_tensors(root / fault / "checkpoints" / "step_8_ckp", root / "whole" / "checkpoints" / "step_8_ckp")
    assert losses_of(root / fault) == losses_of(root / "whole")
    found, expected = (
        {line["step"]: line["evaluation_loss"] for line in metrics_of(root / each, "evaluation_loss")}
        for each in (fault, "whole")
    )
    assert found == expected
