"""Profiles of whole runs in this process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from training_runs import losses_of
from unit.train.whole_runs import start


def test_a_run_leaves_traces_of_the_steps_that_were_asked_for_and_prints_where_their_time_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["held_out_fraction=0.1", "eval_interval=3", "eval_batches=1", "profile_steps=2-3,6", "use_profiler=true"]
    start(tmp_path, "num_steps=7", *flags)
    traces = tmp_path / "profile_traces"
    assert {path.name for path in traces.iterdir()} == {
        "steps_2-3_rank0.pt.trace.json.gz",
        "steps_6-6_rank0.pt.trace.json.gz",
    }
    trace = json.loads(gzip.decompress((traces / "steps_2-3_rank0.pt.trace.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"data", "evaluation", "aten::mm", "ProfilerStep#1", "ProfilerStep#2"} <= names
    out = capsys.readouterr().out
    assert "profile of 2 steps, " in out and f"{traces}/steps_2-3_rank0" in out
    assert out.count("exposed communication") == 2 and "aten::mm" in out


def test_a_resumed_run_counts_from_its_start_where_no_steps_were_named(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=9", "run_steps=2")
    start(tmp_path, "num_steps=9", "use_profiler=true")
    assert [path.name for path in (tmp_path / "profile_traces").iterdir()] == ["steps_6-8_rank0.pt.trace.json.gz"]


def test_a_profile_changes_no_loss(tmp_path: Path) -> None:
    for name, flags in (("plain", []), ("profiled", ["use_profiler=true", "profile_interval=2"])):
        start(tmp_path / name, "num_steps=6", *flags)
    assert losses_of(tmp_path / "plain") == losses_of(tmp_path / "profiled")
