"""What only a GPU can show: bfloat16 training on it, memory and MFU in the reports, exact resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_command
from safetensors.torch import load_file
from training_runs import TINY, losses_of

from pretraining.cli import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def settings(run: Path, *flags: str) -> list[str]:
    common = [flag for flag in TINY if not flag.startswith("mixed_precision")]
    names = {flag.partition("=")[0] for flag in flags}
    own = [flag for flag in (*common, "num_steps=6") if flag.partition("=")[0] not in names]
    return [*own, "use_dummy_dataset=true", f"ckpt_save_path={run}", *flags]


def test_a_gpu_trains_in_bfloat16_and_reports_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", *settings(tmp_path, "learning_rate=1e-2", "num_steps=40")])
    out = capsys.readouterr().out
    assert "bfloat16, fsdp over 1 x cuda" in out and "FLOPs " in out
    assert "MFU is the share of" in out or "no MFU: the peak of a NVIDIA" in out
    losses = losses_of(tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    last = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["memory_gib"] > 0 and last["memory_reserved_gib"] >= last["memory_allocated_gib"] > 0


def test_a_deterministic_run_on_a_gpu_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Each start in a process of its own: PyTorch asks once a process whether cuBLAS may be called so."""
    for run, *more in (("whole",), ("stopped", "run_steps=3"), ("stopped",)):
        flags = settings(tmp_path / run, "deterministic=true", *more)
        run_command([sys.executable, ROOT / "main_training.py", *flags])
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "stopped")
    for file in (tmp_path / "whole" / "checkpoints" / "step_6_ckp").glob("*.safetensors"):
        other = load_file(tmp_path / "stopped" / "checkpoints" / "step_6_ckp" / file.name)
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(file).items())
