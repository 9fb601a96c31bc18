"""What the benchmarks share: settings from flags, the machine in words, the project's training loop, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
from pretraining.train.plan import check_and_build_mesh, plan_run
from pretraining.train.preemption import StopRequests
from pretraining.train.run_status import RunStatusWriter
from scripts.benchmark.tables import markdown_table

ROOT = Path(__file__).parents[2]
"""The repository, from where every benchmark runs."""
RESULTS = "BENCHMARK_RESULTS"
"""Variable that names a file of JSON lines, to which every row of a table is added as soon as it is there."""
PRETRAIN = (sys.executable, "-c", "from pretraining.cli import main; main()")
"""The command `pretrain`, with this interpreter."""
LENGTH = ("num_steps", "run_steps", "ckpt_save_path")
"""Settings of training that a benchmark chooses itself: how long it trains, and where."""


class Over(Exception):
    """Enough was measured; a contender that it passes through saves nothing."""


class Number(NamedTuple):
    """An integer flag of a benchmark."""

    default: int
    help: str
    least: int = 1


def flag_parser(description: str, **numbers: Number) -> argparse.ArgumentParser:
    """Return a parser of integer flags, which refuses what is too small before anything is measured."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for name, (default, text, least) in numbers.items():
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, help=f"{text} (default {default:,})")
    parser.add_argument("--check_flags", action="store_true", help="check the flags, and measure nothing")
    return parser


def parse_with_settings(
    parser: argparse.ArgumentParser, own: Sequence[str] = LENGTH
) -> tuple[argparse.Namespace, list[str]]:
    """Return a benchmark's flags, and the rest as settings of training, `name=value`; those in `own` are refused."""
    parser.epilog = "Any other --name=value is a setting of training, as in `pretrain train --help`."
    flags, rest = parser.parse_known_args()
    settings = [argument.lstrip("-") for argument in rest]
    for name in map(setting_name, settings):
        if name in own:
            parser.error(f"--{name} is the benchmark's own choice: leave it out")
    return flags, settings


def setting_name(setting: str) -> str:
    """Return the setting that `name=value` is about, in whatever form it is named."""
    name = setting.partition("=")[0].rpartition(".")[2].replace("-", "_")
    return ALIASES[name].target if name in ALIASES else name


def read_settings(settings: Sequence[str], processes: int = 1) -> TrainConfig:
    """Return the configuration of a run; a mistake in it, or a batch that cannot be split, ends the benchmark."""
    try:
        config = load_train_config(["ckpt_save_path=run", *settings])  # a benchmark puts its own folder there
        resolve_batch_sizes(config.batch, processes)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    return config


def announce(flags: argparse.Namespace) -> None:
    """Print on what this runs, and what was typed; a benchmark has checked its flags when it calls this."""
    end_if_checked(flags)
    print(f"machine   {machine()}")
    print(f"command   {command()}", flush=True)


def end_if_checked(flags: argparse.Namespace) -> None:
    """End the process, with success, if `--check_flags` asked for no more."""
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


def command() -> str:
    """Return what was typed."""
    return " ".join(["python", *sys.orig_argv[1:]])


def machine() -> str:
    """Return GPU, CPU, cores, threads and versions, in a line."""
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
    """Return the device on which contenders compute."""
    rank, _ = place()
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    """Wait until the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def place() -> tuple[int, int]:
    """Return the rank of this process and the number of all: one, unless a race has started several."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join() -> Iterator[Processes]:
    """Join the other processes of a contender, all of which are on this machine."""
    with join_processes(resolve_layout()) as joined:
        yield joined


def start_run(config: TrainConfig, processes: Processes) -> Run:
    """Build a run that resumes from the newest checkpoint of its folder, if it has one."""
    mesh, data = check_and_build_mesh(config, processes), open_data(config, processes)
    plan = plan_run(config, processes, mesh, data, find_start(config.checkpoint))
    return build_run(plan, StopRequests(), RunStatusWriter(0, is_writer=False))


def train_project(config: TrainConfig, before_step: Callable[[float | None], None]) -> None:
    """Train with the project's own loop and everything that belongs to it.

    Args:
        config: the settings.
        before_step: called before each step with the loss that was last reported; may end the run with `Over`.
    """
    with join() as processes:
        run = start_run(config, processes)
        train_paced(run, lambda: before_step(run.observer.last_loss))


def train_paced(run: Run, before_step: Callable[[], None]) -> None:
    """Train a run with a call before each step, which may end it with `Over`."""

    def paced() -> Generator[StepBatch, None, None]:
        with closing(run.batches) as batches:
            while True:
                before_step()
                yield next(batches)

    with suppress(Over):
        train_loop(replace(run, batches=paced()))


def initial_model(config: TrainConfig) -> Llama:
    """Return the whole model where contenders compute, with the weights that the project starts from."""
    shape = resolve_shape(config.model)
    with torch.device("meta"):
        model = Llama(shape, config.loss)
    model.to_empty(device=device())
    initialize_weights(model, shape, config.run.seed, device())
    return model


def batches_in_memory(
    config: TrainConfig, shape: LlamaShape, rank: int = 0, processes: int = 1
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every step that `train_project` takes on a rank, made in advance."""
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
        """Add a row, and keep it in the file of results, if there is one."""
        self.rows.append(row)
        if path := os.environ.get(RESULTS):
            kept = {"command": command(), "machine": machine(), "row": dict(zip(self.header, row, strict=True))}
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept) + "\n")

    def print(self) -> None:
        """Print what is there, for documents."""
        print("\n" + markdown_table(self.header, self.rows), flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose rows came all at once, and keep them."""
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
    """Return the median, and the first to third quartile."""
    if len(values) < 2:
        return f"{values[0]:{form}}", "-"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}} to {high:{form}}"


def _cpu_name() -> str:
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()
