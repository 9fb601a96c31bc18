"""`pretrain doctor` over several processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked

WORKER = Path(__file__).with_name("doctor_worker.py")


@pytest.mark.thorough
def test_every_rank_is_measured_and_one_of_a_machine_tries_the_disk(tmp_path: Path) -> None:
    done = run_forked(WORKER, 3, ["--json", f"--disk_path={tmp_path}", f"--ckpt_save_path={tmp_path}/run"], check=False)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    speeds = [rank["speeds"] for rank in found["ranks"]]
    assert all("all-reduce, GiB/s of bus" in each and any("matmul" in check for check in each) for each in speeds)
    for check in ("disk_path, GiB/s read", "ckpt_save_path, GiB/s written"):
        assert [check in each for each in speeds] == [True, False, False]
    assert done.returncode == 0 and "Traceback" not in done.stderr and not list(tmp_path.iterdir())
