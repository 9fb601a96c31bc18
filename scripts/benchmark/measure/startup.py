"""Seconds from the start of the process to the end of the first training step, and where they go.

    pretrain prepare --source=stdlib --vocab_size=4096 --output_path=data/demo
    python -m scripts.benchmark.measure.startup

It runs the demo (or what other flags make of it) for one step, again and again in new processes: each time first
without an index of the data, then with the one that the run before left.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

DEMO = ("recipe=demo", "tracker=tensorboard", "progress=plain")
STARTED = "BENCHMARK_STARTED"
"""Variable that tells the measured process when it was started, in seconds since the epoch."""

# Functions of `pretraining.train`, the phase that each begins, and the one that it ends with.
MARKED = (
    ("run.begin_start", "find", "rest"),
    ("run.open_data", "data", "rest"),
    ("build.build_model", "model", "rest"),
    ("build.initialize_parameters", "model", "rest"),
    ("build.load", "load", "rest"),
    ("rollback.train_loop", "step", None),
)
PHASES = {
    "python": "interpreter, settings",
    "torch": "import torch",
    "imports": "import everything else",
    "join": "join the processes, tokenizer, lease",
    "find": "find a checkpoint",
    "data": "list, index and map the data",
    "model": "build, shard and initialise the model",
    "rest": "optimizer, loader, trackers",
    "load": "load the checkpoint, compare checksums",
    "step": "first step",
}


def measured_run(settings: list[str]) -> None:
    """In the measured process: train a step as the command does, and print the seconds of each phase as JSON.

    The phases follow each other, so each lasts until the next begins.
    """
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

    def during(module: Any, name: str, phase: str, then: str | None) -> None:
        """Lets a function begin a phase, and ends it if `then` names the next one."""
        function: Callable[..., Any] = getattr(module, name)

        def marked(*arguments: Any, **named: Any) -> Any:
            mark(phase)
            result = function(*arguments, **named)
            if then is not None:
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
    for name, phase, then in MARKED:
        module, _, function_name = name.partition(".")
        during(modules[module], function_name, phase, then)
    loop.train_step = only_step  # type: ignore[assignment]
    mark("join")
    train_command(settings, {})


def start(settings: list[str], since: float | None = None) -> dict[str, float]:
    """Seconds of each phase in a process of its own.

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


def main() -> None:
    from scripts.benchmark.common import LENGTH, Number, announce, in_turn, parse, print_table, read_settings

    own = (*LENGTH, "index_path")
    flags, settings = parse("Seconds to the first step.", own, rounds=Number(3, "starts of each kind"))
    read_settings([*DEMO, *settings])
    announce(flags)
    cold, warm = [], []
    for _ in in_turn(range(flags.rounds)):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            run = [*DEMO, f"ckpt_save_path={folder}/run", f"index_path={folder}/index", *settings]
            Path(folder, "index").mkdir()
            cold.append(start(run))
            warm.append(start(run))
    print(f"\nmedian of {flags.rounds} starts, in seconds")
    new_run = {phase: text for phase, text in PHASES.items() if phase not in ("find", "load")}  # there is nothing to
    rows = [(text, _median(cold, phase), _median(warm, phase)) for phase, text in new_run.items()]
    totals = [f"{statistics.median(sum(run.values()) for run in runs):.2f}" for runs in (cold, warm)]
    print_table(("", "without an index", "with an index"), [*rows, ("until the first step is done", *totals)])


def _median(runs: list[dict[str, float]], phase: str) -> str:
    return f"{statistics.median(run[phase] for run in runs):.2f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        from pretraining.errors import PretrainError

        try:
            measured_run(sys.argv[2:])
        except PretrainError as error:
            sys.exit(f"error: {error}")
    else:
        main()
