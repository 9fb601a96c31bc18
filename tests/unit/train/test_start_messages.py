"""What a start says about the model, the optimizer, and a start point that it does not take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from training_runs import VOCABULARY, write_dataset
from unit.train.whole_runs import refusal, start

from pretraining.checkpoint.run_folder import newest_run_path
from pretraining.cli import main


def test_the_header_names_the_family_and_its_switches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    start(tmp_path / "a", "model_variant=qwen3_0.6b", "head_dim=16", "dry_run=true")
    assert "model       qwen3, " in caplog.text and "qk_norm head, model_family qwen3" in caplog.text


def test_a_default_warm_up_of_another_system_fits_any_run_and_a_given_one_is_refused_by_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_dataset(tmp_path / "data" / "a")
    model = {"d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 64, "vocab_size": VOCABULARY, "max_seq_len": 256}
    guide = tmp_path / "guide.json"
    guide.write_text(json.dumps({**model, "num_epochs": 1, "use_amp": False, "batch_size": 8}))
    flags = [str(guide), f"--data_path={tmp_path / 'data'}", "--sep_token=0", "--logical_shards=8", "--run_steps=1"]
    main(["train", *flags, f"--ckpt_save_path={tmp_path / 'run'}"])
    length = int(re.findall(r"(\d+) steps, warm-up over the first", caplog.text)[0])
    assert f"warmup_steps is {length // 10}: the 1000 of another system's default" in caplog.text
    assert f"warmup_steps: {length // 10}\n" in (tmp_path / "run" / "config.yaml").read_text()
    guide.write_text(json.dumps({**model, "num_epochs": 1, "use_amp": False, "warmup_steps": 9999}))
    with pytest.raises(SystemExit) as error:
        main(["train", *flags, f"--ckpt_save_path={tmp_path / 'b'}"])
    assert f"{guide}: warmup_steps: 9999" in str(error.value.__context__)


def test_a_refused_start_is_no_run_to_go_on_with(tmp_path: Path) -> None:
    refusal(tmp_path / "runs" / "{timestamp}", "warmup_steps=2ep")
    pattern = str(tmp_path / "runs" / "{timestamp}")
    [refused] = (tmp_path / "runs").iterdir()
    assert newest_run_path(pattern) == pattern
    start(tmp_path / "runs" / "{timestamp}", "num_steps=1")
    assert len(list((tmp_path / "runs").iterdir())) == 2 and newest_run_path(pattern) != str(refused)


def test_the_factor_of_muons_updates_is_said_by_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An orthogonal update of an m x n matrix has 0.2 sqrt(max(m, n)) here, and sqrt(max(1, m / n)) in plain Muon."""
    caplog.set_level("INFO")
    start(tmp_path, "optimizer=muon", "intermediate_size=128", "dry_run=true")
    assert "updates of matrices are 1.13, 2.26 (down_proj) times as long as of plain Muon" in caplog.text
