"""A fault, the moment it comes and the rank that has it: how every rank ends, what is left, and what a restart does.

A restart is compared with a run that nothing happened to, bit for bit. The words of docs/reliability.md for the faults
are in test_page.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_runs import ALL, EIGHT_STEPS, Ended, Fault, start, train, train_each
from helpers import PATIENCE_SECONDS
from tiers import first_quick
from training_runs import assert_same_tensors, checkpoints_of, events_of, losses_of, metrics_of, status_of

LOST_PEER = "another process of the job exited"


@dataclass(frozen=True)
class Stopped:
    """A run of two processes that a fault stops, and that its next start finishes.

    Attributes:
        left: names of its checkpoints, without what a save left unfinished.
        reason: a part of its status and of rank 0's last words.
        statuses: how the ranks end.
    """

    faults: Sequence[Fault]
    left: set[str]
    reason: str = "SIGTERM"
    statuses: tuple[int, int] = (75, 75)
    flags: Sequence[str] = ()


def preempted(step: int, *faults: Fault, reason: str = "SIGTERM") -> Stopped:
    """Stopped by a signal to rank 1: all ranks know of it one step later."""
    return Stopped(faults, {f"step_{step}_ckp.preempt"} if step else set(), reason)


def killed(rank: int | str, *fault: object, left: Sequence[int] = (2,), flags: Sequence[str] = ()) -> Stopped:
    """Killed, with a checkpoint every second step."""
    statuses = (-9 if rank != 1 else 1, -9 if rank != 0 else 1)
    names = {f"step_{step}_ckp" for step in left}
    flags = ["checkpoint_interval=2", "keep_last=1", *flags]
    return Stopped([(rank, *fault, "SIGKILL")], names, LOST_PEER, statuses, flags)


TERM = (1, "in_step", 4, "SIGTERM")
STOPPED = {
    "SIGTERM": preempted(5, TERM),
    "SIGUSR1": preempted(5, (1, "in_step", 4, "SIGUSR1"), reason="SIGUSR1"),
    "SIGUSR2": preempted(5, (1, "in_step", 4, "SIGUSR2"), reason="SIGUSR2"),
    "SIGXCPU": preempted(5, (1, "in_step", 4, "SIGXCPU"), reason="SIGXCPU"),
    "SIGHUP": preempted(5, (1, "in_step", 4, "SIGHUP"), reason="SIGHUP"),
    "time limit": preempted(3, (1, "time_limit_is_near"), reason="the time limit is near"),
    "in the first step": preempted(2, (1, "in_step", 1, "SIGTERM")),
    "in an evaluation": preempted(3, (1, "in_evaluation", "SIGTERM")),
    "at the end of an evaluation's step": preempted(3, (1, "in_step", 2, "SIGTERM")),
    "in a wait for data": preempted(3, (1, "in_data_wait", 2, "SIGTERM")),
    "in the save": preempted(5, TERM, (1, "in_save", 1, "flush", "SIGTERM and SIGUSR1")),
    "before training": preempted(0, (1, "in_setup", "SIGTERM")),
    # Trained to the end, but not evaluated.
    "in the last step but one": Stopped([(1, "in_step", 7, "SIGTERM")], {"step_8_ckp"}),
    "killed": killed(1, "in_step", 4),
    "killed in a context group": killed(1, "in_step", 4, flags=["context_parallel_size=2"]),
    "killed in a shard": killed(1, "in_save", 2, "shard"),
    "rank 0 killed in a shard": killed(0, "in_save", 2, "shard"),
    "killed before the manifest": killed(0, "in_save", 2, "manifest"),
    "killed before the commit": killed(0, "in_save", 2, "commit"),
    "killed before retention": killed(0, "in_save", 2, "retention", left=[2, 4]),
    "killed after the grace time": killed(ALL, "in_save", 2, "flush"),
    "short errors": Stopped([(ALL, "fail_first_writes", 2), (1, "in_step", 7, "SIGTERM")], {"step_8_ckp"}),
}
RESUMED_QUICKLY = ["killed", "killed in a shard", "killed after the grace time", "short errors"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, with two that nothing happens to."""
    root = tmp_path_factory.mktemp("matrix")
    context = [*EIGHT_STEPS, "context_parallel_size=2", f"ckpt_save_path={root / 'whole context group'}"]
    train_each([([*EIGHT_STEPS, f"ckpt_save_path={root / 'whole'}"], []), (context, [])])
    return root


def flags_of(name: str, root: Path) -> list[str]:
    return [*EIGHT_STEPS, f"ckpt_save_path={root / name}", *STOPPED[name].flags]


@pytest.fixture(scope="module")
def ended(root: Path) -> dict[str, list[Ended]]:
    """How each run ended; those that kill a process are jobs of their own."""
    outlived = [name for name, row in STOPPED.items() if -9 not in row.statuses]
    found = train_each([(flags_of(name, root), STOPPED[name].faults) for name in outlived])
    alone = {
        name: train(flags_of(name, root), *row.faults, status=None)
        for name, row in STOPPED.items()
        if name not in outlived
    }
    return dict(zip(outlived, found, strict=True)) | alone


@pytest.mark.parametrize("name", STOPPED)
def test_all_ranks_stop_and_what_was_saved_stays(name: str, root: Path, ended: dict[str, list[Ended]]) -> None:
    row, run = STOPPED[name], root / name
    assert tuple(each.status for each in ended[name]) == row.statuses, ended[name]
    assert {each for each in checkpoints_of(run) if not each.endswith(".tmp")} == row.left
    if name == "short errors":
        assert [each.output.count("Input/output error") for each in ended[name]] == [2, 2]
    status = status_of(run)
    if 1 in row.statuses:
        assert LOST_PEER in ended[name][row.statuses.index(1)].stderr
    if row.statuses[0] != -9:  # which writes the status
        expected = ("preempted", 0) if row.statuses[0] == 75 else ("failed", 1)
        assert (status["status"], status["starts_without_progress"]) == expected
        assert row.reason in status["reason"] and row.reason in ended[name][0].stderr


@pytest.mark.parametrize(
    "names", first_quick(RESUMED_QUICKLY, [name for name in STOPPED if name not in RESUMED_QUICKLY]), ids=len
)
def test_the_next_starts_repeat_the_run_that_was_never_stopped(
    names: list[str], root: Path, ended: dict[str, list[Ended]]
) -> None:
    partial = {name for name in names if any(each.endswith(".tmp") for each in checkpoints_of(root / name))}
    resumed = train_each([(flags_of(name, root), []) for name in names])
    for name, (first, _) in zip(names, resumed, strict=True):
        run, whole = root / name, root / ("whole context group" if "context" in name else "whole")
        assert status_of(run)["status"] == "finished" and checkpoints_of(run) == {"step_8_ckp"}, name
        assert_same_tensors(run / "checkpoints" / "step_8_ckp", whole / "checkpoints" / "step_8_ckp")
        assert losses_of(run) == losses_of(whole), name
        assert evaluations_of(run) == evaluations_of(whole), name
        assert (".tmp is incomplete: ignored" in first.output) == (name in partial), first.output
        if (newest := max(STOPPED[name].left, default=None)) is not None:
            assert f"from {run}/checkpoints/{newest}, step {newest.split('_')[1]}" in first.output
        events = [event for event in events_of(run) if event["event"] in ("start", "restart", "end")]
        assert [event["event"] for event in events if event["event"] != "end"] == ["start", "restart"], name
        assert events[-1]["status"] == "finished"
    in_save = ("in a shard", "before the manifest", "before the commit", "after the grace time")
    assert partial == {name for name in names if name.endswith(in_save)}


def evaluations_of(run: Path) -> dict[int, float]:
    return {line["step"]: line["evaluation_loss"] for line in metrics_of(run, "evaluation_loss")}


@dataclass(frozen=True)
class Failed:
    """A run of two processes that ends with an error.

    Attributes:
        said: in the last words of each rank.
        status: of both.
    """

    faults: Sequence[Fault]
    said: tuple[Sequence[str], Sequence[str]]
    flags: Sequence[str] = ()
    status: int = 1


HUNG = 124
# Longer than a busy machine takes for a step, or for a start.
STEP, START = "hang_timeout=10s", "first_step_timeout=25s"
FAILED = {
    "out of memory": Failed(
        [(1, "in_norm", 3, "out of memory")],
        (
            [LOST_PEER],
            ["rank 1: out of memory in step 3, at pretraining/model/llama.py:", "--batch_size=1", "optimizer"],
        ),
    ),
    "a data thread dies": Failed(
        [(1, "in_data_wait", 3, "lost thread")],
        ([LOST_PEER], ["rank 1: a data-reading thread has exited", "step 3"]),
    ),
    "a data thread fails": Failed(
        [(1, "in_data_wait", 3, "bug")],
        ([LOST_PEER], ["ZeroDivisionError: division by zero", "on rank 1, reading the batch of step 3"]),
    ),
    "a read hangs": Failed(
        [(1, "in_data_wait", 3, "hang")],
        (["rank 1 is waiting for data after step 2"], ["rank 1 is waiting for data after step 2", " in hang"]),
        [STEP, "first_step_timeout=600s"],
        HUNG,
    ),
    "one rank of a context group cannot read": Failed(
        [(1, "unreadable_samples")],
        ([LOST_PEER], ["error: rank 1: ", "Input/output error"]),
        ["context_parallel_size=2"],
    ),
    "one rank fails with a collective under way": Failed(
        [(ALL, "fail_alone", "1")],
        ([f"error: rank 0: {LOST_PEER}"], ["error: rank 1: a file of this machine is gone"]),
    ),
    "a limit on the size of files": Failed(
        [(ALL, "limit_file_size", 50_000)],
        (["error: ", os.strerror(errno.EFBIG)], []),
        ["checkpoint_interval=2"],
    ),
    "the first read hangs": Failed(
        [(1, "in_data_wait", 1, "hang")],
        (["rank 1 is waiting for data after step 0"], ["rank 1 is waiting for data after step 0", " in hang"]),
        ["hang_timeout=600s", START],
        HUNG,
    ),
}


@pytest.mark.parametrize("name", first_quick(*FAILED, quick=len(FAILED) - 1))
def test_an_error_of_one_rank_is_named_and_stops_all(name: str, tmp_path: Path) -> None:
    row = FAILED[name]
    ended = train([*EIGHT_STEPS, *row.flags, f"ckpt_save_path={tmp_path}"], *row.faults, status=row.status)
    for each, said in zip(ended, row.said, strict=True):
        assert all(part in each.stderr for part in said) and each.stderr.count("error: ") <= len(said), each
    assert checkpoints_of(tmp_path) == set()


@pytest.mark.parametrize(("stopped", "context"), first_quick((1, 1), (0, 1), (1, 2)))
def test_the_peer_of_a_stopped_process_names_it_and_exits(stopped: int, context: int, tmp_path: Path) -> None:
    flags = [*EIGHT_STEPS, STEP, "first_step_timeout=600s", f"context_parallel_size={context}"]
    processes = start([*flags, f"ckpt_save_path={tmp_path}"], (stopped, "in_step", 5, "SIGSTOP"))
    try:
        other = processes[1 - stopped]
        _, stderr = other.communicate(timeout=PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
    assert other.returncode == HUNG, stderr
    assert "the job hangs: no process made progress for" in stderr
    assert "train_step" in stderr  # where this process stands
    if stopped == 0:  # it also serves the store that it would be asked through
        assert "beside rank 0, does not" in stderr
    else:
        assert "rank 1 on " in stderr and "sends no heartbeats any more" in stderr
