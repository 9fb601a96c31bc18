"""What the benchmarks share: the machine in words, settings from flags, and races between two programs.

A race starts each contender in a process of its own and lets them train in turns, a few steps each, while the other
waits: A B A B ... Whatever else the machine does then slows down both, and the ratio of neighbouring turns means
something even where the absolute numbers do not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pretraining.config.batch import plan_batch
from pretraining.config.flags import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.data.dataset import build_loader
from pretraining.errors import ConfigError
from pretraining.model.flops import parameter_count
from pretraining.parallel.precision import compute_dtype
from pretraining.parallel.processes import join_processes
from pretraining.train.build import build_run
from pretraining.train.loop import train_loop

# A constant learning rate and no decay: contenders whose schedules and parameter groups differ in details then still
# do the same updates, and their losses can be compared. Nothing is evaluated or saved before the race is over.
RACE = ("use_dummy_dataset=true", "warmup_steps=0", "min_lr_ratio=1", "weight_decay=0", "report_interval=10")
ON_GPU = ("model_variant=125m", "seq_length=1024", "batch_size=16")
ON_CPU = ("model_variant=tiny", "vocab_size=4096", "seq_length=256", "batch_size=2", "global_batch_size=4")


class Over(Exception):
    """Enough was measured; a contender that it passes through saves nothing."""


class Turn:
    """A contender's side of a race.

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
        """Call before each optimizer step: between turns, tells how long the last one took, and waits for the next.

        Args:
            loss: the mean loss that was last reported, if any.

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
        loss: reported at the end.
    """

    seconds: list[float]
    loss: float


def parse(description: str, **numbers: tuple[int, str]) -> tuple[argparse.Namespace, list[str]]:
    """Read a benchmark's own integer flags (name = (default, help)); the rest are settings of training.

    Returns:
        The flags, and the settings as `name=value`.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Any other --name=value is a setting of training, as in `pretrain train --help`.",
        allow_abbrev=False,
    )
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=_positive, default=default, help=f"{text} (default {default})")
    flags, rest = parser.parse_known_args()
    return flags, [argument.lstrip("-") for argument in rest]


def read_settings(settings: Sequence[str]) -> TrainConfig:
    """The configuration of a run; a mistake in it ends the benchmark."""
    try:
        return load_train_config(settings)
    except ConfigError as error:
        sys.exit(f"error: {error}")


def announce() -> None:
    """Print on what this runs, and what was typed."""
    print(f"machine   {machine()}")
    print(f"command   python {' '.join(sys.argv)}", flush=True)


def machine() -> str:
    """GPU, CPU, cores, threads and versions, in a line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [
        f"{_cpu_name()}, {cores} cores, {torch.get_num_threads()} threads",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
    ]
    if torch.cuda.is_available():
        parts.insert(0, torch.cuda.get_device_name())
    return "; ".join(parts)


def device() -> torch.device:
    """Where contenders compute."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    """Wait until the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def race(contenders: Mapping[str, Contender], settings: Sequence[str], rounds: int, steps: int) -> None:
    """Let two contenders train in turns, and print what came of it.

    Args:
        contenders: name -> function that trains, with a call of `turn.before_step` before each step; the first one's
            speed is given relative to the second's. Functions of a module, since they run in new processes.
        settings: of training, on top of the defaults above.
        rounds: turns of each that count; one more comes before them, to warm up.
        steps: of a turn.
    """
    announce()
    defaults = ON_GPU if torch.cuda.is_available() else ON_CPU
    config = read_settings([*RACE, *defaults, f"num_steps={(rounds + 1) * steps + 1}", *settings])
    print(f"model     {_describe(config)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        lanes = run_race(contenders, config, Path(folder), rounds, steps)
    tokens = plan_batch(config.batch, 1).global_batch_size * config.data.seq_length * steps
    rows = [
        (name, *spread([tokens / s for s in lane.seconds], ",.0f"), f"{lane.loss:.4f}") for name, lane in lanes.items()
    ]
    print("\n" + markdown_table(("", "tokens/s", "quartiles", "loss at the end"), rows))
    first, second = lanes.values()
    median, quartiles = spread([b / a for a, b in zip(first.seconds, second.seconds, strict=True)], ".3f")
    print(f"\n{' / '.join(lanes)}: {median} ({quartiles}), median of {rounds} rounds of {steps} steps each")


def train_project(config: TrainConfig, before_step: Callable[[float | None], None]) -> None:
    """Train with the project's own loop and everything that belongs to it, on one device.

    Args:
        config: the settings.
        before_step: called before each step with the loss that was last reported; may end the run with `Over`.
    """
    with join_processes(0, 1, 0, 1, {}) as processes:
        run = build_run(config, processes)

        def paced() -> Generator[StepBatch, None, None]:
            with closing(run.batches) as batches:
                while True:
                    before_step(run.observer.last_loss)
                    yield next(batches)

        try:
            train_loop(replace(run, batches=paced()))
        except Over:
            return


def batches_in_memory(config: TrainConfig, shape: LlamaShape) -> list[list[MicroBatch]]:
    """The micro-batches of every step that `train_project` takes, made in advance."""
    plan = plan_batch(config.batch, 1)
    data = replace(config.data, num_workers=0)
    with build_loader(None, data, plan, 0, config.run.seed, shape.vocab_size) as loader:
        return [next(loader).micro_batches for _ in range(int(config.run.num_steps.amount))]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for documents; the first column is aligned left, numbers right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *rest]) + " |"

    return "\n".join(line(cells) for cells in (header, rule, *rows))


def run_race(
    contenders: Mapping[str, Contender], config: TrainConfig, folder: Path, rounds: int, steps: int
) -> dict[str, Lane]:
    """Let contenders train in turns, each in its own folder under `folder`; returns their results."""
    processes = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    for name, contender in contenders.items():
        ends[name], other_end = processes.Pipe()
        own = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=str(folder / name)))
        process = processes.Process(target=_contend, args=(contender, own, other_end, steps, folder / f"{name}.log"))
        process.start()
        other_end.close()
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    try:
        for _ in range(rounds + 1):
            for name, end in ends.items():
                end.send(True)
                turns[name].append(end.recv())
        for end in ends.values():
            end.send(False)
    except (EOFError, ConnectionError):
        sys.exit(f"a contender ended early: {name}. Its error stands above.")
    finally:
        for end in ends.values():
            end.close()
        for child in multiprocessing.active_children():
            child.join()
    return {name: Lane([seconds for seconds, _ in all[1:]], all[-1][1]) for name, all in turns.items()}


def _contend(contender: Contender, config: TrainConfig, connection: Connection, steps: int, log: Path) -> None:
    """A contender's process; what it prints goes to a file, on both sides alike."""
    with log.open("w") as file, redirect_stdout(file):
        try:
            contender(config, Turn(connection, steps))
        except (Over, EOFError, BrokenPipeError):  # the last two: the referee has gone
            return


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _describe(config: TrainConfig) -> str:
    shape, plan = resolve_shape(config.model), plan_batch(config.batch, 1)
    precision = str(compute_dtype(config.parallel, device())).removeprefix("torch.")
    return (
        f"{config.model.model_variant}, {parameter_count(shape):,} parameters, {precision}; a step is "
        f"{plan.grad_accum_steps} micro-batches of {plan.micro_batch_size} x {config.data.seq_length} tokens"
    )


def spread(values: list[float], form: str) -> tuple[str, str]:
    """Median, and first to third quartile."""
    if len(values) < 2:
        return f"{values[0]:{form}}", "-"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}} to {high:{form}}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
