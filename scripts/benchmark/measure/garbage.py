"""What Python's garbage collector takes from training when it runs by itself, and every `--gc_interval` steps.

    OMP_NUM_THREADS=1 python -m scripts.benchmark.measure.garbage
    OMP_NUM_THREADS=1 python -m scripts.benchmark.measure.garbage --steps=1000 --gc_interval=100 --model_variant=125m

By default a deep and narrow model, whose steps make many objects and are short. Each of the two ways has a process of
its own. Times are of the processor, so that other programs hardly disturb; nothing is reported or saved meanwhile.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.benchmark.common import (
    LENGTH,
    Number,
    Over,
    announce,
    in_turn,
    parse,
    print_table,
    read_settings,
    train_project,
)

NARROW = ("model_variant=tiny", "num_hidden_layers=32", "hidden_size=32", "num_attention_heads=4", "vocab_size=256")
SETTINGS = ("use_dummy_dataset=true", "tracker=none", "seq_length=64", "batch_size=2", *NARROW)
OWN = (*LENGTH, "report_interval")
HEADER = (
    "`--gc_interval`",
    "in the collector",
    "of a step",
    "longest pause",
    "collections",
    "objects freed by the first",
    "by the others",
)


@dataclass
class Collections:
    """What the collector did; its `note` is one of `gc.callbacks`.

    Attributes:
        seconds: of the processor, that each collection took.
        freed: objects, by each.
    """

    seconds: list[float] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    _began: float = 0.0

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds.append(time.thread_time() - self._began)
            self.freed.append(info["collected"])


def measure(settings: list[str], steps: int) -> tuple[Collections, float]:
    """Trains; what the collector did in the first steps of a run, and the processor seconds of them all."""
    collections, done, began, spent = Collections(), 0, 0.0, 0.0

    def before_step(loss: float | None) -> None:
        nonlocal done, began, spent
        if done == 0:
            gc.callbacks.append(collections.note)
            began = time.process_time()
        if done == steps:
            spent = time.process_time() - began
            gc.callbacks.remove(collections.note)
            raise Over
        done += 1

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        limits = [f"num_steps={steps + 1}", f"report_interval={steps + 1}"]
        config = read_settings([*settings, *limits, f"ckpt_save_path={folder}/run"])
        with Path(folder, "log").open("w") as log, redirect_stdout(log):
            train_project(config, before_step)
    return collections, spent


def in_new_process(*arguments: Any) -> tuple[Collections, float]:
    """`measure` where no earlier run has left objects behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(measure, *arguments).result()


def main() -> None:
    flags, rest = parse(
        "What Python's garbage collector takes from training.", OWN, steps=Number(400, "optimizer steps")
    )
    settings = [*SETTINGS, *rest]
    every = read_settings(settings).run.gc_interval
    if every == 0:
        sys.exit("error: --gc_interval=0 is what the interval is compared with: give another one")
    announce(flags)
    rows, step_seconds = [], []
    for interval in in_turn((0, every)):
        collections, spent = in_new_process([*settings, f"gc_interval={interval}"], flags.steps)
        seconds = sum(collections.seconds)
        step_seconds.append(spent / flags.steps)
        rows.append(
            (
                str(interval),
                f"{1000 * seconds:,.0f} ms, {1000 * seconds / flags.steps:.2f} ms a step",
                f"{seconds / spent:.1%}",
                f"{1000 * max(collections.seconds, default=0.0):.1f} ms",
                f"{len(collections.seconds):,}",
                f"{sum(collections.freed[:1]):,}",
                f"{sum(collections.freed[1:]):,}",
            )
        )
    by_itself, at_intervals = (f"{1000 * each:.0f}" for each in step_seconds)
    print(f"\n{flags.steps} steps of {by_itself} and {at_intervals} ms of processor time")
    print_table(HEADER, rows)


if __name__ == "__main__":
    main()
