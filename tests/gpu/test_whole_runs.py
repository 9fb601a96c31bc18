"""What a run does besides its steps, on a GPU: it evaluates, samples, saves meanwhile, goes back, is one of two."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.test_training import settings
from helpers import ROOT, run_command
from training_runs import assert_same_tensors, events_of, losses_of, write_dataset

from pretraining.cli import main
from pretraining.train import run as run_module
from pretraining.train.loop import Run, train_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_text_is_trained_on_evaluated_and_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"number {number} comes before number {number + 1}. " * 20)
    text, data = f"--input_path={tmp_path / 'text'}", tmp_path / "data"
    main(["prepare", text, "--dataset=counting", f"--output_path={data}", "--vocab_size=300"])
    read = [f"--data_path={data}", f"--tokenizer_path={data}", "--sep_token=0", "--held_out_fraction=0.2"]
    flags = [*settings(tmp_path / "run", "vocab_size=384", "eval_interval=3", "sample_tokens=8"), *read]
    main(["train", *(flag for flag in flags if flag != "use_dummy_dataset=true")])
    reports = [json.loads(line) for line in (tmp_path / "run" / "logs" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [report["evaluation_loss"] for report in reports if "evaluation_loss" in report]
    assert len(evaluations) == 2 and evaluations[1] < evaluations[0]
    assert "generated text:" in capsys.readouterr().out


def test_a_save_beside_the_training_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Each start in a process of its own: PyTorch asks once a process whether cuBLAS may be called so."""
    for run, *more in (("whole",), ("stopped", "run_steps=3"), ("stopped",)):
        flags = ["deterministic=true", "async_save=true", "checkpoint_interval=2", *more]
        run_command([sys.executable, ROOT / "main_training.py", *settings(tmp_path / run, *flags)])
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "stopped")
    assert_same_tensors(*(tmp_path / run / "checkpoints" / "step_6_ckp" for run in ("stopped", "whole")))
    saved = {path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step_*")}
    assert saved == {"step_2_ckp", "step_3_ckp", "step_4_ckp", "step_6_ckp"}


def test_a_diverging_run_rolls_back_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Run] = []

    def poisoned(run: Run) -> None:
        def spoil(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            late = run.state.step >= 4 and torch.is_grad_enabled()
            return output._replace(objective_sum=output.objective_sum + torch.nan) if late else output

        if not starts:
            run.context.model.module.register_forward_hook(spoil)
        starts.append(run)
        train_loop(run)

    monkeypatch.setattr(run_module, "train_loop", poisoned)
    guards = ["max_skipped_steps=2", "max_rollbacks=1", "checkpoint_interval=2", "num_steps=8"]
    main(["train", *settings(tmp_path, *guards)])
    (went_back,) = (event for event in events_of(tmp_path) if event["event"] == "rollback")
    assert went_back["first_step"] == 5 and len(starts) == 2
    assert (tmp_path / "checkpoints" / "step_8_ckp").is_dir()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2"])
def test_two_gpus_train_as_one_does(strategy: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data" / "texts")
    data = [f"data_path={tmp_path / 'data'}", "use_dummy_dataset=false", "sep_token=0", "global_batch_size=8"]
    for processes in (1, 2):
        flags = settings(tmp_path / str(processes), f"sharding_strategy={strategy}", *data)
        torchrun: list[str | Path] = [
            sys.executable,
            ROOT / "scripts" / "torchrun.py",
            "--standalone",
            f"--nproc-per-node={processes}",
        ]
        run_command([*torchrun, ROOT / "main_training.py", *flags])
    assert losses_of(tmp_path / "2") == pytest.approx(losses_of(tmp_path / "1"), rel=1e-2)
