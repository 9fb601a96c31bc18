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

from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.errors import CheckpointError, ConfigError, LostPeerError, Preempted
from pretraining.files import with_checksum
from pretraining.progress import Progress, TrainState
from pretraining.train.preemption import TIME_LIMIT, preemption_error
from pretraining.train.run_status import STATUS_FILE, RunStatus, RunStatusWriter, read_status


def everywhere(error: ConfigError) -> ConfigError:
    """Return an error as `join_processes` marks it when all ranks raise it."""
    error.is_everywhere = True
    return error


def requested_stop(stop: int) -> Preempted:
    """Return the error of a requested stop."""
    return preemption_error(stop, "at some step: and what comes next.")


def at(step: int, *, is_rewind: bool = False) -> CheckpointRef:
    """Return a start point at a step."""
    return CheckpointRef(Path("c"), manifest_of(step), is_rewind=is_rewind)


def start(
    run: Path, restored_step: int, reached: int | None, error: BaseException | None = None, limit: int = 2
) -> None:
    """Run a start that trains up to a step (None: not at all) and ends with an error, if any."""
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, RunStatusWriter(limit, is_writer=True) as status:
        status.begin(run, at(restored_step))
        if reached is not None:
            state = TrainState(10, 8, 1, Progress(restored_step, restored_step))
            status.mark_training(state)
            state.progress = Progress(reached, reached)
        if error is not None:
            raise error


def status_of(run: Path) -> dict[str, object]:
    document = json.loads((run / STATUS_FILE).read_text())
    return {name: value for name, value in document.items() if name not in ("updated", "checksum")}


@pytest.mark.parametrize(
    ("error", "reached", "status", "reason", "crashes"),
    [
        (None, 10, "finished", "10 of 10 steps are done", 0),
        (None, 8, "finished", "8 of 10 steps are done", 0),
        (requested_stop(signal.SIGTERM), 7, "preempted", "SIGTERM", 0),
        (requested_stop(signal.SIGTERM), None, "preempted", "SIGTERM", 0),
        (requested_stop(TIME_LIMIT), None, "preempted", "the time limit is near", 1),
        (requested_stop(TIME_LIMIT), 5, "preempted", "the time limit is near", 1),
        (requested_stop(TIME_LIMIT), 6, "preempted", "the time limit is near", 0),
        (KeyboardInterrupt(), 7, "failed", "KeyboardInterrupt", 0),
        (LostPeerError("another process has ended"), 7, "failed", "another process has ended", 1),
        (ValueError("nan"), 7, "failed", "ValueError: nan", 1),
        (MemoryError(), None, "failed", "MemoryError", 1),
        (everywhere(ConfigError("wrong flag")), None, "failed", "wrong flag", 0),
        (everywhere(ConfigError("disk full")), 7, "failed", "disk full", 1),
    ],
)
def test_an_end_is_written_down_and_counts_as_a_crash_where_it_is_one(
    tmp_path: Path, error: BaseException | None, reached: int | None, status: str, reason: str, crashes: int
) -> None:
    start(tmp_path, 5, reached, error)
    assert status_of(tmp_path) == {
        "status": status,
        "step": 5 if reached is None else reached,
        "reason": reason,
        "starts": 1,
        "starts_without_progress": crashes,
        "started_at_step": 5,
        "run_id": status_of(tmp_path)["run_id"],
    }
    assert {path.name for path in tmp_path.iterdir()} == {STATUS_FILE, "logs", "checkpoints"}


def test_a_crash_loop_is_refused_with_a_remedy(tmp_path: Path) -> None:
    start(tmp_path, 0, 4, ValueError("the loss is no number"))
    start(tmp_path, 3, 4, ValueError("the loss is no number"))  # there is a new checkpoint
    start(tmp_path, 3, 4, ValueError("the loss is no number"))
    before = status_of(tmp_path)
    with pytest.raises(CheckpointError, match="ValueError: the loss is no number") as refused:
        start(tmp_path, 3, None)
    assert "max_starts_without_progress" in refused.value.settings
    assert status_of(tmp_path) == before
    start(tmp_path, 3, 4, ValueError("still"), limit=0)
    assert status_of(tmp_path)["starts_without_progress"] == 3
    start(tmp_path, 3, 10, limit=4)
    assert (status_of(tmp_path)["starts"], status_of(tmp_path)["starts_without_progress"]) == (5, 3)


def test_a_rewind_resets_the_count_once(tmp_path: Path) -> None:
    start(tmp_path, 200, 204, ValueError("nan"))
    for crashes in (1, 2):
        with pytest.raises(ValueError), RunStatusWriter(2, is_writer=True) as status:
            status.begin(tmp_path, at(100, is_rewind=True))
            raise ValueError
        assert status_of(tmp_path)["starts_without_progress"] == crashes
    with pytest.raises(CheckpointError), RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(100, is_rewind=True))


def test_a_run_whose_time_is_too_short_for_a_start_is_not_started_for_ever(tmp_path: Path) -> None:
    start(tmp_path, 3, None, requested_stop(TIME_LIMIT))
    start(tmp_path, 3, None, requested_stop(signal.SIGTERM))  # a preemption for another job does not count
    start(tmp_path, 3, None, requested_stop(TIME_LIMIT))
    with pytest.raises(CheckpointError) as refused:
        start(tmp_path, 3, None)
    assert "time_limit" in refused.value.settings
    start(tmp_path, 3, 6, requested_stop(TIME_LIMIT), limit=0)
    assert status_of(tmp_path)["starts_without_progress"] == 2
    start(tmp_path, 6, None, requested_stop(TIME_LIMIT))  # from the checkpoint of the previous start
    assert status_of(tmp_path)["starts_without_progress"] == 1


def test_a_start_with_a_damaged_checkpoint_counts_once_from_the_checkpoint_that_it_uses(tmp_path: Path) -> None:
    start(tmp_path, 4, 6, ValueError("the loss is no number"))
    with pytest.raises(ValueError), RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(6))
        assert (status_of(tmp_path)["started_at_step"], status_of(tmp_path)["starts_without_progress"]) == (6, 1)
        status.begin(tmp_path, at(4))
        assert (status_of(tmp_path)["started_at_step"], status_of(tmp_path)["starts_without_progress"]) == (4, 2)
        raise ValueError
    assert status_of(tmp_path)["step"] == 4 and status_of(tmp_path)["starts"] == 2
    before = status_of(tmp_path)
    with pytest.raises(CheckpointError), RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(6))
        status.begin(tmp_path, at(4))
    assert status_of(tmp_path) == before


@pytest.mark.parametrize("text", [None, "", "[]", '{"status": "running"}'])
def test_a_file_that_says_nothing_keeps_no_run_from_starting(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / STATUS_FILE).write_text(text)
    assert read_status(tmp_path / STATUS_FILE) is None
    start(tmp_path, 0, 10)
    assert status_of(tmp_path)["starts"] == 1


def test_a_run_gets_an_id_at_its_first_start_and_keeps_it(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    start(tmp_path / "a", 0, 10)
    first = status_of(tmp_path / "a")["run_id"]
    assert re.fullmatch(r"[0-9a-f]{16}", str(first))
    start(tmp_path / "a", 10, None, ValueError())
    assert status_of(tmp_path / "a")["run_id"] == first
    start(tmp_path / "b", 0, 10)
    assert status_of(tmp_path / "b")["run_id"] != first


def test_a_run_keeps_the_id_of_its_checkpoint_if_its_status_is_lost_or_older(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole_runs.start(run, "num_steps=2")
    [saved] = {whole_runs.manifest_of(run, 2)["state"]["run"]["id"], status_of(run)["run_id"]}
    (run / STATUS_FILE).unlink()
    whole_runs.start(run, "num_steps=4")
    assert saved == status_of(run)["run_id"] == whole_runs.manifest_of(run, 4)["state"]["run"]["id"]
    document = json.loads((run / STATUS_FILE).read_text())
    older = {name: value for name, value in document.items() if name not in ("run_id", "checksum")}
    (run / STATUS_FILE).write_text(json.dumps(with_checksum(older)))
    assert read_status(run / STATUS_FILE) == RunStatus(**older)
    whole_runs.start(run, "num_steps=6")
    assert status_of(run)["run_id"] == saved and status_of(run)["starts"] == 2
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
    assert refused.value.path == tmp_path / "missing"
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match="what matters"), RunStatusWriter(2, is_writer=True) as status:
        status.begin(run, at(0))
        shutil.rmtree(run)
        raise ValueError("what matters")
    assert STATUS_FILE in caplog.text


def test_a_start_that_was_taken_over_leaves_the_word_to_the_later_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="taken over"), RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(0))
        RunStatusWriter(2, is_writer=True).begin(tmp_path, at(3))
        raise CheckpointError("taken over")
    assert (status_of(tmp_path)["status"], status_of(tmp_path)["starts"]) == ("running", 2)


def test_a_flipped_bit_of_the_status_is_logged_and_refuses_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunStatusWriter(5, is_writer=True).begin(tmp_path, at(5))
    path = tmp_path / STATUS_FILE
    content = path.read_bytes()
    before = read_status(path)
    for index, byte in enumerate(content):
        path.write_bytes(content[:index] + bytes([byte ^ 1 << index % 8]) + content[index + 1 :])
        caplog.clear()
        status = read_status(path)
        assert status in (None, before)
        assert len(caplog.messages) == (status is None)


def test_a_flipped_bit_while_a_run_trains_is_mended_at_its_end(tmp_path: Path) -> None:
    with RunStatusWriter(2, is_writer=True) as status:
        status.begin(tmp_path, at(0))
        text = (tmp_path / STATUS_FILE).read_text()
        (tmp_path / STATUS_FILE).write_text(text.replace('"starts": 1', '"starts": 3'))
        status.mark_training(TrainState(10, 10, 1, Progress(10, 10)))
    assert (status_of(tmp_path)["status"], status_of(tmp_path)["starts"]) == ("finished", 1)
