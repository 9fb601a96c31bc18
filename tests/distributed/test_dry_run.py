"""A dry run over several processes: one of them speaks, all of them check, none of them writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_forked
from helpers import ROOT
from training_runs import TINY, train_runs, write_two_datasets


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets without indices, and a run of one process over two steps."""
    root = tmp_path_factory.mktemp("dry_run")
    write_two_datasets(root / "data")
    train_runs(1, root / "data", [["num_steps=4", "run_steps=2", "global_batch_size=4", f"ckpt_save_path={root}/run"]])
    for index in (root / "data").glob("*/.index/*"):
        index.unlink()
    return root


def test_two_processes_print_one_plan_and_change_nothing(workplace: Path) -> None:
    temporary = workplace / "temporary"
    temporary.mkdir()
    before = {path: path.stat().st_mtime_ns for path in workplace.rglob("*") if path.is_file()}
    flags = [*TINY, f"data_path={workplace / 'data'}", "sep_token=0", "logical_shards=8", "num_steps=4"]
    flags += [f"ckpt_save_path={workplace / 'run'}", "--dry_run=true"]
    done = run_forked(ROOT / "main_training.py", 2, flags, environment={"TMPDIR": str(temporary)})
    for part in (
        "fsdp over 2 x cpu",
        "batch       4 sequences per step: 2 data-parallel ranks x 1 micro-batch of 2",
        f"start       from {workplace / 'run'}/checkpoints/step_2_ckp, step 2",
        "indexing dataset 'first'",
        "step 3, all ranks: the global batch has 4 slots of 32 + 1 tokens",
        "dry run     nothing was written",
    ):
        assert done.stdout.count(part) == 1, done.stdout
    assert {path: path.stat().st_mtime_ns for path in workplace.rglob("*") if path.is_file()} == before
    assert list(temporary.iterdir()) == []
