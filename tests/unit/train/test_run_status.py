"""run_status.json: how the newest start ended, and the count of starts without progress."""

from __future__ import annotations

import json
import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from unit.checkpoint.examples import manifest_of
from unit.train import whole_runs

from pretraining.checkpoint.run_folder import STATUS_FILE
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.errors import CheckpointError, ConfigError, LostPeerError
from pretraining.observability.events import EVENTS_FILE
from pretraining.progress import Progress, TrainState
from pretraining.train.preemption import TIME_LIMIT, preemption_error
from pretraining.train.run_status import RunStatusWriter, read_status

CRASH = ValueError("the loss is no number")
OUT_OF_TIME = preemption_error(TIME_LIMIT, "at some step: and what comes next.")
TERMINATED = preemption_error(signal.SIGTERM, "at some step: and what comes next.")


def everywhere(error: ConfigError) -> ConfigError:
    """Return an error as `join_processes` marks it when all ranks raise it."""
    error.is_everywhere = True
    return error


def at(step: int, *, is_rewind: bool = False) -> CheckpointRef:
    """Return a start point at a step."""
    return CheckpointRef(Path("c"), manifest_of(step), is_rewind=is_rewind)


def start(
    run: Path,
    *restored: CheckpointRef | int,
    reached: int | None = None,
    error: Exception | None = None,
    limit: int = 2,
) -> None:
    """Run a start from one start point after the other that trains up to a step, if any, and ends with an error."""
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, RunStatusWriter(limit, is_writer=True) as status:
        for each in restored:
            point = at(each) if isinstance(each, int) else each
            status.begin(run, point)
        if reached is not None:
            state = TrainState(10, 8, 1, Progress(point.step, point.step))
            status.mark_training(state, lambda: state.step)
            state.progress = Progress(reached, reached)
        if error is not None:
            raise error


def status_of(run: Path) -> dict[str, object]:
    document = json.loads((run / STATUS_FILE).read_text())
    return {name: value for name, value in document.items() if name not in ("updated", "checksum")}


def counts_of(run: Path) -> tuple[object, object, object]:
    """Return starts, starts without progress, and the step of the last start."""
    status = status_of(run)
    return status["starts"], status["starts_without_progress"], status["started_at_step"]


@pytest.mark.parametrize(
    ("error", "reached", "status", "reason", "crashes"),
    [
        (None, 10, "finished", "10 of 10 steps are done", 0),
        (None, 8, "finished", "8 of 10 steps are done", 0),
        (TERMINATED, 7, "preempted", "SIGTERM", 0),
        (TERMINATED, None, "preempted", "SIGTERM", 0),
        (OUT_OF_TIME, None, "preempted", "the time limit is near", 1),
        (OUT_OF_TIME, 5, "preempted", "the time limit is near", 1),
        (OUT_OF_TIME, 6, "preempted", "the time limit is near", 0),
        (KeyboardInterrupt(), 7, "failed", "KeyboardInterrupt", 0),
        (LostPeerError("another process has ended"), 7, "failed", "another process has ended", 1),
        (ValueError("nan"), 7, "failed", "ValueError: nan", 1),
        (MemoryError(), None, "failed", "MemoryError", 1),
        (everywhere(ConfigError("wrong flag")), None, "failed", "wrong flag", 0),
        (everywhere(ConfigError("disk full")), 7, "failed", "disk full", 1),
    ],
)
def test_an_end_is_written_down_and_counts_as_a_crash_where_it_is_one(
    tmp_path: Path, error: Exception | None, reached: int | None, status: str, reason: str, crashes: int
) -> None:
    start(tmp_path, 5, reached=reached, error=error)
    found = status_of(tmp_path)
    assert (found["status"], found["step"], found["reason"]) == (status, 5 if reached is None else reached, reason)
    assert counts_of(tmp_path) == (1, crashes, 5) and re.fullmatch(r"[0-9a-f]{16}", str(found["run_id"]))
    assert {path.name for path in tmp_path.iterdir()} == {STATUS_FILE, "logs", "checkpoints"}


@pytest.mark.parametrize("error", [None, TERMINATED, CRASH])
def test_a_refused_start_leaves_the_state_of_a_run_that_had_ended(tmp_path: Path, error: Exception | None) -> None:
    start(tmp_path, 0, reached=10, error=error)
    before = status_of(tmp_path)
    start(tmp_path, 10, error=everywhere(ConfigError("wrong flag")))
    assert status_of(tmp_path) == before | {"starts": 2}
    events = [json.loads(line) for line in (tmp_path / "logs" / EVENTS_FILE).read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["status"], events[-1]["reason"]) == ("end", "refused", "wrong flag")
    start(tmp_path, 10, reached=10)
    assert status_of(tmp_path)["status"] == "finished" and counts_of(tmp_path) == (3, 0, 10)


def test_the_step_is_that_of_the_last_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError), RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(3))
        status.mark_training(TrainState(10, 8, 1, Progress(7, 7)), lambda: 6)
        raise CRASH
    assert status_of(tmp_path)["step"] == 6 and counts_of(tmp_path) == (1, 1, 3)


def test_a_crash_loop_is_refused_with_a_remedy(tmp_path: Path) -> None:
    start(tmp_path, 0, reached=4, error=CRASH)
    start(tmp_path, 3, reached=4, error=CRASH)  # there is a new checkpoint
    start(tmp_path, 3, reached=4, error=CRASH)
    before = status_of(tmp_path)
    with pytest.raises(CheckpointError, match="ValueError: the loss is no number") as refused:
        start(tmp_path, 3)
    assert "max_starts_without_progress" in refused.value.settings and status_of(tmp_path) == before
    start(tmp_path, 3, reached=4, error=CRASH, limit=0)
    assert counts_of(tmp_path) == (4, 3, 3)
    start(tmp_path, 3, reached=10, limit=4)
    assert counts_of(tmp_path) == (5, 3, 3) and status_of(tmp_path)["run_id"] == before["run_id"]


def test_a_return_resets_the_count_once(tmp_path: Path) -> None:
    start(tmp_path, 200, reached=204, error=CRASH)
    for crashes in (1, 2):
        start(tmp_path, at(100, is_rewind=True), error=CRASH)
        assert counts_of(tmp_path) == (1 + crashes, crashes, 100)
    with pytest.raises(CheckpointError):
        start(tmp_path, at(100, is_rewind=True))


def test_a_run_whose_time_is_too_short_for_a_start_is_not_started_for_ever(tmp_path: Path) -> None:
    for error in (OUT_OF_TIME, TERMINATED, OUT_OF_TIME):  # a preemption for another job does not count
        start(tmp_path, 3, error=error)
    with pytest.raises(CheckpointError) as refused:
        start(tmp_path, 3)
    assert "time_limit" in refused.value.settings
    start(tmp_path, 3, reached=6, error=OUT_OF_TIME, limit=0)
    assert counts_of(tmp_path) == (4, 2, 3)
    start(tmp_path, 6, error=OUT_OF_TIME)  # from the checkpoint of the previous start
    assert counts_of(tmp_path) == (5, 1, 6)


def test_a_start_with_a_damaged_checkpoint_counts_once_from_the_checkpoint_that_it_uses(tmp_path: Path) -> None:
    start(tmp_path, 4, reached=6, error=CRASH)
    start(tmp_path, 6, error=CRASH)
    assert counts_of(tmp_path) == (2, 1, 6)
    start(tmp_path, 6, 4, error=CRASH)
    assert counts_of(tmp_path) == (3, 2, 4) and status_of(tmp_path)["step"] == 4
    before = status_of(tmp_path)
    with pytest.raises(CheckpointError):
        start(tmp_path, 6, 4)
    assert status_of(tmp_path) == before


@pytest.mark.parametrize("text", [None, "", "[]", '{"status": "running"}'])
def test_a_file_that_says_nothing_keeps_no_run_from_starting(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / STATUS_FILE).write_text(text)
    start(tmp_path, 0, reached=10)
    assert status_of(tmp_path)["starts"] == 1


def test_a_run_keeps_the_id_of_its_checkpoint_if_its_status_is_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole_runs.start(run, "num_steps=2")
    [saved] = {whole_runs.manifest_of(run, 2)["state"]["run"]["id"], status_of(run)["run_id"]}
    (run / STATUS_FILE).unlink()
    whole_runs.start(run, "num_steps=4")
    assert saved == status_of(run)["run_id"] == whole_runs.manifest_of(run, 4)["state"]["run"]["id"]
    whole_runs.start(tmp_path / "next", f"ckpt_load_path={run}", "num_steps=8")
    assert status_of(tmp_path / "next")["run_id"] != saved


def test_other_ranks_write_nothing_and_neither_does_a_start_that_never_began(tmp_path: Path) -> None:
    with RunStatusWriter(2, is_writer=False) as status:
        status.begin(tmp_path, at(0))
    with RunStatusWriter(2, is_writer=True):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start_and_a_line_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError) as refused:
        RunStatusWriter(2, is_writer=True).begin(tmp_path / "missing", at(0))
    assert refused.value.path == tmp_path / "missing" / "checkpoints"
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match="what matters"), RunStatusWriter(2, is_writer=True) as status:
        status.begin(run, at(0))
        shutil.rmtree(run)
        raise ValueError("what matters")
    assert STATUS_FILE in caplog.text


def test_a_start_that_was_taken_over_leaves_the_status_to_the_later_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="taken over"), RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(0))
        RunStatusWriter(2, is_writer=True).begin(tmp_path, at(3))
        raise CheckpointError("taken over")
    assert status_of(tmp_path)["status"] == "running" and counts_of(tmp_path) == (2, 1, 3)


def test_row_35_a_flipped_bit_of_the_status_is_logged_refuses_no_start_and_is_mended_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / STATUS_FILE
    with RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(0))
        content, before = path.read_bytes(), read_status(path)
        for index, byte in enumerate(content):
            path.write_bytes(content[:index] + bytes([byte ^ 1 << index % 8]) + content[index + 1 :])
            caplog.clear()
            found = read_status(path)
            assert found in (None, before) and len(caplog.messages) == (found is None)
        path.write_bytes(content.replace(b'"starts": 1', b'"starts": 3'))
        status.mark_training(TrainState(10, 10, 1, Progress(10, 10)), lambda: 10)
    assert status_of(tmp_path)["status"] == "finished" and counts_of(tmp_path) == (1, 0, 0)
