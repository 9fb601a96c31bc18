"""`pretrain doctor` over several processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked

WORKER = Path(__file__).with_name("doctor_worker.py")


@pytest.mark.thorough
def test_every_rank_is_measured_and_one_of_a_machine_tries_the_disk(tmp_path: Path) -> None:
    flags = ["--json", f"--disk_path={tmp_path}", "--disk_mib=1", "--message_mib=1", "--model_variant=tiny"]
    done = run_forked(WORKER, 3, [*flags, f"--ckpt_save_path={tmp_path}/run"], check=False)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    readings = [[reading["check"] for reading in rank["readings"]] for rank in found["ranks"]]
    for each in readings:
        assert {"matmul float32 128", "all-reduce", "all-reduce of 1 KiB", "messages to the next rank"} <= {*each}
    assert ["disk read" in each for each in readings] == [True, False, False]
    assert any(row["check"] == "saves" for row in found["rows"]) and not list(tmp_path.iterdir())
    assert done.returncode == (found["verdict"] == "bad") and "Traceback" not in done.stderr
