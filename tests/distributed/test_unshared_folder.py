"""Ranks that do not see one run folder are found at the start, before a step is trained."""

from __future__ import annotations

from pathlib import Path

from forked import run_forked
from training_runs import TINY

WORKER = Path(__file__).with_name("unshared_worker.py")


def test_nodes_without_a_shared_run_folder_are_refused_at_the_start(tmp_path: Path) -> None:
    flags = [str(tmp_path), *TINY, "use_dummy_dataset=true", "num_steps=2"]
    refused = run_forked(WORKER, 2, [*flags, "ckpt_save_path=run"], check=False)
    assert refused.returncode == 1 and "step 1" not in refused.stdout
    [said] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/node1/run" in said and "on a disk that all nodes share" in said
    assert list((tmp_path / "node0").iterdir()) == list((tmp_path / "node1").iterdir()) == []
    run_forked(WORKER, 2, [*flags, "ckpt_save_path=../run"])
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step_2_ckp"}
