"""Summaries of torch.profiler's events: time by operation and by kind.

On a GPU, kernels and copies count, and NCCL's kernels are communication. On a CPU, operations count, and gloo's
collectives are communication. `Profiler` marks waiting for data on the host; torch.profiler marks steps.

Kinds overlap, so each moment counts once, as the first of these kinds:

    compute > exposed communication > waiting for data > idle

Communication that overlaps compute counts as compute.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

DATA_RANGE = "data"
"""Mark of waiting for data."""
STEP_RANGE = "ProfilerStep"

# Kernels of NCCL and RCCL: ncclDevKernel_AllGather_RING_LL(...), ncclKernel_..., ncclSymkDevKernel_...
_COLLECTIVE_KERNEL = re.compile(r"nccl\w*kernel", re.IGNORECASE)
_COLLECTIVE_CALL = re.compile(r"gloo:|c10d::|_c10d_functional::|record_param_comms|nccl:")


Span = tuple[float, float]
"""(start, end) in microseconds."""


class Operation(NamedTuple):
    """All calls of one operation or kernel; `seconds` excludes the operations that it calls."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class TraceSummary:
    """Time of profiled steps: shares of `seconds` by kind, and operations, the longest first."""

    steps: int
    seconds: float
    shares: dict[str, float]
    operations: list[Operation]


def summarise(events: Sequence[FunctionEvent]) -> TraceSummary | None:
    """Return the summary of a trace; None without a complete step.

    Args:
        events: events of whole steps, with the device synchronised before and after.
    """
    steps = [event for event in events if event.name.startswith(STEP_RANGE) and event.device_type == DeviceType.CPU]
    if not steps:
        return None
    on_device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    # User annotations are no operations, except for gloo's collectives.
    working = on_device or [event for event in events if not event.is_user_annotation or _is_communication(event)]
    # The device may finish after the last step on the host.
    last = max(event.time_range.end for event in (*steps, *on_device))
    communication = [event for event in working if _is_communication(event)]
    compute = [event for event in working if not _is_communication(event) and (on_device or _is_compute(event))]
    data = [event for event in events if event.name == DATA_RANGE and event.device_type == DeviceType.CPU]
    window = (min(event.time_range.start for event in steps), last)
    kinds = {"compute": compute, "exposed communication": communication, "waiting for data": data}
    shares = divide_time(window, {kind: _spans(found) for kind, found in kinds.items()})
    seconds = (window[1] - window[0]) / 1e6
    return TraceSummary(len(steps), seconds, shares, _sum_by_name(working, is_device=bool(on_device)))


def _is_communication(event: FunctionEvent) -> bool:
    pattern = _COLLECTIVE_CALL if event.device_type == DeviceType.CPU else _COLLECTIVE_KERNEL
    return pattern.search(event.name) is not None


def _is_compute(event: FunctionEvent) -> bool:
    """Return whether a CPU event is arithmetic. Autograd's nodes contain operations, hooks and waiting."""
    return event.name.startswith("aten::") or not event.cpu_children


def _spans(events: Iterable[FunctionEvent]) -> list[Span]:
    return [(event.time_range.start, event.time_range.end) for event in events]


def _sum_by_name(events: Iterable[FunctionEvent], is_device: bool) -> list[Operation]:
    calls: dict[str, int] = defaultdict(int)
    microseconds: dict[str, float] = defaultdict(float)
    for event in events:
        calls[event.name] += 1
        microseconds[event.name] += event.time_range.elapsed_us() if is_device else event.self_cpu_time_total
    operations = [Operation(name, calls[name], microseconds[name] / 1e6) for name in calls]
    return sorted(operations, key=lambda operation: -operation.seconds)


def divide_time(window: Span, spans: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """Return the share of each kind in a time window; each moment counts as its first kind, else as "idle".

    Args:
        window: (start, end) in microseconds.
        spans: spans of each kind, in any order, possibly overlapping.
    """
    shares: dict[str, float] = {}
    known: list[Span] = []
    for kind, more in spans.items():
        before = sum(shares.values())
        known += more
        shares[kind] = _covered(window, known) / (window[1] - window[0]) - before
    shares["idle"] = 1.0 - sum(shares.values())
    return {kind: max(0.0, share) for kind, share in shares.items()}


def _covered(window: Span, spans: Sequence[Span]) -> float:
    """Return the microseconds of a window inside at least one span."""
    covered, end = 0.0, window[0]
    for start, stop in sorted(spans):
        stop = min(stop, window[1])
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered
