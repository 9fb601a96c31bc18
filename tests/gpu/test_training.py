"""What only a GPU can show: bfloat16 training on it, memory and MFU in the reports, exact resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import TINY, losses_of

from pretraining.cli import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def start(run: Path, *flags: str) -> None:
    common = [flag for flag in TINY if not flag.startswith(("mixed_precision", *(f.partition("=")[0] for f in flags)))]
    main(["train", *common, "use_dummy_dataset=true", "num_steps=6", f"ckpt_save_path={run}", *flags])


def test_a_gpu_trains_in_bfloat16_and_reports_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "learning_rate=1e-2", "num_steps=40")
    out = capsys.readouterr().out
    assert "bfloat16, fsdp over 1 x cuda" in out and "matmul parameters" in out
    assert "MFU is the share of" in out or "no MFU: the peak of a NVIDIA" in out
    losses = losses_of(tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    last = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["memory_gib"] > 0 and last["memory_reserved_gib"] >= last["memory_allocated_gib"] > 0


def test_a_deterministic_run_on_a_gpu_resumes_bit_for_bit(tmp_path: Path) -> None:
    try:
        start(tmp_path / "whole", "deterministic=true")
        start(tmp_path / "stopped", "deterministic=true", "run_steps=3")
        start(tmp_path / "stopped", "deterministic=true")
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "stopped")
    for file in (tmp_path / "whole" / "checkpoints" / "step_6_ckp").glob("*.safetensors"):
        other = load_file(tmp_path / "stopped" / "checkpoints" / "step_6_ckp" / file.name)
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(file).items())
