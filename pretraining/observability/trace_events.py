"""Reads what torch.profiler has recorded: which operations took how long, and how the time divides.

On a GPU the device's own events count: kernels and copies, NCCL's apart from the others. On a CPU the operations do,
and gloo's collectives with the calls that start them. Waiting for data is the range that `Profiler` marks on the host;
steps are torch.profiler's own ranges.

The parts overlap: a device may compute and communicate at once, and while the host waits for data the device may still
be busy. Each moment is counted once, as the first of these that it is:

    compute > communication > waiting for data > idle

So communication beside compute costs nothing and counts as compute; the rest of it is exposed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

DATA_RANGE = "data"
"""What the loop calls its waiting for data."""
STEP_RANGE = "ProfilerStep"

# Kernels of NCCL and RCCL: ncclDevKernel_AllGather_RING_LL(...), ncclKernel_..., ncclSymkDevKernel_...
_COLLECTIVE_KERNEL = re.compile(r"nccl\w*kernel", re.IGNORECASE)
_COLLECTIVE_CALL = re.compile(r"gloo:|c10d::|_c10d_functional::|record_param_comms|nccl:")


Spans = list[tuple[float, float]]
"""Time spans as (start, end) in microseconds, ascending and disjoint."""


@dataclass(frozen=True)
class TimeShares:
    """Shares of a time window; those of compute, exposed communication, data and idle add up to 1.

    Attributes:
        seconds: length of the window.
        compute: something was computed.
        exposed_communication: communicated, and nothing computed meanwhile.
        hidden_communication: communicated beside computing; a part of `compute`.
        data: waited for data, with nothing else to do.
        idle: none of these.
    """

    seconds: float
    compute: float
    exposed_communication: float
    hidden_communication: float
    data: float
    idle: float


@dataclass(frozen=True)
class Operation:
    """All calls of one operation or kernel; seconds without those of the operations that it calls."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class TraceSummary:
    """Where the time of profiled steps went; operations by their time, the longest first."""

    steps: int
    shares: TimeShares
    operations: list[Operation]


def summarise(events: Sequence[FunctionEvent]) -> TraceSummary | None:
    """What a recorded trace comes to; None where it holds no whole step.

    Args:
        events: of torch.profiler, of whole steps, with the device waited for at both ends.
    """
    steps = [event for event in events if event.name.startswith(STEP_RANGE) and event.device_type == DeviceType.CPU]
    if not steps:
        return None
    on_device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    working = on_device or [event for event in events if _is_operation(event)]
    # What the last step has begun, the device may finish after it.
    last = max(event.time_range.end for event in (*steps, *on_device))
    communication = [event for event in working if _communicates(event)]
    compute = [event for event in working if not _communicates(event) and (on_device or _computes(event))]
    shares = divide_time(
        (min(event.time_range.start for event in steps), last),
        _spans(compute),
        _spans(communication),
        _spans(event for event in events if event.name == DATA_RANGE and event.device_type == DeviceType.CPU),
    )
    return TraceSummary(len(steps), shares, _by_name(working, is_device=bool(on_device)))


def _is_operation(event: FunctionEvent) -> bool:
    """Whether a CPU event is no mere range around others that somebody has marked."""
    return not event.is_user_annotation or _communicates(event)


def _communicates(event: FunctionEvent) -> bool:
    pattern = _COLLECTIVE_CALL if event.device_type == DeviceType.CPU else _COLLECTIVE_KERNEL
    return pattern.search(event.name) is not None


def _computes(event: FunctionEvent) -> bool:
    """Whether a CPU event is arithmetic: PyTorch's operations, and what has no other operation in it.

    Nodes of autograd are neither: they hold operations, FSDP's hooks and their waiting.
    """
    return event.name.startswith("aten::") or not event.cpu_children


def _spans(events: Iterable[FunctionEvent]) -> list[tuple[float, float]]:
    return [(event.time_range.start, event.time_range.end) for event in events]


def _by_name(events: Iterable[FunctionEvent], is_device: bool) -> list[Operation]:
    calls: dict[str, int] = defaultdict(int)
    microseconds: dict[str, float] = defaultdict(float)
    for event in events:
        calls[event.name] += 1
        microseconds[event.name] += event.time_range.elapsed_us() if is_device else event.self_cpu_time_total
    operations = [Operation(name, calls[name], microseconds[name] / 1e6) for name in calls]
    return sorted(operations, key=lambda operation: -operation.seconds)


def divide_time(
    window: tuple[float, float],
    compute: Iterable[tuple[float, float]],
    communication: Iterable[tuple[float, float]],
    data: Iterable[tuple[float, float]],
) -> TimeShares:
    """Divides a time window.

    Args:
        window: (start, end) in microseconds; what lies outside does not count.
        compute: when something was computed; in any order, overlapping or not, as the others.
        communication: when something was communicated.
        data: when data was waited for.
    """
    computing, communicating, waiting = (unite(spans, window) for spans in (compute, communication, data))
    total = window[1] - window[0]
    exposed = subtract(communicating, computing)
    only_waiting = subtract(subtract(waiting, computing), communicating)
    parts = [length(spans) / total for spans in (computing, exposed, only_waiting)]
    return TimeShares(
        seconds=total / 1e6,
        compute=parts[0],
        exposed_communication=parts[1],
        hidden_communication=length(communicating) / total - parts[1],
        data=parts[2],
        idle=max(0.0, 1.0 - sum(parts)),
    )


def unite(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> Spans:
    """The same moments inside a window as ascending, disjoint spans."""
    united: Spans = []
    for start, end in sorted((max(start, window[0]), min(end, window[1])) for start, end in spans):
        if end <= start:
            continue
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def subtract(spans: Spans, others: Spans) -> Spans:
    """The moments of `spans` that are in none of `others`."""
    left: Spans = []
    position = 0
    for start, end in spans:
        while position < len(others) and others[position][1] <= start:
            position += 1
        place = position
        while place < len(others) and others[place][0] < end:
            if others[place][0] > start:
                left.append((start, others[place][0]))
            start = max(start, others[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Spans) -> float:
    """Sum of the spans' lengths, in microseconds."""
    return sum(end - start for start, end in spans)
