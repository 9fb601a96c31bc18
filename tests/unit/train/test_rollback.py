from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from unit.checkpoint.examples import save

from pretraining.checkpoint.manifest import BEST, CHECKPOINTS, MANIFEST, committed_checkpoints
from pretraining.checkpoint.retention import tidy_up
from pretraining.errors import CheckpointError
from pretraining.train.rollback import _drop_checkpoints

pytestmark = pytest.mark.usefixtures("single_process")


def run_with_losses(run: Path, losses: dict[int, float | None]) -> Path:
    """A run with a checkpoint a step; returns its link to the best."""
    for step, loss in losses.items():
        tidy_up(run, save(run, step, evaluation_loss=loss), None)
    return run / CHECKPOINTS / BEST


def test_checkpoints_since_a_step_are_given_up_and_best_leads_to_one_that_is_left(tmp_path: Path) -> None:
    best = run_with_losses(tmp_path, {2: 3.0, 4: 2.5, 6: 2.0})
    assert best.readlink() == Path("step_6_ckp")
    dropped = _drop_checkpoints(tmp_path, 5)
    assert [path.name for path in dropped] == ["step_6_ckp"]
    assert [path.name for path in committed_checkpoints(tmp_path)] == ["step_2_ckp", "step_4_ckp"]
    assert best.readlink() == Path("step_4_ckp")


def test_a_users_copy_is_never_renamed_and_a_start_from_it_is_refused(tmp_path: Path) -> None:
    run_with_losses(tmp_path, {2: 3.0, 6: 2.0})
    copy = shutil.copytree(tmp_path / CHECKPOINTS / "step_6_ckp", tmp_path / CHECKPOINTS / "mine")
    with pytest.raises(CheckpointError, match=r"go back to before step 5, but would go on from .*mine, which was"):
        _drop_checkpoints(tmp_path, 5)
    shutil.rmtree(copy)
    (tmp_path / CHECKPOINTS / "step_6_ckp" / MANIFEST).write_text("{")
    assert [path.name for path in _drop_checkpoints(tmp_path, 5)] == ["step_6_ckp"]


def test_where_nothing_good_is_left_there_is_no_best(tmp_path: Path) -> None:
    best = run_with_losses(tmp_path, {6: 2.0})
    _drop_checkpoints(tmp_path, 1)
    assert not best.is_symlink() and committed_checkpoints(tmp_path) == []
