"""Saving and loading checkpoints against writing and reading the same bytes raw, and what an asynchronous save blocks.

    python scripts/benchmark/checkpoint.py
    python scripts/benchmark/checkpoint.py --model_variant=1b --folder=/scratch/me

Three questions, each answered by turns that follow each other in changing order (A B, B A, ...), as medians:

    save     a whole save (checksums, flush, commit) against write and fsync of the same memory into as many files
    load     finding the checkpoint (every checksum compared) and loading it against reading its files, from the disk
    blocked  seconds for which training steps wait for a save beside the training, against one in place
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import announce, markdown_table, parse, read_settings, synchronize

from pretraining.checkpoint import store
from pretraining.checkpoint.layout import own_share
from pretraining.checkpoint.listing import checkpoint_path
from pretraining.checkpoint.restore import find_checkpoint
from pretraining.checkpoint.state import Manifest, tensor_state
from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.model.flops import parameter_count
from pretraining.model.init import parameter_name
from pretraining.optim.adamw import build_adamw, materialise_state
from pretraining.parallel.mesh import build_mesh
from pretraining.parallel.processes import Processes, join_processes
from pretraining.train.build import build_model, build_run
from pretraining.train.loop import train_loop

DEFAULTS = ("use_dummy_dataset=true", "model_variant=125m", "seq_length=64", "batch_size=1", "tracker=none")
QUIET = ("report_interval=0", "progress=plain")


def main() -> None:
    folder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    folder.add_argument("--folder", default=tempfile.gettempdir())
    flags, settings = parse(
        "Checkpoints against raw files. --folder=PATH: where to write (default: the temporary folder).",
        rounds=(7, "turns of each kind of save and load"),
        runs=(3, "runs of each kind that train and save"),
    )
    place, settings = folder.parse_known_args([f"--{setting}" for setting in settings])
    config = read_settings([*DEFAULTS, *QUIET, *(setting.lstrip("-") for setting in settings)])
    announce()
    root = Path(tempfile.mkdtemp(prefix="benchmark-", dir=place.folder))
    try:
        with join_processes(0, 1, 0, 1, {}) as processes:
            tensors = _tensors_of_a_run(config, processes)
            _compare_saves_and_loads(root, config, tensors, flags.rounds)
            del tensors
            _compare_blocked_time(root, config, processes, flags.runs)
    finally:
        shutil.rmtree(root)


def _tensors_of_a_run(config: TrainConfig, processes: Processes) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, as a checkpoint holds them."""
    mesh = build_mesh(config.parallel, 1, 1, processes.device.type)
    model = build_model(resolve_shape(config.model), config, mesh, processes.device, initialize=True)
    optimizer = build_adamw(model, config.optimizer)
    materialise_state(optimizer)
    parameters = {parameter_name(name): parameter for name, parameter in model.named_parameters()}
    return tensor_state(parameters, optimizer)


def _compare_saves_and_loads(root: Path, config: TrainConfig, tensors: Mapping[str, torch.Tensor], rounds: int) -> None:
    run, raw = root / "run", root / "raw"
    checkpoint = checkpoint_path(run, 1)
    on_host = [
        [piece.values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data for piece in pieces]
        for pieces in own_share(tensors).files.values()
    ]
    total = sum(len(content) for file in on_host for content in file)

    def save() -> None:
        shutil.rmtree(checkpoint, ignore_errors=True)
        with timed("save"):
            store.save_checkpoint(checkpoint, tensors, _describe)

    def write_raw() -> None:
        shutil.rmtree(raw, ignore_errors=True)
        with timed("write raw"):
            raw.mkdir(parents=True)
            for number, contents in enumerate(on_host):
                with (raw / str(number)).open("wb", buffering=0) as file:
                    for content in contents:
                        while content:
                            content = content[file.write(content) :]
                    os.fsync(file.fileno())

    def load() -> None:
        _drop_from_memory(checkpoint)
        with timed("load"):
            found = find_checkpoint(replace(config.checkpoint, ckpt_save_path=str(run)))
            assert found is not None
            store.load_tensors(found.path, tensors)
            synchronize()

    def read_raw() -> None:
        _drop_from_memory(checkpoint)
        with timed("read raw"):
            buffer = bytearray(2**22)
            for path in sorted(checkpoint.iterdir()):
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

    seconds: dict[str, list[float]] = {}
    timed = _timer(seconds)
    for number in range(rounds + 1):
        for pair in ((write_raw, save), (read_raw, load)):
            for turn in pair if number % 2 else pair[::-1]:
                if turn is not write_raw and turn is not save and not checkpoint.exists():
                    save()
                turn()
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    count = parameter_count(resolve_shape(config.model))
    over = f"{size / count:.3f} a parameter, {size / count / 12 - 1:.2%} over 12"
    print(f"\n{count:,} parameters: {size:,} bytes, {over}\n")
    rows = [(name, _spread([total / s / 1e9 for s in turns[1:]], ".2f")) for name, turns in seconds.items()]
    print(markdown_table(("", "GB/s: median (quartiles)"), rows))
    for ours, theirs in (("save", "write raw"), ("load", "read raw")):
        ratios = [raw / own for own, raw in zip(seconds[ours][1:], seconds[theirs][1:], strict=True)]
        print(f"\n{ours} / {theirs}: {_spread(ratios, '.2f')}, median of {rounds} rounds", flush=True)


def _compare_blocked_time(root: Path, config: TrainConfig, processes: Processes, runs: int) -> None:
    """Train for a few steps with one save in the middle, in place and beside the training."""
    blocked: dict[bool, list[float]] = {False: [], True: []}
    steps: dict[bool, list[float]] = {False: [], True: []}
    for number in range(runs + 1):
        for asynchronous in (False, True) if number % 2 else (True, False):
            waited, after = _train_and_save(root / "training", config, processes, asynchronous)
            if number:
                blocked[asynchronous].append(waited)
                steps[asynchronous] += after
    rows = [
        (name, _spread(blocked[kind], ".3f"), _spread(steps[kind], ".3f"))
        for name, kind in (("in place", False), ("beside the training", True))
    ]
    print("\n" + markdown_table(("", "seconds blocked", "seconds of each of the next 4 steps"), rows))
    ratios = [ours / theirs for ours, theirs in zip(blocked[True], blocked[False], strict=True)]
    print(f"\nbeside the training / in place: {_spread(ratios, '.3f')}, median of {runs} runs")


def _train_and_save(
    folder: Path, config: TrainConfig, processes: Processes, asynchronous: bool
) -> tuple[float, list[float]]:
    """Seconds that the second save blocks the steps until it is committed, and those of the steps after it.

    The first save, which takes memory for the copies, is not what most of a run's saves are like.
    """
    shutil.rmtree(folder, ignore_errors=True)
    where = replace(config.checkpoint, ckpt_save_path=str(folder), async_save=asynchronous, keep_last=1)
    length = replace(config.run, num_steps=type(config.run.num_steps)(10, "steps"))
    interval = type(config.run.num_steps)(5, "steps")
    run = build_run(replace(config, checkpoint=replace(where, checkpoint_interval=interval), run=length), processes)
    manager, waited, ended = run.checkpoints, [], []
    maybe_save = manager.maybe_save

    def timed(state: Any, evaluation_loss: float | None) -> None:
        synchronize()
        began = time.perf_counter()
        maybe_save(state, evaluation_loss)
        waited.append(time.perf_counter() - began)
        ended.append(time.perf_counter())

    manager.maybe_save = timed  # type: ignore[method-assign]
    # The run would end with a save in place: the steps to be measured come before.
    run.state.total_steps = run.state.stop_step = 15
    manager._policy = replace(manager._policy, interval=_Twice(5, 10))  # type: ignore[arg-type]
    train_loop(run)
    step_seconds = [
        end - before - wait for before, end, wait in zip(ended[9:13], ended[10:14], waited[10:14], strict=True)
    ]
    return sum(waited[9:14]), step_seconds


class _Twice:
    """An interval that is due at two steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def is_due(self, state: Any) -> bool:
        return state.progress.steps in self._steps


def _describe(files: Mapping[str, Any]) -> Manifest:
    return Manifest(2, 1, 1, 0.0, "interval", None, None, None, {}, {}, 1, {}, {}, torch.__version__, files, "")


def _drop_from_memory(checkpoint: Path) -> None:
    """Have the next read come from the disk."""
    for path in checkpoint.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timer(seconds: dict[str, list[float]]) -> Callable[[str], Any]:
    @contextmanager
    def timed(name: str) -> Any:
        began = time.perf_counter()
        yield
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    return timed


def _spread(values: Sequence[float], form: str) -> str:
    """Median, and first to third quartile."""
    if len(values) < 2:
        return f"{values[0]:{form}}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


if __name__ == "__main__":
    main()
