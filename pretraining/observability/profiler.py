"""Records what some steps of a run do, and says where their time went.

    a range of steps is near --> torch.profiler warms up for a step --> records the range --> trace file, printed table

Between ranges nothing is recorded and nothing is spent. The traces are Chrome's JSON, gzipped, as Kineto writes it:
https://ui.perfetto.dev opens them, and so does TensorBoard with its profiler plugin.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.config.training import ProfilerConfig
from pretraining.distributed.torch_private import write_snapshot
from pretraining.observability.throughput import Stopwatch
from pretraining.observability.trace_events import TimeShares, TraceSummary, summarise
from pretraining.progress import Interval, TrainState
from pretraining.text import count_of

log = logging.getLogger(__name__)

TRACES = "profile_traces"
STEPS_OF_A_PROFILE = 3
STEPS_BEFORE = 3
"""Steps of each start that are no example of others: they compile, choose algorithms and fill caches."""
OPERATIONS_SHOWN = 10


@dataclass
class _Recording:
    """A range that is being recorded, or warmed up for."""

    first: int
    last: int
    trace: torch.profiler.profile


class Profiler:
    """Records ranges of steps, as a context around the loop; does nothing where nothing is to be recorded.

    Args:
        config: which steps, and on which ranks.
        run: folder of the run, which gets a folder of traces.
        next_step: the first step of this start.
        training_tokens: tokens of one pass over the datasets, for an interval in epochs.
        stopwatch: counts the time that writing a trace takes, and tells what the loop is doing.
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
        self._ranges = _ranges_to_profile(config, next_step)
        self._interval = Interval(config.profile_interval, training_tokens)
        self._next_step = next_step
        self._folder = run / TRACES
        self._device = device
        self._stopwatch = stopwatch
        self._recording: _Recording | None = None
        self._range: torch.profiler.record_function | None = None
        self._profiled = 0
        if self._records:
            stopwatch.also_tell(self.turn_to)

    def __enter__(self) -> Profiler:
        self._begin_if_due()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:  # an error came in between: what was recorded goes with it
            recording.trace.__exit__(None, None, None)
        if error is None and self._records and not self._profiled:
            ranges = ",".join(f"{first}-{last}" for first, last in self._ranges) or "none"
            log.info("profiler    no step was profiled: those to profile are %s (--profile_steps)", ranges)

    def after_step(self, state: TrainState) -> None:
        """Begin a recording, go on with it, or end it with a trace and a table; collective if all ranks record."""
        if not self._records:
            return
        recording, self._next_step = self._recording, state.progress.steps + 1
        if recording is not None:
            ends = state.stopping or state.progress.steps >= recording.last
            if self._next_step == recording.first or ends:
                self._wait_for_device()
            if not ends:
                recording.trace.step()
                return
            self._recording = None
            recording.trace.__exit__(None, None, None)
            if state.progress.steps >= recording.first:
                self._conclude(recording, state.progress.steps)
        if not state.stopping:
            if self._interval.is_due(state):
                self._ranges.append((self._next_step + 1, self._next_step + STEPS_OF_A_PROFILE))
            self._begin_if_due()

    def turn_to(self, doing: str) -> None:
        """Mark in the trace what the loop turns to; "training" has no mark."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._recording is not None and doing != "training":
            self._range = torch.profiler.record_function(doing)
            self._range.__enter__()

    def _begin_if_due(self) -> None:
        """Begin to record the range that the next step is in, or to warm up for one that begins right after it."""
        step = self._next_step
        ranges = [(max(first, step), last) for first, last in self._ranges if first - 1 <= step <= last]
        if not ranges or not self._records:
            return
        first, last = ranges[0]
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._wait_for_device()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*won't be using warmup")  # no step is there to warm up in
            schedule = torch.profiler.schedule(wait=0, warmup=first - step, active=last - first + 1, repeat=1)
        trace = torch.profiler.profile(activities=activities, schedule=schedule, record_shapes=True)
        self._recording = _Recording(first, last, trace)
        trace.__enter__()

    def _conclude(self, recording: _Recording, last: int) -> None:
        """Write the trace and log what is in it."""
        self._profiled += 1
        with self._stopwatch.measure("profiler"):
            path = self._folder / f"steps_{recording.first}-{last}_rank{dist.get_rank()}.pt.trace.json.gz"
            where = str(path)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                recording.trace.export_chrome_trace(where)
                if self._config.memory_snapshot:
                    write_snapshot(path.with_name(path.name.replace(".pt.trace.json.gz", ".memory.pickle")))
            except OSError as error:  # a full disk must not cost the run
                where = f"{path} cannot be written ({error})"
            events = recording.trace.events()
            summary = summarise(events) if events is not None else None
            everyone: list[TimeShares | None] = [summary.shares if summary else None]
            if not self._config.profiler_rank0_only:
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, summary.shares if summary else None)
        if summary is not None:
            for line in describe(summary, [shares for shares in everyone if shares], self._device.type, where):
                log.info(line)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _ranges_to_profile(config: ProfilerConfig, next_step: int) -> list[tuple[int, int]]:
    """Return the steps that the settings name, or the first ones of this start that are past its warm-up."""
    first = next_step + STEPS_BEFORE
    usual = [] if config.profile_interval.amount else [(first, first + STEPS_OF_A_PROFILE - 1)]
    return config.step_ranges or usual


def describe(summary: TraceSummary, everyone: list[TimeShares], device_type: str, where: str) -> list[str]:
    """Return the lines to print about profiled steps.

    Args:
        summary: of this rank.
        everyone: the shares of all ranks that have recorded.
        device_type: cuda or cpu.
        where: the trace's path.
    """
    shares, seconds = summary.shares, summary.shares.seconds / summary.steps
    steps = count_of(summary.steps, "step")
    idle = "the host is late with work" if device_type == "cuda" else "Python, and what has no operation"

    def line(name: str, attribute: str, comment: str) -> str:
        values = [getattr(each, attribute) for each in everyone]
        among = f"  ({min(values):.1%} to {max(values):.1%} over {len(values)} ranks)" if len(values) > 1 else ""
        share = getattr(shares, attribute)
        return f"  {name:22} {share:6.1%}  {share * seconds * 1e3:9.2f} ms a step{among}{comment}"

    communication = shares.exposed_communication + shares.hidden_communication
    hidden = f"; {shares.hidden_communication * seconds * 1e3:.2f} ms more beside compute" if communication else ""
    lines = [
        f"profile of {steps}, {seconds * 1e3:.2f} ms each: {where}",
        line("compute", "compute", ""),
        line("exposed communication", "exposed_communication", hidden),
        line("waiting for data", "data", ""),
        line("idle", "idle", f"  {idle}"),
        f"  {'ms a step':>10}  {'calls a step':>12}  operation",
    ]
    for operation in summary.operations[:OPERATIONS_SHOWN]:
        name = operation.name if len(operation.name) <= 80 else operation.name[:77] + "..."
        milliseconds, calls = operation.seconds * 1e3 / summary.steps, operation.calls / summary.steps
        lines.append(f"  {milliseconds:10.2f}  {calls:12.1f}  {name}")
    return lines
