"""The profiler, which records ranges of steps with torch.profiler.

    one warm-up step --> recorded range of steps --> trace file, PyTorch's table of operations in the log

Traces are gzipped Chrome JSON files, for https://ui.perfetto.dev or TensorBoard's profiler plugin.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction

from pretraining.config.training import ProfilerConfig
from pretraining.distributed.torch_private import write_snapshot
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Interval, TrainState

log = logging.getLogger(__name__)

TRACES = "profile_traces"
PROFILED_STEPS = 3
WARMUP_STEPS = 3
"""Atypical steps after each start, which compile, choose algorithms and fill caches."""
MAX_OPERATIONS = 10
"""Rows of the table."""
STEP_RANGE = "ProfilerStep"


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
        """Advance the recording, and save it at the end of a range."""
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
        """Write the trace, and log the operations that take longest."""
        self._has_recorded = True
        with self._stopwatch.measure("profiler"):
            on_host = (event.name for event in profile.events() or [] if event.device_type == DeviceType.CPU)
            count = sum(name.startswith(STEP_RANGE) for name in on_host)
            steps = f"{self._step - max(count, 1) + 1}-{self._step}"
            path = self._folder / f"steps_{steps}_rank{dist.get_rank()}.pt.trace.json.gz"
            where = str(path)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(where)
                if self._config.memory_snapshot:
                    write_snapshot(path.with_name(path.name.replace(".pt.trace.json.gz", ".memory.pickle")))
            except OSError as error:  # a full disk must not stop the run
                where = f"{path} cannot be written ({error})"
            key = f"self_{'cpu' if self._device.type == 'cpu' else 'device'}_time_total"
            table = profile.key_averages().table(sort_by=key, row_limit=MAX_OPERATIONS)
        log.info("profile of steps %s: %s\n%s", steps, where, table)
