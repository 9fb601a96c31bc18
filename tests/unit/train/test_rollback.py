from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from unit.checkpoint.examples import save
from unit.train.whole_runs import checkpoint, equal, manifest_of, start, started_at

from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.retention import tidy_up
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, committed_checkpoints
from pretraining.train import rollback
from pretraining.train.loop import Run, train_loop
from pretraining.train.rollback import _set_aside_from


@pytest.mark.usefixtures("single_process")
def test_no_start_finds_what_is_set_aside_and_best_leads_to_one_that_is_left(tmp_path: Path) -> None:
    checkpoints = tmp_path / CHECKPOINTS
    for step, loss in ((2, 3.0), (4, 2.5), (6, 2.0)):
        tidy_up(tmp_path, save(tmp_path, step, evaluation_loss=loss), None)
    shutil.copytree(checkpoints / "step_6_ckp", checkpoints / "mine")  # a start would go on from a user's copy, too
    (checkpoints / "step_6_ckp" / MANIFEST).write_text("{")  # nor does it matter whether one can be read
    assert _set_aside_from(tmp_path, 5, None) == [checkpoints / "mine", checkpoints / "step_6_ckp"]
    assert [each.path.name for each in committed_checkpoints(tmp_path)] == ["step_2_ckp", "step_4_ckp"]
    assert {path.name for path in checkpoints.glob("set_aside_*/*")} == {"mine", "step_6_ckp"}
    assert (checkpoints / BEST).readlink() == Path("step_4_ckp")
    _set_aside_from(tmp_path, 1, None)
    assert not (checkpoints / BEST).is_symlink() and committed_checkpoints(tmp_path) == []


def test_a_run_that_diverges_before_its_first_checkpoint_begins_again_and_keeps_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []

    def diverge_at_first(run: Run) -> None:
        if not runs:
            run.context.model.module.register_forward_hook(
                lambda module, inputs, output: output._replace(objective_sum=output.objective_sum * torch.nan)
            )
        runs.append(run)
        train_loop(run)

    monkeypatch.setattr(rollback, "train_loop", diverge_at_first)
    whole = tmp_path / "whole"
    start(whole, "max_skipped_steps=2", "max_rollbacks=1", "checkpoint_interval=1")
    for step in (0, 4):
        assert manifest_of(whole, step)["data"]["skipped"] == [[0, 4]]
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    for step in range(1, 5):  # as a kill leaves it that comes right after the rollback
        shutil.rmtree(checkpoint(again, step))
    start(again)
    assert started_at(again) == 0 and equal(checkpoint(again, 4), checkpoint(whole, 4))
