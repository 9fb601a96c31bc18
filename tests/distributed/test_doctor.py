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
    done = run_forked(WORKER, 3, [*flags, f"--ckpt_save_path={tmp_path}/run"], check=False)
    output = done.stdout
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    slow = "\n".join(found["slow"])
    host = found["ranks"][0]["host"]
    for dtype in ("bfloat16", "float32"):
        assert f"rank 1 on {host} is slow: matmul {dtype} 128 " in slow
    assert f"rank 2 on {host} is slow: all its links are " in slow
    assert f"rank 0 on {host} is slow: matmul" not in slow and "the link between" not in slow
    assert [(link["one"], link["other"]) for link in found["links"]] == [(0, 1), (0, 2), (1, 2)]
    assert {each["name"] for each in found["collectives"]} == {"all-reduce", "all-gather", "reduce-scatter"}
    assert [len(rank["rates"]) for rank in found["ranks"]] == [5, 3, 3]  # one of a machine measures the disk
    assert not list(tmp_path.iterdir())
    verdicts = {check["found"]: check["verdict"] for check in found["checks"] if check["item"] == "speed"}
    assert set(verdicts) == set(found["slow"]) and set(verdicts.values()) == {"bad"}
    assert found["verdict"] == "bad" and done.returncode == 1 and "Traceback" not in done.stderr
    assert found["save_gib_per_second"] > 0
