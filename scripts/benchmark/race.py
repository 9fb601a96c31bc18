"""Races between two programs that train.

A race starts each contender in its own processes. The contenders train in turns of a few steps: A B A B ... Other load
on the machine then slows both down, so the ratio of neighbouring turns is meaningful even if the absolute numbers vary.

    referee --True--> every process of A --(seconds, loss)--> referee --True--> every process of B --> ...

Each process waits for its next turn by reading from a pipe, which uses no core, unlike the busy loops of some
libraries. A turn lasts until the last process of a contender has done its steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.training import TrainConfig
from pretraining.launch.layout import port_of_name
from scripts.benchmark.common import (
    Number,
    Over,
    announce,
    describe,
    flag_parser,
    parse_with_settings,
    print_table,
    read_settings,
    spread,
    synchronize,
    train_project,
)

ON_GPU = ("model_variant=125m", "seq_length=1024", "batch_size=16")
ON_CPU = ("model_variant=tiny", "vocab_size=4096", "seq_length=256", "batch_size=2", "global_batch_size=4")
# With a constant learning rate and no weight decay, details of schedules and parameter groups do not matter: all
# contenders do the same updates, and their losses can be compared. There are no evaluations and no saves.
RACE = ("use_dummy_dataset=true", "warmup_steps=0", "min_lr_ratio=1", "weight_decay=0", "report_interval=10")


class Turn:
    """A contender's process in a race.

    Args:
        connection: pipe to the referee.
        steps: steps of a turn.
    """

    def __init__(self, connection: Connection, steps: int) -> None:
        self._connection = connection
        self._steps_of_turn = steps
        self._steps = 0
        self._began = 0.0

    def before_step(self, loss: float | None) -> None:
        """Report a finished turn to the referee and wait for the next turn; called before each optimizer step.

        Args:
            loss: last reported mean loss, if any; the result shows that of rank 0.

        Raises:
            Over: the race is over.
        """
        if self._steps % self._steps_of_turn == 0:
            if self._steps:
                synchronize()
                self._connection.send((time.perf_counter() - self._began, loss))
            if not self._connection.recv():
                raise Over
            self._began = time.perf_counter()
        self._steps += 1


Contender = Callable[[TrainConfig, Turn], None]


@dataclass(frozen=True)
class Lane:
    """A contender's results.

    Attributes:
        seconds: seconds per turn, without the first turn (warm-up).
        loss: last reported loss.
    """

    seconds: list[float]
    loss: float | None


def project(config: TrainConfig, turn: Turn) -> None:
    """Train as a contender with the project's loop and all of its components."""
    train_project(config, turn.before_step)


def parse_race(description: str, processes: int = 1) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of a race, and settings of training; `processes` is the default per contender."""
    parser = flag_parser(
        description,
        rounds=Number(16, "measured turns per contender"),
        steps=Number(10, "optimizer steps per turn"),
        processes=Number(processes, "processes per contender, on this machine"),
    )
    return parse_with_settings(parser)


def race(contenders: Mapping[str, Contender], settings: Sequence[str], flags: argparse.Namespace) -> None:
    """Let two contenders train in turns, and print their speeds, the ratio of speeds and their losses.

    Args:
        contenders: name -> function that trains and calls `turn.before_step` before each step. The functions run in new
            processes, so they must be defined in a module. The ratio is the first speed over the second.
        settings: settings of training, which override the defaults above.
        flags: flags of `parse_race`; each contender has an additional first turn as warm-up.
    """
    rounds, steps, processes = flags.rounds, flags.steps, flags.processes
    config = race_settings(settings, flags)
    if processes > 1:
        _share_cores(processes)
    announce()
    print(f"model     {describe(config, processes)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        lanes = run_race(contenders, config, Path(folder), rounds, steps, processes)
    tokens = resolve_batch_sizes(config.batch, processes).global_batch_size * config.data.seq_length * steps
    rows = [
        (name, *spread([tokens / seconds for seconds in lane.seconds], ",.0f"), f"{lane.loss:.4f}")
        for name, lane in lanes.items()
    ]
    print_table(("", "tokens/s", "quartiles", "loss at the end"), rows)
    first, second = lanes.values()
    median, quartiles = spread([b / a for a, b in zip(first.seconds, second.seconds, strict=True)], ".3f")
    print(f"\n{' / '.join(lanes)}: {median} ({quartiles}), median of {rounds} rounds of {steps} steps each")


def race_settings(settings: Sequence[str], flags: argparse.Namespace) -> TrainConfig:
    """Return the configuration of a race; exit if it is unsuitable."""
    rounds, steps = flags.rounds, flags.steps
    if torch.cuda.is_available() and flags.processes > torch.cuda.device_count():
        sys.exit(f"error: --processes={flags.processes}: each needs a GPU, and there are {torch.cuda.device_count()}")
    defaults = ON_GPU if torch.cuda.is_available() else ON_CPU
    total = f"num_steps={(rounds + 1) * steps + 1}"
    config = read_settings([*RACE, *defaults, total, *settings], flags.processes)
    interval = config.report.report_interval
    if interval.unit != "steps" or not 0 < interval.amount <= rounds * steps:
        sys.exit(
            f"error: a race shows the last reported loss: --report_interval={interval} must be 1 to {rounds * steps}"
        )
    return config


def run_race(
    contenders: Mapping[str, Contender], config: TrainConfig, folder: Path, rounds: int, steps: int, processes: int = 1
) -> dict[str, Lane]:
    """Let contenders train in turns, each in its own folder under `folder`; return their results."""
    teams: dict[str, list[Connection]] = {}
    for name, contender in contenders.items():
        own = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=str(folder / name)))
        teams[name] = _start(contender, own, steps, processes, folder / name)
    turns: dict[str, list[tuple[float, float | None]]] = {name: [] for name in contenders}
    try:
        for _ in range(rounds + 1):
            for name, team in teams.items():
                turns[name].append(_take_turn(team))
        for name in teams:
            for end in teams[name]:
                end.send(False)
    except (EOFError, ConnectionError):
        for child in multiprocessing.active_children():  # the others would wait forever
            child.terminate()
        sys.exit(f"a contender failed: {name}. See its error above.")
    finally:
        for team in teams.values():
            for end in team:
                end.close()
        for child in multiprocessing.active_children():
            child.join()
    return {name: Lane([seconds for seconds, _ in all[1:]], all[-1][1]) for name, all in turns.items()}


def _start(contender: Contender, config: TrainConfig, steps: int, processes: int, log: Path) -> list[Connection]:
    """Start a contender's processes; return the referee's ends of their pipes, in the order of ranks."""
    context = multiprocessing.get_context("spawn")
    port = port_of_name(str(log))  # a new folder gives a new port, outside the range of outgoing connections
    ends: list[Connection] = []
    for rank in range(processes):
        end, other_end = context.Pipe()
        path = log.with_name(f"{log.name}.{rank}.log")
        variables = _launcher_variables(rank, processes, port)
        context.Process(target=_contend, args=(contender, config, other_end, steps, variables, path)).start()
        other_end.close()
        ends.append(end)
    return ends


def _take_turn(team: list[Connection]) -> tuple[float, float | None]:
    """Let a contender train; return the seconds until its last process was done, and the loss of rank 0."""
    for end in team:
        end.send(True)
    outcomes: dict[Connection, tuple[float, float | None]] = {}
    while len(outcomes) < len(team):
        # Take any process that is done or dead: if one died, its peers may hang.
        ready = wait([end for end in team if end not in outcomes])
        outcomes |= {end: end.recv() for end in team if end in ready}
    return max(seconds for seconds, _ in outcomes.values()), outcomes[team[0]][1]


def _contend(
    contender: Contender, config: TrainConfig, connection: Connection, steps: int, variables: dict[str, str], log: Path
) -> None:
    """Run a contender's process with its output in a file."""
    os.environ.update(variables)
    with log.open("w") as file, redirect_stdout(file):
        try:
            contender(config, Turn(connection, steps))
        except (Over, EOFError, BrokenPipeError):  # the last two: the referee exited
            file.flush()
            # Skip the destructor of DistributedDataParallel: it may deadlock with a thread of gloo that waits for
            # Python's lock (seen with torch 2.13).
            os._exit(0)


def _launcher_variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets; empty for one process."""
    if processes == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _share_cores(processes: int) -> None:
    """Divide the threads among a contender's processes, which compute at the same time."""
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    torch.set_num_threads(int(threads))
