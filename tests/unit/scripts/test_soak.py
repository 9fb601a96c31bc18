"""soak.py: what is different at the end of two runs, and which promises are looked at after a kill."""

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
    run: Path, change: Callable[[torch.Tensor], object] = lambda _: None, loss: float = 3.0, **more: Any
) -> Path:
    """A run of two steps, as far as it is compared; `change` is made to the head in its last checkpoint."""
    save(run, 1)
    saved = tensors(2.0)
    change(saved["lm_head.weight"])
    save_checkpoint(checkpoint_path(run, 2), plan_save(saved), manifest_of(2, **more))
    (run / CHECKPOINTS / BEST).symlink_to("step_2_ckp")
    lines = ({"step": 1, "loss": 4.0}, {"step": 2, "loss": loss}, {"step": 2, "evaluation_loss": 5})
    (run / "logs").mkdir()
    (run / "logs" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_runs_differ_in_tensors_metrics_and_manifests(tmp_path: Path) -> None:
    reference = write_run(tmp_path / "reference")
    smallest = {"change": lambda head: head[3].mul_(1 + 2**-23)}
    changes: list[tuple[dict[str, Any], bool, list[str]]] = [
        *(({}, True, []), (smallest, True, ["lm_head.weight"]), (smallest, False, [])),
        ({"change": lambda head: head.fill_(torch.nan)}, False, ["lm_head.weight"]),
        ({"loss": 3.0000000001}, True, ["loss"]),
        ({"evaluation_loss": 2.5}, True, ["evaluation_loss", "evaluation_of_step"]),
        ({"skipped": [[3, 4]]}, True, ["data"]),
    ]
    for number, (change, exact, named) in enumerate(changes):
        run = write_run(tmp_path / str(number), **change)
        faults = soak.differences(reference, run, exact)
        assert len(faults) == len(named) and all(name in fault for name, fault in zip(named, faults, strict=True))
        remove_checkpoint(checkpoint_path(run, 2))
        assert len(soak.differences(reference, run, exact)) == 1


def test_checkpoints_are_sound_and_no_older_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "faults_of", lambda path: [])
    run = write_run(tmp_path / "run")
    soak.check_checkpoints(run, before=2)
    with pytest.raises(soak.Broken, match="step 3"):
        soak.check_checkpoints(run, before=3)
    remove_checkpoint(checkpoint_path(run, 2))
    with pytest.raises(soak.Broken, match="best points to"):
        soak.check_checkpoints(run, before=1)
    monkeypatch.setattr(soak, "faults_of", lambda path: [f"{path.name} is damaged"])
    with pytest.raises(soak.Broken, match="step_1_ckp is damaged"):
        soak.check_checkpoints(run, before=1)
