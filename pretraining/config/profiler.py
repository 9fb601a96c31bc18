"""What is recorded of a few steps, to see where their time and memory go: the section `profiler`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pretraining.config.fields import INTERVAL, setting
from pretraining.config.values import format_value, parse_range
from pretraining.progress import Duration


@dataclass(frozen=True)
class ProfilerConfig:
    """Where the time and the memory of some steps go."""

    use_profiler: bool = setting(
        False,
        "record everything that a few steps do, as traces for Perfetto or TensorBoard in "
        "<ckpt_save_path>/profile_traces, and print where their time went",
    )
    profile_steps: tuple[str, ...] = setting(
        (),
        "steps to profile, numbered from 1 as in reports: A-B, both included, comma list; empty = the fourth to sixth "
        "step of each start, unless profile_interval is given",
    )
    profile_interval: Duration = setting(
        Duration(0, "steps"), "profile three steps each time so much is done; 0 = never", units=INTERVAL
    )
    profiler_rank0_only: bool = setting(True, "trace the first process only; false = all of them, a file each")
    memory_snapshot: bool = setting(
        False,
        "on CUDA, remember which line made each allocation, and write it down with each profile and where memory runs "
        "out, for pytorch.org/memory_viz; some microseconds an allocation",
    )

    @property
    def step_ranges(self) -> list[tuple[int, int]]:
        """`profile_steps` as (first, last).

        Raises:
            ValueError: they are no ranges of steps.
        """
        return [parse_range(text, smallest=1) for text in self.profile_steps]


def step_problems(profiler: ProfilerConfig) -> Iterator[str]:
    """What is wrong with the steps to profile: they are ranges."""
    try:
        _ = profiler.step_ranges
    except ValueError:
        yield (
            f"profile_steps={','.join(profiler.profile_steps)}: write the first and the last step of each "
            "range, numbered from 1, as in --profile_steps=10-12,1000-1002"
        )


def profiling_problems(profiler: ProfilerConfig) -> Iterator[str]:
    """What is wrong with settings of a profiler that is off."""
    if profiler.use_profiler:
        return
    if profiler.profile_steps:
        steps = format_value(profiler.profile_steps)
        yield f"--profile_steps={steps} needs --use_profiler=true: give it, or leave the steps out"
    if profiler.profile_interval.amount:
        yield f"--profile_interval={profiler.profile_interval} needs --use_profiler=true: give it, or leave it out"
