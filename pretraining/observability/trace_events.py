"""Reads what torch.profiler has recorded: which operations took how long, and how the time divides.

On a GPU the device's own events count: kernels and copies, NCCL's apart from the others. On a CPU the operations do,
and gloo's collectives with the calls that start them. Waiting for data is the range that `Profiler` marks on the host;
steps are torch.profiler's own ranges.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from pretraining.observability.time_shares import TimeShares, divide_time

DATA_RANGE = "data"
"""What the loop calls its waiting for data."""
STEP_RANGE = "ProfilerStep"

# Kernels of NCCL and RCCL: ncclDevKernel_AllGather_RING_LL(...), ncclKernel_..., ncclSymkDevKernel_...
_COLLECTIVE_KERNEL = re.compile(r"nccl\w*kernel", re.IGNORECASE)
_COLLECTIVE_CALL = re.compile(r"gloo:|c10d::|_c10d_functional::|record_param_comms|nccl:")


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
