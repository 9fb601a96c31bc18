"""`pretrain doctor` over several processes, some of which are slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked

WORKER = Path(__file__).parent / "doctor_worker.py"


@pytest.mark.thorough
def test_slow_ranks_are_named_by_what_is_slow_about_them(tmp_path: Path) -> None:
    flags = ["--json", f"--disk_path={tmp_path}", "--disk_mib=1", "--message_mib=1", "--slow_factor=3"]
    done = run_forked(WORKER, 3, [*flags, f"--ckpt_save_path={tmp_path}/run", "--model_variant=tiny"], check=False)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    slow = {
        (row["check"], row["found"].partition(" on ")[0]) for row in found["rows"] if "times slower" in row["found"]
    }
    assert slow >= {(f"matmul {dtype} 128", "rank 1") for dtype in ("bfloat16", "float32")}
    assert ("messages to the next rank", "rank 2") in slow and ("matmul float32 128", "rank 0") not in slow
    readings = [[reading["check"] for reading in rank["readings"]] for rank in found["ranks"]]
    assert readings[0][-3:] == ["all-reduce", "all-reduce of 1 KiB", "messages to the next rank"]
    assert ["disk read" in each for each in readings] == [True, False, False]  # one rank of a machine
    assert found["verdict"] == "bad" and done.returncode == 1 and "Traceback" not in done.stderr
    assert any(row["check"] == "saves" for row in found["rows"]) and not list(tmp_path.iterdir())
