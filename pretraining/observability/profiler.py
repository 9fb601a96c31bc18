"""The profiler, which records ranges of steps with torch.profiler.

    one warm-up step --> recorded range of steps --> trace file, table in the log

Traces are gzipped Chrome JSON files, for https://ui.perfetto.dev or TensorBoard's profiler plugin. The table has the
time by operation and by kind. On a GPU, kernels and copies count, and NCCL's kernels are communication. On a CPU,
operations count, and gloo's collectives are communication. Kinds overlap, so each moment counts once, as the first of
these kinds:

    compute > exposed communication > waiting for data > idle

Communication that overlaps compute counts as compute.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerAction

from pretraining.config.training import ProfilerConfig
from pretraining.distributed.processes import gather_from_every_rank
from pretraining.distributed.torch_private import write_snapshot
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Interval, TrainState
from pretraining.text import count_of

log = logging.getLogger(__name__)

TRACES = "profile_traces"
PROFILED_STEPS = 3
WARMUP_STEPS = 3
"""Atypical steps after each start, which compile, choose algorithms and fill caches."""
MAX_OPERATIONS = 10
DATA_RANGE = "data"
"""Mark of waiting for data."""
STEP_RANGE = "ProfilerStep"

# Kernels of NCCL and RCCL: ncclDevKernel_AllGather_RING_LL(...), ncclKernel_..., ncclSymkDevKernel_...
_COLLECTIVE_KERNEL = re.compile(r"nccl\w*kernel", re.IGNORECASE)
_COLLECTIVE_CALL = re.compile(r"gloo:|c10d::|_c10d_functional::|record_param_comms|nccl:")

Span = tuple[float, float]
"""(start, end) in microseconds."""


class Profiler:
    """A profiler of ranges of steps, as a context around the loop.

    Args:
        run: folder of the run.
        next_step: first step of this start.
        training_tokens: tokens of one pass over the datasets, for an interval in epochs.
        stopwatch: counts the time of writing traces, and notifies the profiler of activities.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        run: Path,
        next_step: int,
        training_tokens: int | None,
        device: torch.device,
        rank: int,
        stopwatch: Stopwatch,
    ) -> None:
        self._config = config
        self._records = config.use_profiler and (rank == 0 or not config.profiler_rank0_only)
        self._first_step, self._step = next_step, next_step - 1
        default = (next_step + WARMUP_STEPS, next_step + WARMUP_STEPS + PROFILED_STEPS - 1)
        self._ranges = config.step_ranges or ([] if config.profile_interval.amount else [default])
        self._interval = Interval(config.profile_interval, training_tokens)
        self._folder = run / TRACES
        self._device = device
        self._stopwatch = stopwatch
        self._profile: torch.profiler.profile | None = None
        self._mark: torch.profiler.record_function | None = None
        self._has_recorded = False
        if self._records:
            stopwatch.add_listener(self.mark_activity)

    def __enter__(self) -> Profiler:
        if self._records:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(
                activities=activities,
                schedule=lambda number: self._action_at(self._first_step + number),
                on_trace_ready=self._save_trace,
                record_shapes=True,
            )
            self._profile.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._profile is not None:  # drop the recording of a run that fails
            self._profile.on_trace_ready = None
            self._profile.__exit__(None, None, None)
        if error is None and self._records and not self._has_recorded:
            ranges = ",".join(f"{first}-{last}" for first, last in self._ranges) or "none"
            log.info("profiler    no step was profiled; steps to profile: %s (--profile_steps)", ranges)

    def after_step(self, state: TrainState) -> None:
        """Advance the recording, and save it at the end of a range; collective if all ranks record."""
        profile, self._step = self._profile, state.step
        if profile is None:
            return
        if self._interval.is_due(state):
            self._ranges.append((state.step + 2, state.step + 1 + PROFILED_STEPS))
        action = self._action_at(state.step)
        is_saved = action == ProfilerAction.RECORD_AND_SAVE
        if self._device.type == "cuda" and (is_saved or state.stopping or action != self._action_at(state.step + 1)):
            torch.cuda.synchronize(self._device)
        if state.stopping:
            self._profile = None
            profile.__exit__(None, None, None)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events")  # events of an earlier range
            profile.step()

    def mark_activity(self, doing: str) -> None:
        """Mark the loop's new activity in the trace; "training" has no mark."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if self._profile is not None and doing != "training":
            self._mark = torch.profiler.record_function(doing)
            self._mark.__enter__()

    def _action_at(self, step: int) -> ProfilerAction:
        """Return the action of a step, by the first range with this step, else by a range that starts with the next."""
        for first, last in self._ranges:
            if first <= step <= last:
                return ProfilerAction.RECORD if step < last else ProfilerAction.RECORD_AND_SAVE
        is_next = any(step == first - 1 for first, _ in self._ranges)
        return ProfilerAction.WARMUP if is_next else ProfilerAction.NONE

    def _save_trace(self, profile: torch.profiler.profile) -> None:
        """Write the trace, and log its summary."""
        self._has_recorded = True
        with self._stopwatch.measure("profiler"):
            summary = summarise(profile.events() or [])
            steps = f"{self._step - (summary.steps if summary else 1) + 1}-{self._step}"
            path = self._folder / f"steps_{steps}_rank{dist.get_rank()}.pt.trace.json.gz"
            where = str(path)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(where)
                if self._config.memory_snapshot:
                    write_snapshot(path.with_name(path.name.replace(".pt.trace.json.gz", ".memory.pickle")))
            except OSError as error:  # a full disk must not stop the run
                where = f"{path} cannot be written ({error})"
            shares = summary.shares if summary else None
            everyone = [shares] if self._config.profiler_rank0_only else gather_from_every_rank(lambda: shares)
        if summary is not None:
            for line in describe(summary, [each for each in everyone if each], where):
                log.info(line)


def describe(summary: TraceSummary, everyone: Sequence[Mapping[str, float]], where: str) -> list[str]:
    """Return the lines of the log about profiled steps.

    Args:
        summary: summary of this rank.
        everyone: time shares of all recording ranks.
        where: path of the trace.
    """
    milliseconds = summary.seconds * 1e3 / summary.steps
    lines = [f"profile of {count_of(summary.steps, 'step')}, {milliseconds:.2f} ms each: {where}"]
    for kind, share in summary.shares.items():
        values = [shares[kind] for shares in everyone]
        among = f"  ({min(values):.1%} to {max(values):.1%} over {len(values)} ranks)" if len(values) > 1 else ""
        lines.append(f"  {kind:22} {share:6.1%}  {share * milliseconds:9.2f} ms/step{among}")
    lines.append(f"  {'ms/step':>10}  {'calls/step':>12}  operation")
    for name, calls, seconds in summary.operations[:MAX_OPERATIONS]:
        lines.append(f"  {seconds * 1e3 / summary.steps:10.2f}  {calls / summary.steps:12.1f}  {name[:80]}")
    return lines


@dataclass(frozen=True)
class TraceSummary:
    """Time of profiled steps.

    Attributes:
        shares: shares of `seconds` by kind.
        operations: name, calls, and seconds without the operations that it calls, the longest first.
    """

    steps: int
    seconds: float
    shares: dict[str, float]
    operations: list[tuple[str, int, float]]


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


def _sum_by_name(events: Iterable[FunctionEvent], is_device: bool) -> list[tuple[str, int, float]]:
    calls: dict[str, int] = defaultdict(int)
    microseconds: dict[str, float] = defaultdict(float)
    for event in events:
        calls[event.name] += 1
        microseconds[event.name] += event.time_range.elapsed_us() if is_device else event.self_cpu_time_total
    longest = sorted(calls, key=lambda name: -microseconds[name])
    return [(name, calls[name], microseconds[name] / 1e6) for name in longest]


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
