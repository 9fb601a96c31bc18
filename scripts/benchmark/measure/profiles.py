"""What a profile (`--use_profiler`) costs: a step that is recorded, and the end of a range of steps.

    OMP_NUM_THREADS=1 python -m scripts.benchmark.measure.profiles
    python -m scripts.benchmark.measure.profiles --model_variant=125m --seq_length=1024 --batch_size=16

One run records three steps of every twenty. Times are of the processor, so that other programs hardly disturb, and of
the host alone where there is a GPU. Recorded steps are compared with those that follow, before the profiler warms up
for the next range; the first range, in which it starts, is left out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from pretraining.data.batch import StepBatch
from pretraining.observability.profiler import STEPS_OF_A_PROFILE, Profiler
from pretraining.progress import TrainState
from pretraining.train.build import Job, build_run
from pretraining.train.loop import train_loop
from scripts.benchmark.common import (
    LENGTH,
    Number,
    Over,
    announce,
    announce_rest,
    join,
    parse,
    print_table,
    read_settings,
    spread,
)

SETTINGS = (
    "use_dummy_dataset=true",
    "use_profiler=true",
    "tracker=none",
    "progress=plain",
    "model_variant=tiny",
    "mixed_precision=false",
    "seq_length=128",
    "batch_size=2",
)
OWN = (*LENGTH, "use_profiler", "profile_steps", "profile_interval", "report_interval")
EVERY = 20


class TimedProfiler(Profiler):
    """A profiler, and the processor seconds of steps without what it does after them, and of that.

    Args:
        profiler: of the run.
        last_step: after which the run is over.
        terminal: where it says how long that will take, while the run prints into a file.
    """

    def __init__(self, profiler: Profiler, last_step: int, terminal: TextIO) -> None:
        self._profiler = profiler
        self._last_step = last_step
        self._terminal = terminal
        self._started = time.perf_counter()
        self._began = 0.0
        self.steps: list[float] = []
        self.afterwards: list[float] = []

    def __enter__(self) -> TimedProfiler:
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._profiler.__exit__(kind, error, traceback)

    def paced(self, batches: Generator[StepBatch, None, None]) -> Generator[StepBatch, None, None]:
        """The same batches; a step begins where its batch is asked for."""
        with closing(batches):
            while (done := len(self.steps)) < self._last_step:
                if done == EVERY:
                    a_step = (time.perf_counter() - self._started) / EVERY
                    announce_rest((self._last_step - EVERY) * a_step, self._terminal)
                self._began = time.process_time()
                yield next(batches)
            raise Over

    def after_step(self, state: TrainState) -> None:
        done = time.process_time()
        self._profiler.after_step(state)
        self.steps.append(done - self._began)
        self.afterwards.append(time.process_time() - done)


def main() -> None:
    flags, rest = parse((__doc__ or "").splitlines()[0], OWN, ranges=Number(10, "of three recorded steps"))
    read_settings([*SETTINGS, *rest])
    announce(flags)
    firsts = [EVERY * number + 1 for number in range(1, flags.ranges + 2)]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        timed = train([*SETTINGS, *rest], firsts, Path(folder))
        traces = [path.stat().st_size for path in Path(folder, "run", "profile_traces").iterdir()]
    recorded, others, ends = [], [], []  # of each range, seconds
    for first in firsts[1:]:
        following, warming_up = first + STEPS_OF_A_PROFILE, first + EVERY - 1
        recorded.append(statistics.median(timed.steps[first - 1 : following - 1]))
        others.append(statistics.median(timed.steps[following - 1 : warming_up - 1]))
        ends.append(timed.afterwards[following - 2] / STEPS_OF_A_PROFILE)
    rows = [
        (name, *spread([1000 * each for each in seconds], ",.1f"))
        for name, seconds in (
            ("a step", others),
            ("a step that is recorded", recorded),
            ("the end of a range, for each of its steps", ends),
        )
    ]
    print_table(("", "ms of the processor", "quartiles"), rows)
    ratio, quartiles = spread([a / b for a, b in zip(recorded, others, strict=True)], ".2f")
    print(f"\nrecorded / not: {ratio} ({quartiles}), median of {flags.ranges} ranges")
    print(f"a trace has {statistics.mean(traces) / STEPS_OF_A_PROFILE / 1e6:.2f} MB a step")


def train(settings: list[str], firsts: list[int], folder: Path) -> TimedProfiler:
    """Trains, recording the ranges that begin at these steps, and as far as another one would begin."""
    ranges = ",".join(f"{first}-{first + STEPS_OF_A_PROFILE - 1}" for first in firsts)
    total = firsts[-1] + EVERY - 1
    own = [f"profile_steps={ranges}", f"num_steps={total + 1}", f"report_interval={total + 1}"]
    config = read_settings([*settings, *own, f"ckpt_save_path={folder}/run"])
    terminal = sys.stdout
    with Path(folder, "log").open("w") as log, redirect_stdout(log), join() as processes:
        run = build_run(config, Job(processes))
        timed = TimedProfiler(run.profiler, total, terminal)
        with suppress(Over):
            train_loop(replace(run, profiler=timed, batches=timed.paced(run.batches)))
    return timed


if __name__ == "__main__":
    main()
