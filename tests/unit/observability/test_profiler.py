from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pretraining.observability.profiler import NoProfiler, ProfiledSteps, Profiler, describe, first_steps
from pretraining.observability.trace_events import Operation, TimeShares, TraceSummary
from pretraining.progress import Duration, Interval, Progress, TrainState

pytestmark = pytest.mark.usefixtures("single_process")


def run(
    folder: Path, steps: ProfiledSteps, *, until: int, restored: int = 0, error_after: int | None = None
) -> list[str]:
    """Profile a run of small steps; returns what is shown."""
    shown: list[str] = []
    state = TrainState(until, until, 10, Progress(restored, 10 * restored))
    profiler = Profiler(
        steps=steps,
        next_step=restored + 1,
        folder=folder,
        device=torch.device("cpu"),
        everywhere=False,
        with_memory=False,
        activity=lambda name: nullcontext(),
        note=shown.append,
    )
    with profiler:
        while not state.stopping:
            profiler.turn_to("data")
            profiler.turn_to("training")
            torch.ones(50, 50) @ torch.ones(50, 50)
            state.advance(0.0)
            profiler.after_step(state)
            if state.step == error_after:
                raise KeyError
    return shown


def traces(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix("_rank0.pt.trace.json.gz") for path in folder.glob("*"))


def names_in(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]


def test_chosen_ranges_are_traced_also_at_both_ends_of_a_run_and_one_after_the_other(tmp_path: Path) -> None:
    run(tmp_path, ProfiledSteps([(1, 2), (4, 4), (5, 6), (9, 30)]), until=10)
    assert traces(tmp_path) == ["steps_1-2", "steps_4-4", "steps_5-6", "steps_9-10"]
    for first, last in ((1, 2), (4, 4), (5, 6), (9, 10)):
        names = names_in(tmp_path / f"steps_{first}-{last}_rank0.pt.trace.json.gz")
        for name in ("aten::mm", "data"):
            assert names.count(name) == last - first + 1
        assert sum(name.startswith("ProfilerStep#") for name in names) == last - first + 1


def test_an_interval_adds_three_steps_each_time(tmp_path: Path) -> None:
    every_ten = Interval(Duration(10, "steps"), None)
    run(tmp_path, ProfiledSteps([(3, 3)], every_ten), until=24)
    assert traces(tmp_path) == ["steps_12-14", "steps_22-24", "steps_3-3"]


def test_by_default_three_steps_after_the_first_three_of_each_start(tmp_path: Path) -> None:
    shown = run(tmp_path, ProfiledSteps(first_steps(100)), restored=100, until=110)
    assert traces(tmp_path) == ["steps_104-106"]
    assert shown[0].startswith("profile of 3 steps, ") and shown[0].endswith("steps_104-106_rank0.pt.trace.json.gz")
    text = "\n".join(shown)
    for part in ("compute ", "exposed communication ", "waiting for data ", "idle ", "ms a step", "aten::mm"):
        assert part in text


def test_a_run_too_short_to_profile_says_so(tmp_path: Path) -> None:
    assert run(tmp_path, ProfiledSteps(first_steps(0)), until=2) == [
        "profiler    no step was profiled: those to profile are 4-6 (--profile_steps)"
    ]


def test_an_error_ends_the_recording_and_leaves_no_trace_of_half_a_range(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run(tmp_path, ProfiledSteps([(2, 5)]), until=9, error_after=3)
    assert traces(tmp_path) == []
    run(tmp_path, ProfiledSteps([(2, 3)]), until=4)  # another profiler can begin
    assert traces(tmp_path) == ["steps_2-3"]


def test_a_folder_that_cannot_be_written_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = run(tmp_path / "file" / "traces", ProfiledSteps([(2, 3)]), until=4)
    assert "cannot be written" in shown[0] and any("aten::mm" in line for line in shown)


def test_shares_of_several_ranks_are_shown_with_their_range() -> None:
    mine = TimeShares(2.0, 0.5, 0.2, 0.1, 0.05, 0.25)
    other = TimeShares(2.0, 0.4, 0.3, 0.1, 0.0, 0.3)
    long_name = "x" * 100
    summary = TraceSummary(2, mine, [Operation(f"op{number}", 4, 0.1) for number in range(20)])
    summary.operations[0] = Operation(long_name, 2, 0.5)
    lines = describe(summary, [mine, other], "cuda", "trace.gz")
    assert lines[0] == "profile of 2 steps, 1000.00 ms each: trace.gz"
    assert lines[1] == "  compute                 50.0%     500.00 ms a step  (40.0% to 50.0% over 2 ranks)"
    assert "; 100.00 ms more beside compute" in lines[2]
    assert len(lines) == 6 + 10 and lines[6].endswith("x" * 77 + "...") and "250.00" in lines[6]


def test_without_the_profiler_nothing_happens(tmp_path: Path) -> None:
    state = TrainState(1, 1, 10, Progress(0, 0))
    with NoProfiler() as profiler:
        profiler.after_step(state)
