from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from unit.checkpoint.examples import save

from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.retention import tidy_up
from pretraining.checkpoint.rollback_file import ROLLBACK_FILE, Rollback, read_rollback, write_rollback
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, committed_checkpoints
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError
from pretraining.train.rollback import _drop_checkpoints, _roll_back, finish_rollback

pytestmark = pytest.mark.usefixtures("single_process")


def since(step: int) -> Rollback:
    return Rollback(step, ((8, 12),))


def run_with_losses(run: Path, losses: dict[int, float | None]) -> Path:
    """A run with a checkpoint a step; returns its link to the best."""
    for step, loss in losses.items():
        tidy_up(run, save(run, step, evaluation_loss=loss), None)
    return run / CHECKPOINTS / BEST


def test_checkpoints_since_a_step_are_given_up_and_best_leads_to_one_that_is_left(tmp_path: Path) -> None:
    best = run_with_losses(tmp_path, {2: 3.0, 4: 2.5, 6: 2.0})
    assert best.readlink() == Path("step_6_ckp")
    dropped = _drop_checkpoints(tmp_path, since(5))
    assert [path.name for path in dropped] == ["step_6_ckp"]
    assert [each.path.name for each in committed_checkpoints(tmp_path)] == ["step_2_ckp", "step_4_ckp"]
    assert best.readlink() == Path("step_4_ckp")


def test_a_users_copy_is_never_renamed_and_a_start_from_it_is_refused(tmp_path: Path) -> None:
    run_with_losses(tmp_path, {2: 3.0, 6: 2.0})
    copy = shutil.copytree(tmp_path / CHECKPOINTS / "step_6_ckp", tmp_path / CHECKPOINTS / "mine")
    with pytest.raises(CheckpointError, match="mine"):
        _drop_checkpoints(tmp_path, since(5))
    shutil.rmtree(copy)
    (tmp_path / CHECKPOINTS / "step_6_ckp" / MANIFEST).write_text("{")
    assert [path.name for path in _drop_checkpoints(tmp_path, since(5))] == ["step_6_ckp"]


def test_where_nothing_good_is_left_there_is_no_best(tmp_path: Path) -> None:
    best = run_with_losses(tmp_path, {6: 2.0})
    _drop_checkpoints(tmp_path, since(1))
    assert not best.is_symlink() and committed_checkpoints(tmp_path) == []


def test_what_leaves_the_samples_out_already_stays_and_rollback_json_goes(tmp_path: Path) -> None:
    write_rollback(tmp_path, since(5))
    tidy_up(tmp_path, save(tmp_path, 4), None)
    assert read_rollback(tmp_path) == since(5)
    after = save(tmp_path, 6, skipped=[(0, 2), (8, 20)])
    assert _drop_checkpoints(tmp_path, since(5)) == []
    tidy_up(tmp_path, after, None)  # as at a start: a kill came between the commit and this
    assert not (tmp_path / ROLLBACK_FILE).exists() and len(committed_checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("content", ["", "{}", '{"first_step": 5, "samples": [[8, 13]], "checksum": "00000000"}'])
def test_a_damaged_rollback_json_is_said_once_and_refuses_no_start(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ROLLBACK_FILE).write_text(content)
    for _ in range(2):
        assert finish_rollback(CheckpointConfig(ckpt_save_path=str(tmp_path))) == ()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "--skip_samples" in said and "events.jsonl" in said


def test_a_rollback_that_cannot_be_kept_gives_nothing_up(tmp_path: Path) -> None:
    run_with_losses(tmp_path, {6: 2.0})
    (tmp_path / ROLLBACK_FILE).mkdir()
    with pytest.raises(CheckpointError) as refused:
        _roll_back(tmp_path, since(5))
    assert refused.value.path == tmp_path
    assert len(committed_checkpoints(tmp_path)) == 1
