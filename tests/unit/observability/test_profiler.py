from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from pretraining.config.training import ProfilerConfig
from pretraining.durations import Duration
from pretraining.observability.profiler import TRACES, Profiler
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Progress, TrainState

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")


def run(
    folder: Path, *steps: str, until: int, every: int = 0, restored: int = 0, error_after: int | None = None
) -> None:
    """Profiles a run of small steps."""
    config = ProfilerConfig(use_profiler=True, profile_steps=steps, profile_interval=Duration(every, "steps"))
    state = TrainState(until, until, 10, Progress(restored, 10 * restored))
    stopwatch = Stopwatch()
    with Profiler(config, folder, restored + 1, None, torch.device("cpu"), 0, stopwatch) as profiler:
        while not state.stopping:
            with stopwatch.measure("data"):
                sum(range(20_000))
            torch.ones(50, 50) @ torch.ones(50, 50)
            state.advance(0.0)
            profiler.after_step(state)
            if state.step == error_after:
                raise KeyError


def traces(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix("_rank0.pt.trace.json.gz") for path in (folder / TRACES).glob("*"))


def names_in(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]


def test_chosen_ranges_are_traced_also_at_both_ends_of_a_run_and_one_after_the_other(tmp_path: Path) -> None:
    run(tmp_path, "1-2", "4", "5-6", "9-30", until=10)
    assert traces(tmp_path) == ["steps_1-2", "steps_4-4", "steps_5-6", "steps_9-10"]
    run(tmp_path / "interval", "3", every=10, until=24)  # which adds three steps each time
    assert traces(tmp_path / "interval") == ["steps_12-14", "steps_22-24", "steps_3-3"]
    for first, last in ((1, 2), (4, 4), (5, 6), (9, 10)):
        names = names_in(tmp_path / TRACES / f"steps_{first}-{last}_rank0.pt.trace.json.gz")
        for name in ("aten::mm", "data"):
            assert names.count(name) == last - first + 1
        assert sum(name.startswith("ProfilerStep#") for name in names) == last - first + 1


def test_by_default_steps_4_to_6_of_each_start_are_traced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, restored=100, until=110)
    assert traces(tmp_path) == ["steps_104-106"]
    text = "\n".join(caplog.messages)
    assert "steps_104-106_rank0" in text
    calls = {words[0]: words[-1] for words in map(str.split, text.splitlines()) if words}
    assert calls["aten::mm"] == calls["data"] == "3"


@pytest.mark.parametrize(("use_profiler", "rank", "said"), [(True, 0, True), (False, 0, False), (True, 1, False)])
def test_a_run_too_short_to_profile_logs_it(
    use_profiler: bool, rank: int, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = TrainState(2, 2, 10, Progress(0, 0))
    config = ProfilerConfig(use_profiler=use_profiler)
    with Profiler(config, tmp_path, 1, None, torch.device("cpu"), rank, Stopwatch()) as profiler:
        while not state.stopping:
            state.advance(0.0)
            profiler.after_step(state)
    assert traces(tmp_path) == [] and ["4-6" in message for message in caplog.messages] == [True] * said


def test_an_error_ends_the_recording_and_leaves_no_trace_of_half_a_range(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run(tmp_path, "2-5", until=9, error_after=3)
    assert traces(tmp_path) == []
    run(tmp_path, "2-3", until=4)  # another profiler can start
    assert traces(tmp_path) == ["steps_2-3"]


def test_an_unwritable_folder_costs_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    run(tmp_path / "file", "2-3", until=4)
    assert any("aten::mm" in line for line in caplog.messages)
