from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import first_quick
from training_runs import events_of, write_two_datasets
from unit.checkpoint.examples import save
from unit.train.whole_runs import checkpoint, damage, diverging_after, equal, manifest_of, refusal, start, started_at

from pretraining.checkpoint.manager import CheckpointManager
from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.retention import apply_retention, set_aside_newer
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, committed_checkpoints
from pretraining.cli import main
from pretraining.train import run as run_module


@pytest.mark.usefixtures("single_process")
def test_no_start_finds_set_aside_checkpoints_and_best_links_to_a_remaining_one(tmp_path: Path) -> None:
    checkpoints = tmp_path / CHECKPOINTS
    for step, loss in ((2, 3.0), (4, 2.5), (6, 2.0)):
        apply_retention(tmp_path, save(tmp_path, step, evaluation_loss=loss), None)
    shutil.copytree(checkpoints / "step_6_ckp", checkpoints / "mine")  # a start would resume from a user's copy, too
    (checkpoints / "step_6_ckp" / MANIFEST).write_text("{")  # an unreadable one is set aside as well
    assert set_aside_newer(tmp_path, 5) == [checkpoints / "mine", checkpoints / "step_6_ckp"]
    assert [each.path.name for each in committed_checkpoints(tmp_path)] == ["step_2_ckp", "step_4_ckp"]
    assert {path.name for path in checkpoints.glob("set_aside_*/*")} == {"mine", "step_6_ckp"}
    assert (checkpoints / BEST).readlink() == Path("step_4_ckp")
    set_aside_newer(tmp_path, 1)
    assert not (checkpoints / BEST).is_symlink() and committed_checkpoints(tmp_path) == []


@pytest.mark.parametrize("load_path", [None, "its own"])
def test_a_run_that_diverges_before_its_first_checkpoint_starts_again_and_remembers_the_skipped_samples(
    load_path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    diverging_after(0, monkeypatch)
    flags = ["max_skipped_steps=2", "max_rollbacks=1", "checkpoint_interval=1"]
    start(whole, *flags, *([] if load_path is None else [f"ckpt_load_path={whole}"]))
    for step in (0, 4):
        assert manifest_of(whole, step)["data"]["skipped"] == [[0, 4]]
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    for step in range(1, 5):  # the state after a kill right after the rollback
        shutil.rmtree(checkpoint(again, step))
    start(again)
    assert started_at(again) == 0 and equal(checkpoint(again, 4), checkpoint(whole, 4))


def test_a_rollback_passes_over_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    diverging_after(2, monkeypatch, then=lambda: damage(checkpoint(run, 2)))
    start(run, "max_skipped_steps=2", "max_rollbacks=1", "checkpoint_interval=1")
    assert [manifest_of(run, step)["data"]["skipped"] != [] for step in range(1, 5)] == [True] * 4


def test_a_rollback_to_a_preemption_checkpoint_keeps_its_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    diverging_after(2, monkeypatch)
    flags = ["max_skipped_steps=2", "max_rollbacks=1", "preempt_interval=2"]
    start(run, *flags, f"ckpt_mirror_path=file://{store}")
    saved = [event for event in events_of(run) if event["event"] == "checkpoint"]
    assert [(each["step"], each["kind"]) for each in saved][:2] == [(2, "preempt"), (2, "preempt")]
    assert manifest_of(run, 4) == manifest_of(store, 4) and manifest_of(run, 4)["data"]["skipped"] != []


def test_row_54_inspect_stays_true_after_a_rollback_to_the_border_of_two_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """6 steps of weights 1:1 with 4 sequences, a resume with 3:1 and 8; steps 7 and 8 diverge."""
    data = [f"data_path={write_two_datasets(tmp_path / 'data')}", "sep_token=0", "logical_shards=8", "seq_length=16"]
    data += ["datasets=first,second", "checkpoint_interval=2"]
    run, sound = tmp_path / "run", tmp_path / "sound"
    changed = [*data, "weights=3,1", "global_batch_size=8", "num_steps=8"]
    start(run, *data, "weights=1,1", "global_batch_size=4", "num_steps=6")
    start(shutil.copytree(run, sound, symlinks=True), *changed)
    diverging_after(6, monkeypatch)
    start(run, *changed, "max_skipped_steps=2", "max_rollbacks=1")
    for step in (6, 8):
        state = manifest_of(run, step)["data"]
        assert state["skipped"] == [[24, 40]] and state["phases"][1]["first_sample"] == 24

    def slots(of: Path, step: int) -> list[dict[str, Any]]:
        capsys.readouterr()
        main(["inspect", f"ckpt_load_path={of}", f"step={step}", "json=true"])
        return [json.loads(line) | {"step": 0} for line in capsys.readouterr().out.splitlines()]

    assert slots(run, 7) == slots(sound, 9) and slots(run, 8) == slots(sound, 10)
    assert slots(run, 6) == slots(sound, 6)


STAGES = {
    "before a target is found": (run_module, "_rollback_from"),
    "before the target is saved again": (CheckpointManager, "save_now"),
    "before newer checkpoints are set aside": (run_module, "set_aside_newer"),
    "before training continues": (run_module, "_log_rollback"),
}
LIMIT = ["num_steps=6", "max_skipped_steps=2", "max_rollbacks=1", "checkpoint_interval=1"]


class KilledError(Exception):
    """A kill."""


@pytest.fixture(scope="module")
def not_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("not_killed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        diverging_after(2, patch)
        start(run, *LIMIT)
    return run


@pytest.mark.parametrize(
    "stage", first_quick("before newer checkpoints are set aside", *[each for each in STAGES if "newer" not in each])
)
def test_a_kill_within_a_rollback_loses_nothing_although_the_count_was_saved_at_its_limit(
    stage: str, not_killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        diverging_after(2, patch)
        patch.setattr(*STAGES[stage], kill)
        with pytest.raises(KilledError):
            start(run, *LIMIT)
    torch.distributed.destroy_process_group()  # which only the end of a process does after such an error
    if stage != "before training continues":
        assert manifest_of(run, 4)["state"]["guards"] == {"skipped_in_a_row": 2}
    start(run, *LIMIT)
    assert manifest_of(run, 6)["data"]["skipped"] == [[4, 8]]
    assert equal(checkpoint(run, 6), checkpoint(not_killed, 6))


def test_a_run_that_diverged_without_rollbacks_resumes_with_a_smaller_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["num_steps=6", "max_skipped_steps=2", "checkpoint_interval=1"]
    with monkeypatch.context() as patch:
        diverging_after(2, patch)
        refusal(tmp_path / "run", *flags)
    assert manifest_of(tmp_path / "run", 4)["state"]["guards"] == {"skipped_in_a_row": 2}
    start(tmp_path / "run", *flags, "learning_rate=1e-4")
    assert started_at(tmp_path / "run") == 4 and manifest_of(tmp_path / "run", 6)["data"]["skipped"] == []


def test_a_new_run_from_the_last_checkpoint_of_a_run_that_diverged_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["num_steps=6", "max_skipped_steps=2", "checkpoint_interval=1"]
    with monkeypatch.context() as patch:
        diverging_after(2, patch)
        refusal(tmp_path / "run", *flags)
    start(tmp_path / "new", *flags, f"ckpt_load_path={tmp_path / 'run'}", "learning_rate=1e-4", "max_rollbacks=1")
    assert started_at(tmp_path / "new") == 4 and manifest_of(tmp_path / "new", 6)["data"]["skipped"] == []
