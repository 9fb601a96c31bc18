"""What the benchmarks share: the machine in words, settings from flags, the project's training loop, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TextIO, TypeVar

import torch

from pretraining.checkpoint.start_point import find_start
from pretraining.config.assignments import ALIASES
from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.command_line import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, parameter_count, resolve_shape
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.data.dataset import build_loader
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes, join_processes
from pretraining.errors import ConfigError
from pretraining.launch.layout import resolve_layout
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama
from pretraining.train.build import build_run
from pretraining.train.loop import Run, train_loop
from pretraining.train.open_data import open_data
from pretraining.train.plan import Job, lay_out
from scripts.benchmark.tables import markdown_table

ROOT = Path(__file__).parents[2]
"""Of the repository, from where every benchmark runs."""
RESULTS = "BENCHMARK_RESULTS"
"""Variable that names a file of JSON lines; every row of a table is added to it as soon as it is there."""
LENGTH = ("num_steps", "run_steps", "ckpt_save_path")
"""Settings of training that a benchmark chooses itself: how long it trains, and where."""


T = TypeVar("T")


ON_GPU = ("model_variant=125m", "seq_length=1024", "batch_size=16")
ON_CPU = ("model_variant=tiny", "vocab_size=4096", "seq_length=256", "batch_size=2", "global_batch_size=4")


class Over(Exception):
    """Enough was measured; a contender that it passes through saves nothing."""


class Number(NamedTuple):
    """An integer flag of a benchmark."""

    default: int
    help: str
    least: int = 1


def parse(description: str, own: Sequence[str] = LENGTH, **numbers: Number) -> tuple[argparse.Namespace, list[str]]:
    """Reads a benchmark's own integer flags; the rest are settings of training.

    Args:
        description: of the benchmark.
        own: settings of training that the benchmark chooses itself; nobody else may.
        numbers: the flags.

    Returns:
        The flags, and the settings as `name=value`.
    """
    return parse_with_settings(flag_parser(description, **numbers), own)


def parse_with_settings(
    parser: argparse.ArgumentParser, own: Sequence[str] = LENGTH, arguments: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """As `parse`, for a parser that has other flags too; `arguments` instead of the command line's."""
    parser.epilog = "Any other --name=value is a setting of training, as in `pretrain train --help`."
    flags, rest = parser.parse_known_args(arguments)
    settings = [argument.lstrip("-") for argument in rest]
    for setting in settings:
        name = setting_name(setting)
        if name in own:
            parser.error(f"--{name} is the benchmark's own choice: leave it out")
    return flags, settings


def setting_name(setting: str) -> str:
    """The setting that `name=value` is about, whatever the form of its name."""
    name = setting.partition("=")[0].rpartition(".")[2].replace("-", "_")
    return ALIASES[name].target if name in ALIASES else name


def flag_parser(description: str, **numbers: Number) -> argparse.ArgumentParser:
    """A parser of integer flags, which refuses what is too small before anything is measured."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for name, (default, text, least) in numbers.items():
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, help=f"{text} (default {default:,})")
    parser.add_argument(
        "--check_flags", action="store_true", help="refuse what cannot be measured, and measure nothing"
    )
    return parser


def read_settings(settings: Sequence[str], processes: int = 1) -> TrainConfig:
    """The configuration of a run; a mistake in it ends the benchmark, and so does a batch that cannot be dealt out."""
    try:
        config = load_train_config(["ckpt_save_path=run", *settings])  # a benchmark puts its own folder there
        resolve_batch_sizes(config.batch, processes)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    return config


def check_processes(processes: int) -> None:
    """Ends the benchmark where there are fewer GPUs than processes that would each take one."""
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        sys.exit(f"error: --processes={processes}: each takes a GPU, and there are {torch.cuda.device_count()} here")


def announce(flags: argparse.Namespace) -> None:
    """Prints on what this runs, and what was typed. A benchmark has checked its flags when it calls this."""
    end_if_checked(flags)
    print(f"machine   {machine()}")
    print(f"command   {command()}", flush=True)


def end_if_checked(flags: argparse.Namespace) -> None:
    """Ends the process, well, where `--check_flags` asked for no more than what was done by now."""
    if flags.check_flags:
        print("flags     are fine; nothing is measured")
        sys.exit()


def describe(config: TrainConfig, processes: int) -> str:
    """Return the model, the precision and the work of a step, in a line."""
    shape, plan = resolve_shape(config.model), resolve_batch_sizes(config.batch, processes)
    precision = str(compute_dtype(config.parallel, device())).removeprefix("torch.")
    number = "1 micro-batch" if plan.grad_accum_steps == 1 else f"{plan.grad_accum_steps} micro-batches"
    of_each = f" on each of {processes} processes" if processes > 1 else ""
    return (
        f"{config.model.model_variant}, {parameter_count(shape):,} parameters, {precision}; a step is "
        f"{number} of {plan.micro_batch_size} x {config.data.seq_length} tokens{of_each}"
    )


def announce_rest(seconds: float, file: TextIO | None = None) -> None:
    """Says how long it takes from here on, judged by what was done to warm up; `file` in place of standard output."""
    rest = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
    print(f"takes     about {rest}", flush=True, file=file)


def in_turn(parts: Sequence[T]) -> Iterator[T]:
    """The parts of a benchmark, one after the other; says after the first how long the others will take."""
    began = time.perf_counter()
    for number, part in enumerate(parts):
        if number == 1:
            announce_rest((len(parts) - 1) * (time.perf_counter() - began))
        yield part


def command() -> str:
    """What was typed."""
    return " ".join(["python", *sys.orig_argv[1:]])


def machine() -> str:
    """GPU, CPU, cores, threads and versions, in a line."""
    cores = len(os.sched_getaffinity(0))
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
    rank, _ = place()
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    """Waits until the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def place() -> tuple[int, int]:
    """Rank of this process and number of all: one, unless a race has started several and says so in the environment."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join() -> Iterator[Processes]:
    """Joins the other processes of a contender, all of which are on this machine."""
    with join_processes(resolve_layout()) as joined:
        yield joined


def start_run(config: TrainConfig, processes: Processes) -> Run:
    """Put a run together that goes on from the newest checkpoint of its folder, if it has one."""
    job = Job(config, processes, lay_out(config, processes), open_data(config, processes))
    return build_run(job, find_start(config.checkpoint))


def train_project(config: TrainConfig, before_step: Callable[[float | None], None]) -> None:
    """Trains with the project's own loop and everything that belongs to it.

    Args:
        config: the settings.
        before_step: called before each step with the loss that was last reported; may end the run with `Over`.
    """
    with join() as processes:
        run = start_run(config, processes)

        def paced() -> Generator[StepBatch, None, None]:
            with closing(run.batches) as batches:
                while True:
                    before_step(run.observer.last_loss)
                    yield next(batches)

        try:
            train_loop(replace(run, batches=paced()))
        except Over:
            return


def initial_model(config: TrainConfig) -> Llama:
    """The whole model where contenders compute, with the weights that the project starts from."""
    shape = resolve_shape(config.model)
    with torch.device("meta"):
        model = Llama(shape, config.loss)
    model.to_empty(device=device())
    initialize_weights(model, shape, config.run.seed, device())
    return model


def batches_in_memory(
    config: TrainConfig, shape: LlamaShape, rank: int = 0, processes: int = 1
) -> list[list[MicroBatch]]:
    """The micro-batches of every step that `train_project` takes on a rank, made in advance."""
    plan = resolve_batch_sizes(config.batch, processes)
    data = replace(config.data, num_workers=0)
    with build_loader(None, data, plan, rank, config.run.seed, shape.vocab_size) as loader:
        return [next(loader).micro_batches for _ in range(int(config.run.num_steps.amount))]


class Table:
    """A table that grows as it is measured: a row that is there is not lost with those that are not.

    Args:
        header: names of the columns; the first is what a row is about.
    """

    def __init__(self, *header: str) -> None:
        self.header = header
        self.rows: list[Sequence[str]] = []

    def add(self, *row: str) -> None:
        """Adds a row, and keeps it in the file of results, if there is one."""
        self.rows.append(row)
        if path := os.environ.get(RESULTS):
            kept = {"command": command(), "machine": machine(), "row": dict(zip(self.header, row, strict=True))}
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept) + "\n")

    def print(self) -> None:
        """Prints what is there, for documents."""
        print("\n" + markdown_table(self.header, self.rows), flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose rows came all at once, and keeps them."""
    table = Table(*header)
    for row in rows:
        table.add(*row)
    table.print()


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least:,} or more")
        return value

    return whole_number


def spread(values: list[float], form: str) -> tuple[str, str]:
    """Median, and first to third quartile."""
    if len(values) < 2:
        return f"{values[0]:{form}}", "-"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}} to {high:{form}}"


def _cpu_name() -> str:
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()
