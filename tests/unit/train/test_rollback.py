from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from unit.checkpoint.examples import save

from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.retention import tidy_up
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, committed_checkpoints
from pretraining.train.rollback import _set_aside_since

pytestmark = pytest.mark.usefixtures("single_process")


def test_no_start_finds_what_is_set_aside_and_best_leads_to_one_that_is_left(tmp_path: Path) -> None:
    checkpoints = tmp_path / CHECKPOINTS
    for step, loss in ((2, 3.0), (4, 2.5), (6, 2.0)):
        tidy_up(tmp_path, save(tmp_path, step, evaluation_loss=loss), None)
    shutil.copytree(checkpoints / "step_6_ckp", checkpoints / "mine")  # a start would go on from a user's copy, too
    (checkpoints / "step_6_ckp" / MANIFEST).write_text("{")  # nor does it matter whether one can be read
    assert _set_aside_since(tmp_path, 5) == [checkpoints / "mine", checkpoints / "step_6_ckp"]
    assert [each.path.name for each in committed_checkpoints(tmp_path)] == ["step_2_ckp", "step_4_ckp"]
    assert {path.name for path in checkpoints.glob("set_aside_*/*")} == {"mine", "step_6_ckp"}
    assert (checkpoints / BEST).readlink() == Path("step_4_ckp")
    _set_aside_since(tmp_path, 1)
    assert not (checkpoints / BEST).is_symlink() and committed_checkpoints(tmp_path) == []
