"""Reads what torch.profiler has recorded: which operations took how long, and how the time divides.

On a GPU the device's own events count: kernels and copies, NCCL's apart. On a CPU the operations count, and gloo's
collectives with the calls that start them. `Profiler` marks waiting for data on the host, torch.profiler marks steps.

The parts overlap, so each moment is counted once, as the first of these that it is:

    compute > communication > waiting for data > idle

Communication beside compute costs nothing and counts as compute; the rest of it is exposed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

DATA_RANGE = "data"
"""What the loop calls its waiting for data."""
STEP_RANGE = "ProfilerStep"

# Kernels of NCCL and RCCL: ncclDevKernel_AllGather_RING_LL(...), ncclKernel_..., ncclSymkDevKernel_...
_COLLECTIVE_KERNEL = re.compile(r"nccl\w*kernel", re.IGNORECASE)
_COLLECTIVE_CALL = re.compile(r"gloo:|c10d::|_c10d_functional::|record_param_comms|nccl:")


Span = tuple[float, float]
"""(start, end) in microseconds."""


@dataclass(frozen=True)
class TimeShares:
    """Shares of a window of `seconds`; compute, exposed communication, data and idle add up to 1.

    Hidden communication went on beside computing and is a part of `compute`. Exposed communication and waiting for data
    count only where nothing was computed meanwhile.
    """

    seconds: float
    compute: float
    exposed_communication: float
    hidden_communication: float
    data: float
    idle: float


class Operation(NamedTuple):
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
    """Return where the time of a recorded trace went; None where it holds no whole step.

    Args:
        events: of torch.profiler, of whole steps, with the device waited for at both ends.
    """
    steps = [event for event in events if event.name.startswith(STEP_RANGE) and event.device_type == DeviceType.CPU]
    if not steps:
        return None
    on_device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    # A range that was marked around operations is none, but gloo's collectives are marked ranges.
    working = on_device or [event for event in events if not event.is_user_annotation or _communicates(event)]
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


def _communicates(event: FunctionEvent) -> bool:
    pattern = _COLLECTIVE_CALL if event.device_type == DeviceType.CPU else _COLLECTIVE_KERNEL
    return pattern.search(event.name) is not None


def _computes(event: FunctionEvent) -> bool:
    """Return whether a CPU event is arithmetic; autograd's nodes are not: they hold operations, hooks and waiting."""
    return event.name.startswith("aten::") or not event.cpu_children


def _spans(events: Iterable[FunctionEvent]) -> list[Span]:
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
    window: Span, compute: Sequence[Span], communication: Sequence[Span], data: Sequence[Span]
) -> TimeShares:
    """Divide a time window, of which each moment counts once.

    Args:
        window: (start, end) in microseconds; what lies outside does not count.
        compute: when something was computed; in any order, overlapping or not, as the others.
        communication: when something was communicated.
        data: when data was waited for.
    """
    total = window[1] - window[0]
    computing, communicating = _covered(window, compute), _covered(window, communication)
    busy = _covered(window, [*compute, *communication])
    known = _covered(window, [*compute, *communication, *data])

    def share(microseconds: float) -> float:
        return max(0.0, microseconds / total)

    return TimeShares(
        seconds=total / 1e6,
        compute=share(computing),
        exposed_communication=share(busy - computing),
        hidden_communication=share(computing + communicating - busy),
        data=share(known - busy),
        idle=share(total - known),
    )


def _covered(window: Span, spans: Sequence[Span]) -> float:
    """Return the microseconds of a window that lie in at least one span."""
    covered, end = 0.0, window[0]
    for start, stop in sorted(spans):
        stop = min(stop, window[1])
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered
