"""Parts that the benchmarks share: settings from flags, a line about the machine, the training loop, tables."""

from __future__ import annotations

import argparse
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
from pretraining.config.assignments import setting_named
from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.read import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.data.dataset import build_loader
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes, join_processes, on_rank_zero
from pretraining.errors import ConfigError
from pretraining.estimate.costs import parameter_count
from pretraining.launch.layout import resolve_layout
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama
from pretraining.train.build import build_run
from pretraining.train.job import Job
from pretraining.train.loop import Run, train_loop
from pretraining.train.opening import open_run
from pretraining.train.plan import plan_run

ROOT = Path(__file__).parents[2]
"""Root of the repository; every benchmark runs from here."""
PRETRAIN = (sys.executable, "-c", "from pretraining.cli import main; main()")
"""The command `pretrain`, with this interpreter."""
LENGTH = ("num_steps", "run_steps", "ckpt_save_path")
"""Settings of training that a benchmark sets itself: length and folder of a run."""


class Over(Exception):
    """The measurement is complete; a contender that it passes through saves nothing."""


class Number(NamedTuple):
    """An integer flag of a benchmark."""

    default: int
    help: str
    least: int = 1


def flag_parser(description: str, **numbers: Number) -> argparse.ArgumentParser:
    """Return a parser of integer flags with lower limits."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for name, (default, text, least) in numbers.items():
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, help=f"{text} (default {default:,})")
    return parser


def parse_with_settings(
    parser: argparse.ArgumentParser, own: Sequence[str] = LENGTH
) -> tuple[argparse.Namespace, list[str]]:
    """Return a benchmark's flags, and the rest as settings of training, `name=value`, except those in `own`."""
    parser.epilog = "Any other --name=value is a setting of training, as in `pretrain train --help`."
    flags, rest = parser.parse_known_args()
    settings = [argument.lstrip("-") for argument in rest]
    for name in (setting_named(setting.partition("=")[0]) for setting in settings):
        if name in own:
            parser.error(f"--{name}: remove it; the benchmark sets it itself")
    return flags, settings


def read_settings(settings: Sequence[str], processes: int = 1) -> TrainConfig:
    """Return the configuration of a run; exit if it is wrong, or if the batch cannot be split."""
    try:
        config = load_train_config(["ckpt_save_path=run", *settings])  # each benchmark replaces the folder
        resolve_batch_sizes(config.batch, processes)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    return config


def announce() -> None:
    """Print machine and command."""
    print(f"machine   {machine()}")
    print(f"command   {command()}", flush=True)


def describe(config: TrainConfig, processes: int) -> str:
    """Return a line about the model, the precision and the work of a step."""
    shape, plan = resolve_shape(config.model), resolve_batch_sizes(config.batch, processes)
    precision = str(compute_dtype(config.parallel, device())).removeprefix("torch.")
    number = "1 micro-batch" if plan.grad_accum_steps == 1 else f"{plan.grad_accum_steps} micro-batches"
    on_each = f" on each of {processes} processes" if processes > 1 else ""
    return (
        f"{config.model.model_variant}, {parameter_count(shape):,} parameters, {precision}; a step is "
        f"{number} of {plan.micro_batch_size} x {config.data.seq_length} tokens{on_each}"
    )


def command() -> str:
    """Return the command line."""
    return " ".join(["python", *sys.orig_argv[1:]])


def machine() -> str:
    """Return a line about GPU, CPU, cores, threads and versions."""
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
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def place() -> tuple[int, int]:
    """Return rank and number of processes; (0, 1) unless a race started several."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join() -> Iterator[Processes]:
    """Join the other processes of a contender, all on this machine."""
    with join_processes(resolve_layout()) as joined:
        yield joined


def start_run(config: TrainConfig, processes: Processes) -> Run:
    """Build a run that resumes from the newest checkpoint of its folder, if it has one."""
    job, start = Job(processes), on_rank_zero(lambda: find_start(config.checkpoint))
    return build_run(plan_run(start, open_run(config, start, job)), job)


def train_project(config: TrainConfig, before_step: Callable[[float | None], None]) -> None:
    """Train with the project's loop and all of its components.

    Args:
        before_step: called before each step with the last reported loss; may raise `Over` to stop.
    """
    with join() as processes:
        run = start_run(config, processes)
        train_paced(run, lambda: before_step(run.observer.last_loss))


def train_paced(run: Run, before_step: Callable[[], None]) -> None:
    """Train a run with a call before each step, which may raise `Over` to stop."""

    def paced() -> Generator[StepBatch, None, None]:
        with closing(run.batches) as batches:
            while True:
                before_step()
                yield next(batches)

    with suppress(Over):
        train_loop(replace(run, batches=paced()))


def initial_model(config: TrainConfig) -> Llama:
    """Return the unsharded model on the contenders' device, with the project's initial weights."""
    shape = resolve_shape(config.model)
    with torch.device("meta"):
        model = Llama(shape, config.loss)
    model.to_empty(device=device())
    initialize_weights(model, shape, config.run.seed, device())
    return model


def batches_in_memory(
    config: TrainConfig, shape: LlamaShape, rank: int = 0, processes: int = 1
) -> list[list[MicroBatch]]:
    """Return the micro-batches of all steps of `train_project` on a rank, made in advance."""
    plan = resolve_batch_sizes(config.batch, processes)
    data = replace(config.data, num_workers=0)
    with build_loader(None, data, plan, rank, config.run.seed, shape.vocab_size) as loader:
        return [next(loader).micro_batches for _ in range(int(config.run.num_steps.amount))]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table; the first column is aligned left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    print()
    for cells in (header, rule, *rows):
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        print("| " + " | ".join([cells[0].ljust(widths[0]), *rest]) + " |", flush=True)


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least:,} or more")
        return value

    return whole_number


def spread(values: list[float], form: str) -> tuple[str, str]:
    """Return the median, and the first and third quartiles."""
    if len(values) < 2:
        return f"{values[0]:{form}}", "-"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}} to {high:{form}}"


def _cpu_name() -> str:
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()
