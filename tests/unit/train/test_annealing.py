"""An annealing stage: a straight line to zero from where it begins, with the data and the optimizer of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_runs import reports_of
from unit.train.whole_runs import manifest_of, start, started_at

from pretraining.files import with_checksum

LINE = {step: 2e-3 * (12 - step) / 3 for step in range(9, 13)}  # the rate of the update that ends in a step


def rates(run: Path) -> dict[int, float]:
    return {report["step"]: report["learning_rate"] for report in reports_of(run)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    start(tmp_path / "source", "num_steps=8", "learning_rate=2e-3", "schedule=constant", "warmup_steps=0")
    return tmp_path / "source"


def anneal(run: Path, *flags: str) -> None:
    start(run, "training_stage=annealing", "learning_rate=2e-3", "num_steps=12", "checkpoint_interval=1", *flags)


def test_it_begins_at_the_checkpoint_of_another_run_and_goes_on_through_restarts(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "annealed"
    for _ in range(4):
        anneal(run, f"ckpt_load_path={source}", "run_steps=1")
    assert rates(run) == pytest.approx(LINE)
    assert manifest_of(run, 9)["data"]["next_sample"] == manifest_of(source, 8)["data"]["next_sample"] + 2


def test_it_begins_in_the_same_run_and_again_after_a_return(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anneal(source, "run_steps=2")
    assert "learning rate is 0.002" in "".join(capsys.readouterr())
    anneal(source)
    assert {step: rate for step, rate in rates(source).items() if step > 8} == pytest.approx(LINE)
    start(
        source, "resume_from_checkpoint=8", "schedule=constant", "warmup_steps=0", "num_steps=10", "learning_rate=2e-3"
    )
    anneal(source, "num_steps=14")
    assert rates(source)[11] == pytest.approx(2e-3) and rates(source)[14] == pytest.approx(0.0, abs=1e-12)


def test_a_stage_of_an_earlier_version_keeps_its_line_from_step_0(tmp_path: Path) -> None:
    anneal(tmp_path, "run_steps=4")
    document: dict[str, Any] = manifest_of(tmp_path, 4)
    del document["state"]["schedule"], document["checksum"]
    file = tmp_path / "checkpoints" / "step_4_ckp" / "manifest.json"
    file.write_text(json.dumps(with_checksum(document)))
    anneal(tmp_path)
    assert rates(tmp_path) == pytest.approx({step: 2e-3 * (12 - step) / 11 for step in range(1, 13)})


def test_a_length_that_ends_before_the_start_point_says_from_where_it_counts(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anneal(tmp_path / "annealed", f"ckpt_load_path={source}", "num_steps=4")
    said = "".join(capsys.readouterr())
    assert "at step 8 of 4" in said and "--num_steps counts from step 0" in said and "above 8" in said
    assert started_at(tmp_path / "annealed") == 8
