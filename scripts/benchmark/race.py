"""Races between programs that train, for the benchmarks that compare two of them.

A race starts each contender in processes of its own and lets them train in turns, a few steps each, while the others
wait: A B A B ... Whatever else the machine does then slows down both, and the ratio of neighbouring turns means
something even where the absolute numbers do not.

    referee --True--> every process of A --(seconds, loss)--> referee --True--> every process of B --> ...

Each process has a pipe to the referee, and sleeps in it until its next turn: who waits uses no core, whatever library
would wait for its peers with a busy loop. A turn lasts until the last of a contender's processes has done its steps.
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
    Table,
    announce,
    describe,
    end_if_checked,
    flag_parser,
    parse_with_settings,
    read_settings,
    spread,
    synchronize,
    train_project,
)

ON_GPU = ("model_variant=125m", "seq_length=1024", "batch_size=16")
ON_CPU = ("model_variant=tiny", "vocab_size=4096", "seq_length=256", "batch_size=2", "global_batch_size=4")
# A constant learning rate and no decay: contenders whose schedules and parameter groups differ in details then still
# do the same updates, and their losses can be compared. Nothing is evaluated or saved before the race is over.
RACE = ("use_dummy_dataset=true", "warmup_steps=0", "min_lr_ratio=1", "weight_decay=0", "report_interval=10")


class Turn:
    """The side of a race that one of a contender's processes sees.

    Args:
        connection: to the referee.
        steps: of a turn.
    """

    def __init__(self, connection: Connection, steps: int) -> None:
        self._connection = connection
        self._steps_of_turn = steps
        self._steps = 0
        self._began = 0.0

    def before_step(self, loss: float | None) -> None:
        """Before each optimizer step: report a finished turn to the referee, and wait for the next one.

        Args:
            loss: the mean loss that was last reported, if any; rank 0's is shown.

        Raises:
            Over: there is no next turn.
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
        seconds: of each turn, the first (warm-up) left out.
        loss: that was last reported before the last turn was over.
    """

    seconds: list[float]
    loss: float | None


def project(config: TrainConfig, turn: Turn) -> None:
    """Train as a contender with the project's own loop and everything that belongs to it."""
    train_project(config, turn.before_step)


def parse_race(description: str, processes: int = 1) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of a race, and settings of training. `processes`: of each contender, by default."""
    parser = flag_parser(
        description,
        rounds=Number(16, "turns of each that count"),
        steps=Number(10, "optimizer steps of a turn"),
        processes=Number(processes, "of each contender, on this machine"),
    )
    return parse_with_settings(parser)


def race(contenders: Mapping[str, Contender], settings: Sequence[str], flags: argparse.Namespace) -> None:
    """Let two contenders train in turns, and print their speeds, their ratio and their losses.

    Args:
        contenders: name -> function that trains, with a call of `turn.before_step` before each step; the first one's
            speed is given relative to the second's. Functions of a module, since they run in new processes.
        settings: of training, on top of the defaults above.
        flags: those of `parse_race`; one more turn of each comes before those that count, to warm up.
    """
    rounds, steps, processes = flags.rounds, flags.steps, flags.processes
    config = race_settings(settings, flags)
    end_if_checked(flags)
    if processes > 1:
        _share_cores(processes)
    announce(flags)
    print(f"model     {describe(config, processes)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        lanes = run_race(contenders, config, Path(folder), rounds, steps, processes)
    tokens = resolve_batch_sizes(config.batch, processes).global_batch_size * config.data.seq_length * steps
    table = Table("", "tokens/s", "quartiles", "loss at the end")
    for name, lane in lanes.items():
        median, quartiles = spread([tokens / seconds for seconds in lane.seconds], ",.0f")
        table.add(name, median, quartiles, f"{lane.loss:.4f}")
    table.print()
    first, second = lanes.values()
    median, quartiles = spread([b / a for a, b in zip(first.seconds, second.seconds, strict=True)], ".3f")
    ratio = Table("ratio", "median", "quartiles", "rounds", "steps of each")
    ratio.add(" / ".join(lanes), median, quartiles, str(rounds), str(steps))
    print(f"\n{' / '.join(lanes)}: {median} ({quartiles}), median of {rounds} rounds of {steps} steps each")


def race_settings(settings: Sequence[str], flags: argparse.Namespace) -> TrainConfig:
    """Return the configuration of a race; one that cannot be raced ends the benchmark."""
    rounds, steps = flags.rounds, flags.steps
    if torch.cuda.is_available() and flags.processes > torch.cuda.device_count():
        sys.exit(f"error: --processes={flags.processes}: each takes a GPU, and there are {torch.cuda.device_count()}")
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
        for child in multiprocessing.active_children():  # those that wait for the one that has ended
            child.terminate()
        sys.exit(f"a contender ended early: {name}. Its error stands above.")
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
    port = port_of_name(str(log))  # the folder is new, and outgoing connections are given none of these ports
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
    """Let a contender train; return the seconds until its last process was done, and the loss that rank 0 reported."""
    for end in team:
        end.send(True)
    outcomes: dict[Connection, tuple[float, float | None]] = {}
    while len(outcomes) < len(team):
        # The one that is done, or gone, first: a process whose peer is gone may not be done for long.
        ready = wait([end for end in team if end not in outcomes])
        outcomes |= {end: end.recv() for end in team if end in ready}
    return max(seconds for seconds, _ in outcomes.values()), outcomes[team[0]][1]


def _contend(
    contender: Contender, config: TrainConfig, connection: Connection, steps: int, variables: dict[str, str], log: Path
) -> None:
    """Run a contender's process; what it prints goes to a file, on both sides alike."""
    os.environ.update(variables)
    with log.open("w") as file, redirect_stdout(file):
        try:
            contender(config, Turn(connection, steps))
        except (Over, EOFError, BrokenPipeError):  # the last two: the referee has gone
            file.flush()
            # While it is taken apart, DistributedDataParallel may wait for a thread of gloo, which waits for Python's
            # lock (seen with torch 2.13).
            os._exit(0)


def _launcher_variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return what torchrun would set; nothing for one process, which is started without it."""
    if processes == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _share_cores(processes: int) -> None:
    """Share out threads: a contender's processes compute at the same time, with as many together as one would have."""
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    torch.set_num_threads(int(threads))
