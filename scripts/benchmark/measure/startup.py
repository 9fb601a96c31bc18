"""Seconds from the start of the process to the end of the first training step, and where they go.

    pretrain prepare --source=stdlib --vocab_size=4096 --output_path=data/demo
    python -m scripts.benchmark.measure.startup

The demo (or what other flags make of it) runs for one step, again and again in new processes: each time first without
an index of the data, then with the one that the run before left.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

DEMO = ("recipe=demo", "tracker=tensorboard", "progress=plain")
STARTED = "BENCHMARK_STARTED"
"""Variable that tells the measured process when it was started, in seconds since the epoch."""
PHASES = {
    "python": "interpreter, settings",
    "torch": "import torch",
    "imports": "import everything else",
    "rest": "processes, data, model, optimizer",
    "checkpoint": "find and load a checkpoint",
    "step": "first step",
}
"""By name, in words. They follow each other, so each lasts until the next begins; "rest" begins several times."""
MARKED = {
    "run.begin_start": ("checkpoint", "rest"),
    "build.load": ("checkpoint", "rest"),
    "rollback.train_loop": ("step", "end"),
}
"""Functions of `pretraining.train`, with the phase that each begins, and the one that follows it."""


def measured_run(settings: list[str]) -> None:
    """In the measured process: train a step as the command does, and print the seconds of each phase as JSON."""
    marks = [("python", float(os.environ[STARTED]))]

    def mark(phase: str) -> None:
        marks.append((phase, time.time()))

    from pretraining.cli import train_command
    from pretraining.config.command_line import load_train_config

    load_train_config(settings, {})
    mark("torch")
    import torch

    mark("imports")
    from pretraining.train import build, loop, rollback, run

    def during(module: Any, name: str, phase: str, then: str) -> None:
        """Let a function begin a phase, and its end begin the next one."""
        function: Callable[..., Any] = getattr(module, name)

        def marked(*arguments: Any, **named: Any) -> Any:
            mark(phase)
            result = function(*arguments, **named)
            mark(then)
            return result

        setattr(module, name, marked)

    step = loop.train_step

    def only_step(*arguments: Any) -> None:
        step(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        mark("end")
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, began), (_, ended) in pairwise(marks):
            seconds[phase] += ended - began
        print(json.dumps(seconds), flush=True)
        raise SystemExit  # an error ends the loop without a checkpoint

    modules = {"build": build, "rollback": rollback, "run": run}
    for path, (phase, then) in MARKED.items():
        module, _, name = path.partition(".")
        during(modules[module], name, phase, then)
    loop.train_step = only_step  # type: ignore[assignment]
    mark("rest")
    train_command(settings, {})


def start(settings: list[str], since: float | None = None) -> dict[str, float]:
    """Return the seconds of each phase in a process of its own.

    Args:
        settings: of training, as name=value.
        since: when the first phase begins, in seconds since the epoch; None = now.
    """
    result = subprocess.run(
        [sys.executable, "-m", "scripts.benchmark.measure.startup", "measure", *settings],
        cwd=Path(__file__).parents[3],
        env={**os.environ, STARTED: repr(since or time.time())},
        stdout=subprocess.PIPE,
        text=True,
    )
    if result.returncode:
        sys.exit("the measured process failed: its error stands above")
    seconds: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return seconds


def rows_of(*kinds: Sequence[dict[str, float]]) -> list[tuple[str, ...]]:
    """Return rows of a table: the median seconds of each phase, and of their sum, in a column per kind of start."""
    phases = PHASES | {"all": "until the first step is done"}
    columns = [[seconds | {"all": sum(seconds.values())} for seconds in starts] for starts in kinds]
    return [
        (text, *(f"{statistics.median(seconds[phase] for seconds in starts):.2f}" for starts in columns))
        for phase, text in phases.items()
    ]


def main() -> None:
    from scripts.benchmark.common import (
        LENGTH,
        Number,
        announce,
        flag_parser,
        parse_with_settings,
        print_table,
        read_settings,
    )

    parser = flag_parser("Seconds to the first step.", rounds=Number(3, "starts of each kind"))
    flags, settings = parse_with_settings(parser, (*LENGTH, "index_path"))
    read_settings([*DEMO, *settings])
    announce(flags)
    cold, warm = [], []
    for _ in range(flags.rounds):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            run = [*DEMO, f"ckpt_save_path={folder}/run", f"index_path={folder}/index", *settings]
            Path(folder, "index").mkdir()
            cold.append(start(run))
            warm.append(start(run))
    print(f"\nmedian of {flags.rounds} starts, in seconds")
    print_table(("", "without an index", "with an index"), rows_of(cold, warm))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        from pretraining.errors import PretrainError

        try:
            measured_run(sys.argv[2:])
        except PretrainError as error:
            sys.exit(f"error: {error}")
    else:
        main()
