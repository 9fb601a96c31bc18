"""What a save costs the training, in place and beside it; a part of `checkpoints.py`.

Runs of twenty steps take turns, one kind after the other. Each saves twice: the first time takes the memory for the
copies, the second is what most of a run's saves are like. A save beside the training may block a step when it starts
and when its end is noted, and what it does meanwhile may slow the steps down; the two are told apart.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import Processes, join_processes
from pretraining.launch.layout import resolve_layout
from pretraining.train.loop import train_loop
from scripts.benchmark.common import Table, in_turn, spread, start_run, synchronize

FIRST_SAVE, SECOND_SAVE, LAST_STEP = 5, 15, 21
FOLLOWING = 5
"""Steps after a save, and before the second one, that are looked at."""


@dataclass(frozen=True)
class Cost:
    """Seconds that saves cost a run.

    Attributes:
        first: that the first one blocks the loop.
        blocked: that the second one does, and what follows it until it is committed.
        slowed: by which the steps after it take longer than as many before it.
        step: of a step before it.
    """

    first: float
    blocked: float
    slowed: float
    step: float


def compare(folder: Path, config: TrainConfig, runs: int) -> None:
    """Trains in turns with saves in place and beside the training, and prints what they cost.

    Args:
        folder: of the runs, removed.
        config: the settings.
        runs: of each kind.
    """
    costs: dict[bool, list[Cost]] = {False: [], True: []}
    with join_processes(resolve_layout({})) as processes:
        for number in in_turn(range(runs + 1)):
            for asynchronous in (False, True) if number % 2 else (True, False):
                cost = _train_and_save(folder, config, processes, asynchronous)
                if number:
                    costs[asynchronous].append(cost)
    table = Table("seconds", "blocked, first save", "blocked, later", f"longer next {FOLLOWING} steps", "a step before")
    for name, kind in (("in place", False), ("beside the training", True)):
        table.add(name, *(_with_quartiles([vars(cost)[field.name] for cost in costs[kind]]) for field in fields(Cost)))
    table.print()
    pairs = list(zip(costs[True], costs[False], strict=True))
    blocked = [ours.blocked / theirs.blocked for ours, theirs in pairs]
    whole = [(ours.blocked + ours.slowed) / (theirs.blocked + theirs.slowed) for ours, theirs in pairs]
    print(f"\nblocked, beside / in place: {_with_quartiles(blocked)}, median of {runs} runs")
    print(f"blocked and longer steps, beside / in place: {_with_quartiles(whole)}", flush=True)


def _train_and_save(folder: Path, config: TrainConfig, processes: Processes, asynchronous: bool) -> Cost:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    checkpoint = replace(config.checkpoint, ckpt_save_path=str(folder / "run"), async_save=asynchronous, keep_last=1)
    length = replace(config.run, num_steps=type(config.run.num_steps)(LAST_STEP, "steps"))
    waited, ended = [], []
    with (folder / "log").open("w") as log, redirect_stdout(log):
        run = start_run(replace(config, checkpoint=checkpoint, run=length), processes)
        manager = run.checkpoints
        maybe_save = manager.maybe_save

        def timed(state: Any, evaluation_loss: float | None) -> None:
            synchronize()
            began = time.perf_counter()
            maybe_save(state, evaluation_loss)
            ended.append(time.perf_counter())
            waited.append(ended[-1] - began)

        manager.maybe_save = timed  # type: ignore[method-assign]
        manager._interval = _At(FIRST_SAVE, SECOND_SAVE)  # type: ignore[assignment]
        train_loop(run)
    steps = [end - before - wait for before, end, wait in zip(ended, ended[1:], waited[1:], strict=False)]  # from 2 on
    ahead, after = (steps[first - 2 : first - 2 + FOLLOWING] for first in (SECOND_SAVE - FOLLOWING, SECOND_SAVE + 1))
    typical = statistics.median(ahead)
    return Cost(
        first=sum(waited[FIRST_SAVE - 1 : FIRST_SAVE + FOLLOWING - 1]),
        blocked=sum(waited[SECOND_SAVE - 1 : SECOND_SAVE + FOLLOWING]),
        slowed=sum(after) - FOLLOWING * typical,
        step=typical,
    )


class _At:
    """An interval that is due at some steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def is_due(self, state: Any) -> bool:
        return state.progress.steps in self._steps


def _with_quartiles(values: Sequence[float]) -> str:
    middle, quartiles = spread(list(values), ".3f")
    return f"{middle} ({quartiles})"
