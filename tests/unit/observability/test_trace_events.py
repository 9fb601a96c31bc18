from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from pretraining.observability.profiler import DATA_RANGE, divide_time, summarise


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
