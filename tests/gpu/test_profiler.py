"""Profiles and snapshots of memory that only a GPU can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_runs import TINY

from pretraining.cli import main
from pretraining.train import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def start(run: Path, *flags: str) -> None:
    main(["train", *TINY, "use_dummy_dataset=true", "num_steps=6", f"ckpt_save_path={run}", *flags])


def test_a_profile_counts_kernels_and_writes_a_snapshot_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, "use_profiler=true", "profile_steps=4-5", "memory_snapshot=true")
    assert {path.name for path in (tmp_path / "profile_traces").iterdir()} == {
        "steps_4-5_rank0.pt.trace.json.gz",
        "steps_4-5_rank0.memory.pickle",
    }
    out = capsys.readouterr().out
    assert "profile of steps 4-5: " in out and "Self CUDA time total: " in out


def test_out_of_memory_names_the_parts_and_writes_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*arguments: object) -> None:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(loop, "train_step", too_large)
    with pytest.raises(SystemExit) as ending:
        start(tmp_path)
    dist.destroy_process_group()
    said = capsys.readouterr().err
    assert ending.value.code == 1 and "out of memory in step 1" in said and "held by PyTorch's allocator" in said
    assert (tmp_path / "profile_traces" / "out_of_memory_rank0.memory.pickle").stat().st_size > 0
