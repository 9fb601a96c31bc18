"""Makes what records steps of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pretraining.observability.profiler import NoProfiler, ProfiledSteps, Profiler, StepProfiler, first_steps
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Interval, TrainState
from pretraining.train.parts import Parts

TRACES = "profile_traces"


def build_profiler(parts: Parts, stopwatch: Stopwatch, state: TrainState, note: Callable[[str], None]) -> StepProfiler:
    """What records steps of the run on this rank, if anything does.

    Args:
        parts: of the run.
        stopwatch: books the time that traces take to be written, and says what the loop is doing.
        state: where the run stands.
        note: shows a line.
    """
    config, processes = parts.config.profiler, parts.processes
    if not config.use_profiler or (config.profiler_rank0_only and not processes.is_main):
        return NoProfiler()
    interval = Interval(config.profile_interval, parts.training_tokens) if config.profile_interval.amount else None
    ranges = config.step_ranges or ([] if interval is not None else first_steps(state.step))
    profiler = Profiler(
        steps=ProfiledSteps(ranges, interval),
        next_step=state.step + 1,
        folder=Path(parts.config.checkpoint.ckpt_save_path) / TRACES,
        device=processes.device,
        everywhere=not config.profiler_rank0_only,
        with_memory=config.memory_snapshot,
        activity=stopwatch.activity,
        note=note,
    )
    stopwatch.also_tell(profiler.turn_to)
    return profiler
