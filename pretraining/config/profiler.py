"""What is recorded of a few steps, to see where their time and memory go: the section `profiler`."""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.durations import Duration
from pretraining.config.ranges import parse_range
from pretraining.config.setting import INTERVAL, setting


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
