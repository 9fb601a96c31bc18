from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from unit.checkpoint.examples import manifest_of, save, tensors

from pretraining.checkpoint.manifest import EVALUATION_STATE, MANIFEST
from pretraining.checkpoint.run_folder import (
    checkpoint_path,
    find_run_folder,
    folders_of,
    make_run_path,
    newest_run_path,
)
from pretraining.checkpoint.writer import plan_save, save_checkpoint
from pretraining.config.command_line import load_train_config
from pretraining.config.recipes import dump_config
from pretraining.config.training import TrainConfig
from pretraining.errors import CheckpointError
from pretraining.progress import PENDING_EVALUATION

NOW = datetime(2026, 11, 21, 14, 30, 5, tzinfo=UTC)


def config_of(path: Path, *flags: str) -> TrainConfig:
    return load_train_config([f"ckpt_save_path={path}", "use_dummy_dataset=true", "model_variant=7b", *flags])


def start(path: Path, *flags: str, now: datetime = NOW) -> Path:
    """Find or make the folder as a start does, and write the settings there."""
    config = config_of(path, *flags)
    found = find_run_folder(config)
    if found != str(path):
        return Path(str(found))
    made = make_run_path(str(path), now)
    assert made is not None
    (Path(made) / "config.yaml").write_text(dump_config(config))
    return Path(made)


def later(minutes: int) -> datetime:
    return NOW.replace(minute=30 + minutes)


def test_a_restart_with_the_same_settings_finds_its_folder_with_or_without_a_checkpoint(tmp_path: Path) -> None:
    pattern = tmp_path / "[try].{timestamp}"
    first = start(pattern, "seed=1")
    assert first == tmp_path / "[try].20261121-143005" and start(pattern, "seed=1", now=later(1)) == first
    for flag in (
        "run_steps=5",
        "max_starts_without_progress=0",
        "time_limit=30min",
    ):  # the last two are remedies of a crash loop
        assert start(pattern, "seed=1", flag, now=later(2)) == first
    (first / "checkpoints" / "step_5_ckp").mkdir(parents=True)
    assert start(pattern, "seed=1", now=later(3)) == first


@pytest.mark.usefixtures("single_process")
def test_runs_with_other_settings_do_not_meet_and_each_finds_its_own(tmp_path: Path) -> None:
    pattern = tmp_path / "{timestamp}" / "run"
    first, second = start(pattern, "seed=1"), start(pattern, "seed=2")
    assert second.parent.name == "20261121-143006"  # not in the same second
    save(first, 5)
    save(second, 7)
    assert start(pattern, "seed=1", now=later(1)) == first
    assert start(pattern, "seed=2", now=later(1)) == second
    assert start(pattern, "seed=3", now=later(1)).parent.name == "20261121-143105"


def test_a_dimension_that_is_left_open_is_not_that_of_another_run(tmp_path: Path) -> None:
    pattern = tmp_path / "try.{timestamp}"
    first = start(pattern, "model_variant=tiny", "num_hidden_layers=2")
    assert start(pattern, "model_variant=tiny", now=later(1)) != first
    assert start(pattern, "model_variant=tiny", "num_hidden_layers=2", now=later(2)) == first


@pytest.mark.usefixtures("single_process")
def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    pattern = tmp_path / "try.{timestamp}"
    first = start(pattern)
    save(first, 5)
    manifest = replace(manifest_of(9, kind="final"), state={EVALUATION_STATE: {PENDING_EVALUATION: True}})
    save_checkpoint(checkpoint_path(first, 9), plan_save(tensors(9.0)), manifest)
    assert start(pattern, now=later(1)) == first  # it was stopped before its last evaluation
    save(first, 9, kind="final")
    second = start(pattern, now=later(1))
    assert second != first
    assert newest_run_path(str(pattern)) == str(second)
    (save(first, 9) / MANIFEST).write_text("{")  # the damaged one is skipped, so the run is not finished
    (second / "config.yaml").unlink()
    assert start(pattern, now=later(2)) == first


def test_a_path_without_timestamp_is_unchanged_and_other_folders_match_no_pattern(tmp_path: Path) -> None:
    assert make_run_path(str(tmp_path / "run")) == str(tmp_path / "run") and not (tmp_path / "run").exists()
    assert newest_run_path("runs/a") == "runs/a"
    for name in ("try.20261121-14300", "try.20261121-143005.old", "try.latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "try.20261121-143006").touch()
    assert folders_of(str(tmp_path / "try.{timestamp}")) == []
    assert newest_run_path(str(tmp_path / "try.{timestamp}")) == str(tmp_path / "try.{timestamp}")


def test_a_relative_path_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = start(Path("./runs/../runs/try.{timestamp}"))
    assert start(Path("./runs/../runs/try.{timestamp}"), now=later(1)) == first


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as refused:
        make_run_path(str(tmp_path / "file" / "{timestamp}"), NOW)
    assert refused.value.path == tmp_path / "file" / "20261121-143005"
