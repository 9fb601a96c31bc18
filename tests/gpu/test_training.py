"""What only a GPU can show: bfloat16 training on it, memory and MFU in the reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
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
    assert "MFU is relative to" in out or "no MFU: the peak of a NVIDIA" in out
    losses = losses_of(tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    last = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["memory_gib"] > 0 and last["memory_reserved_gib"] >= last["memory_allocated_gib"] > 0
