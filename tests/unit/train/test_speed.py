"""Runs on dummy data measure speed, and save nothing unless a folder is given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from training_runs import TINY

from pretraining import DataConfig, TrainConfig, Trainer
from pretraining.cli import main
from pretraining.config.read import load_train_config
from pretraining.errors import CheckpointError

DUMMY = ["use_dummy_dataset=true", "num_steps=8"]
WITHOUT_TRACKER = [flag for flag in TINY if not flag.startswith("tracker")]
SPEED = re.compile(
    r"^speed +[\d.]+ s/step, the median of (\d+) reports; [\d,]+ tokens/s per process, [\d,]+ in all; no MFU.* peak ",
    re.M,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_made_up_data_is_measured_each_time_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], [], ["held_out_fraction=0.5", "eval_interval=1", "eval_batches=1"], ["ckpt_save_path=none"]):
        main(["train", *WITHOUT_TRACKER, *DUMMY, *flags])
        out = capsys.readouterr().out
        assert (found := SPEED.search(out)) is not None and found[1] == "7", out
    assert not list(folder.iterdir())


def test_an_explicit_folder_wins_and_trackers_may_have_one_of_their_own(folder: Path) -> None:
    main(["train", *WITHOUT_TRACKER, *DUMMY, "ckpt_save_path=run"])
    assert (folder / "run" / "checkpoints" / "step_8_ckp").is_dir()
    main(["train", *WITHOUT_TRACKER, *DUMMY, "tracker=tensorboard", "tracker_dir=curves"])
    assert len(list((folder / "curves").glob("*/events.*"))) == 1
    assert {path.name for path in folder.iterdir()} == {"run", "curves"}


def test_in_python_a_run_without_a_folder_has_no_paths(folder: Path) -> None:
    assert Trainer(TrainConfig(data=DataConfig(use_dummy_dataset=True))).config.checkpoint.ckpt_save_path is None
    trainer = Trainer(load_train_config([*WITHOUT_TRACKER, *DUMMY]))
    result = trainer.train()
    assert (result.status, result.step) == ("finished", 8)
    assert (result.run_path, result.checkpoint, result.metrics_file) == (None, None, None)
    with pytest.raises(CheckpointError, match="ckpt_save_path=None"):
        trainer.evaluate()
    assert not list(folder.iterdir())
