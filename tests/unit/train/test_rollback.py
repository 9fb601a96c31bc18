from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from unit.checkpoint.examples import save

from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.retention import give_up, tidy_up
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, committed_checkpoints
from pretraining.errors import CheckpointError
from pretraining.train.rollback import _checkpoints_since

pytestmark = pytest.mark.usefixtures("single_process")


def test_checkpoints_since_a_step_are_given_up_and_best_leads_to_one_that_is_left(tmp_path: Path) -> None:
    best = tmp_path / CHECKPOINTS / BEST
    for step, loss in ((2, 3.0), (4, 2.5), (6, 2.0)):
        tidy_up(tmp_path, save(tmp_path, step, evaluation_loss=loss), None)
    (tmp_path / CHECKPOINTS / "step_6_ckp" / MANIFEST).write_text("{")  # also where nobody can read it
    give_up(tmp_path, _checkpoints_since(tmp_path, 5))
    assert [each.path.name for each in committed_checkpoints(tmp_path)] == ["step_2_ckp", "step_4_ckp"]
    assert best.readlink() == Path("step_4_ckp")
    give_up(tmp_path, _checkpoints_since(tmp_path, 1))
    assert not best.is_symlink() and committed_checkpoints(tmp_path) == []


def test_a_users_copy_is_never_renamed_and_a_start_from_it_is_refused(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 6), tmp_path / CHECKPOINTS / "mine")
    with pytest.raises(CheckpointError, match="mine"):
        _checkpoints_since(tmp_path, 5)
