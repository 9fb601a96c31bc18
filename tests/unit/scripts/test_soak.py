"""soak.py: what is different at the end of two runs, what a kill has hit, and which promises are looked at after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.checkpoint.examples import manifest_of, save, tensors

from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, checkpoint_path
from pretraining.checkpoint.writer import plan_save, remove_checkpoint, save_checkpoint
from scripts import soak

pytestmark = pytest.mark.usefixtures("single_process")


def write_run(
    run: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None, loss: float = 3.0, **more: Any
) -> Path:
    """A run of two steps, as far as it is compared; `change` is made to what its last checkpoint holds."""
    save(run, 1)
    saved = tensors(2.0)
    change(saved)
    save_checkpoint(checkpoint_path(run, 2), plan_save(saved), manifest_of(2, **more))
    (run / CHECKPOINTS / BEST).symlink_to("step_2_ckp")
    lines = ({"step": 1, "loss": 4.0}, {"step": 2, "loss": loss}, {"step": 2, "evaluation_loss": 5})
    (run / "logs").mkdir()
    (run / "logs" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_runs_differ_in_tensors_metrics_manifests_and_checkpoints(tmp_path: Path) -> None:
    reference = write_run(tmp_path / "a")
    smallest = write_run(tmp_path / "b", lambda saved: saved["lm_head.weight"][3].mul_(1 + 2**-23))
    other = write_run(tmp_path / "c", lambda saved: saved["lm_head.weight"].fill_(float("nan")))
    assert soak.differences(reference, write_run(tmp_path / "same")) == []
    for run, exact, count in ((smallest, True, 1), (smallest, False, 0), (other, True, 1), (other, False, 1)):
        assert len(soak.differences(reference, run, exact)) == count
    for name, run in (
        ("loss", write_run(tmp_path / "d", loss=3.0000000001)),
        ("evaluation_loss", write_run(tmp_path / "e", evaluation_loss=2.5)),
        ("data", write_run(tmp_path / "g", skipped=[[3, 4]])),
    ):
        [found] = soak.differences(reference, run)
        assert name in found
    remove_checkpoint(checkpoint_path(smallest, 2))
    assert len(soak.differences(reference, smallest)) == 1


def test_after_a_kill_every_checkpoint_must_be_sound_best_lead_to_one_and_the_newest_be_no_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "faults_of", lambda path: [])
    run = write_run(tmp_path / "run")
    soak.check_checkpoints(run, before=2)
    with pytest.raises(soak.Broken, match="step 3"):
        soak.check_checkpoints(run, before=3)
    remove_checkpoint(checkpoint_path(run, 2))
    with pytest.raises(soak.Broken, match="best leads to"):
        soak.check_checkpoints(run, before=1)
    monkeypatch.setattr(soak, "faults_of", lambda path: [f"{path.name} is damaged"])
    with pytest.raises(soak.Broken, match="step_1_ckp is damaged"):
        soak.check_checkpoints(run, before=1)
