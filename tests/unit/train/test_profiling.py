"""Profiles of whole runs in this process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from training_runs import losses_of
from unit.train.whole_runs import start


def test_a_run_leaves_traces_of_the_steps_that_were_asked_for_and_its_losses_are_those_without(tmp_path: Path) -> None:
    flags = ["num_steps=7", "held_out_fraction=0.1", "eval_interval=3", "eval_batches=1"]
    start(tmp_path / "plain", *flags)
    start(tmp_path / "run", *flags, "profile_steps=2-3,6", "use_profiler=true")
    assert losses_of(tmp_path / "plain") == losses_of(tmp_path / "run")
    traces = tmp_path / "run" / "profile_traces"
    assert {path.name for path in traces.iterdir()} == {
        "steps_2-3_rank0.pt.trace.json.gz",
        "steps_6-6_rank0.pt.trace.json.gz",
    }
    trace = json.loads(gzip.decompress((traces / "steps_2-3_rank0.pt.trace.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"data", "evaluation", "aten::mm", "ProfilerStep#1", "ProfilerStep#2"} <= names
