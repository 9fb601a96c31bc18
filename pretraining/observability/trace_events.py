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
    """Return where the time of a recorded trace went; None where it holds no whole step.

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
    """Return whether a CPU event is an operation, and not a range that was marked around others."""
    return not event.is_user_annotation or _communicates(event)


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
    window: Span, compute: Iterable[Span], communication: Iterable[Span], data: Iterable[Span]
) -> TimeShares:
    """Divide a time window, of which each moment counts once.

    Args:
        window: (start, end) in microseconds; what lies outside does not count.
        compute: when something was computed; in any order, overlapping or not, as the others.
        communication: when something was communicated.
        data: when data was waited for.
    """
    changes = []
    for kind, spans in (("compute", compute), ("communication", communication), ("data", data)):
        clipped = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
        for start, end in clipped:
            if start < end:
                changes += [(start, kind, 1), (end, kind, -1)]
    running = {"compute": 0, "communication": 0, "data": 0}
    times: dict[str, float] = defaultdict(float)
    before = window[0]
    for moment, kind, change in sorted(changes):
        times[_what_counts(running)] += moment - before
        running[kind] += change
        before = moment
    total = window[1] - window[0]
    shares = {
        kind: times[kind] / total for kind in ("compute", "compute beside communication", "communication", "data")
    }
    hidden = shares["compute beside communication"]
    return TimeShares(
        seconds=total / 1e6,
        compute=shares["compute"] + hidden,
        exposed_communication=shares["communication"],
        hidden_communication=hidden,
        data=shares["data"],
        idle=max(0.0, 1.0 - sum(shares.values())),
    )


def _what_counts(running: dict[str, int]) -> str:
    """Return what a moment counts as, from the number of spans of each kind that it lies in."""
    if running["compute"] and running["communication"]:
        return "compute beside communication"
    return next((kind for kind in ("compute", "communication", "data") if running[kind]), "idle")
