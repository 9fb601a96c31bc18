from __future__ import annotations

import gzip
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from pretraining.config.training import ProfilerConfig
from pretraining.observability.profiler import DATA_RANGE, TRACES, Profiler, divide_time, summarise
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Duration, Progress, TrainState

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
            with stopwatch.measure(DATA_RANGE):
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
    shares = {kind: float(share) for kind, share in re.findall(r"^  (\w[\w ]+\w) +(\S+)%", text, re.MULTILINE)}
    assert shares.keys() == {"compute", "exposed communication", "waiting for data", "idle"}
    assert shares["compute"] > 0 and shares["waiting for data"] > 0 and shares["exposed communication"] == 0
    calls = {name: float(count) for _, count, name in re.findall(r"([\d.]+) +([\d.]+)  (\S+)$", text, re.MULTILINE)}
    assert calls["aten::mm"] == 1.0 and not any("Profiler" in name or name == DATA_RANGE for name in calls)


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


def event(
    name: str, start: float, end: float, *, cuda: bool = False, marked: bool = False, children: tuple[Any, ...] = ()
) -> Any:
    """A stand-in for torch.profiler's event."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        device_type=DeviceType.CUDA if cuda else DeviceType.CPU,
        is_user_annotation=marked,
        cpu_children=list(children),
        self_cpu_time_total=end - start - sum(child.time_range.end - child.time_range.start for child in children),
    )


def test_on_a_gpu_kernels_count_and_nccls_are_communication_where_no_other_kernel_runs() -> None:
    assert summarise([event("aten::mm", 0, 1)]) is None  # no complete step
    events = [
        event("ProfilerStep#1", 0, 100, marked=True),
        event("aten::mm", 5, 10),  # a launch, no work
        event("ProfilerStep#1", 0, 95, cuda=True, marked=True),
        event("FSDP::all_gather", 10, 60, cuda=True, marked=True),
        event("nccl:_all_gather_base", 10, 60, cuda=True, marked=True),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 60, cuda=True),
        event("nvjet_tst_128x256", 40, 80, cuda=True),
        event("Memcpy HtoD (Pinned -> Device)", 90, 120, cuda=True),
        event(DATA_RANGE, 78, 88, marked=True),
    ]
    summary = summarise(events)
    assert summary is not None and summary.steps == 1
    assert summary.seconds == pytest.approx(120e-6)  # the device ends after the host
    assert list(summary.shares.values()) == pytest.approx([(40 + 30) / 120, 30 / 120, 8 / 120, 12 / 120])
    assert [name[:6] for name, _, _ in summary.operations] == ["ncclDe", "nvjet_", "Memcpy"]


def test_on_a_cpu_operations_count_and_gloos_collectives_are_communication() -> None:
    matrix = event("aten::mm", 20, 40)
    linear = event("aten::linear", 10, 40, children=(matrix,))
    events = [
        event("ProfilerStep#1", 0, 50, marked=True),
        event("ProfilerStep#2", 50, 100, marked=True),
        linear,
        matrix,
        event("autograd::engine::evaluate_function: Hook", 40, 90, children=(event("c10d::reduce_scatter_", 45, 46),)),
        event("gloo:reduce_scatter", 40, 60, marked=True),
        event(DATA_RANGE, 95, 100, marked=True),
    ]
    summary = summarise(events)
    assert summary is not None and summary.steps == 2
    assert list(summary.shares.values()) == pytest.approx([0.3, 0.2, 0.05, 0.45])
    own_seconds = {name: seconds for name, _, seconds in summary.operations}
    assert own_seconds["aten::linear"] == pytest.approx(1e-5)


WINDOW = (0.0, 40.0)
spans = st.lists(st.tuples(st.integers(-5, 45), st.integers(0, 9)).map(lambda at: (at[0], at[0] + at[1])), max_size=8)


def moments(stretches: list[tuple[float, float]]) -> set[int]:
    """The microseconds of the window that spans with integer bounds cover."""
    return {moment for start, end in stretches for moment in range(int(start), int(end)) if 0 <= moment < 40}


@given(spans, spans, spans)
def test_every_moment_is_counted_once(
    compute: list[tuple[float, float]], communication: list[tuple[float, float]], data: list[tuple[float, float]]
) -> None:
    shares = divide_time(WINDOW, {"compute": compute, "communication": communication, "data": data})
    computing, communicating, waiting = moments(compute), moments(communication), moments(data)
    assert shares["compute"] == pytest.approx(len(computing) / 40)
    assert shares["communication"] == pytest.approx(len(communicating - computing) / 40)
    assert shares["data"] == pytest.approx(len(waiting - computing - communicating) / 40)
    assert sum(shares.values()) == pytest.approx(1)
