"""Memory runs out on one rank of two."""

from __future__ import annotations

import json
from pathlib import Path

from guarded_runs import start_without_launcher
from helpers import PATIENCE_SECONDS


def test_the_rank_out_of_memory_prints_the_reason_and_its_peer_exits(data_path: Path, tmp_path: Path) -> None:
    flags = ["num_steps=6", "datasets=first", f"ckpt_save_path={tmp_path / 'run'}"]
    endings: dict[int, str] = {}
    for process in start_without_launcher(2, data_path, "memory_runs_out", flags):
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        found = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
        assert found, stderr
        endings |= {each["rank"]: each["error"] for each in found}
    assert endings[1].startswith("OutOfMemoryError: out of memory in step 3, at pretraining/model/llama.py:")
    assert "--batch_size=1" in endings[1] and "optimizer state" in endings[1]
    assert endings[0].startswith("LostPeerError: another process of the job exited")
