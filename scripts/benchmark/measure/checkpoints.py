"""Speed of saves and loads against raw files and torch's DCP, and the cost of saves and resumes for a run.

    python -m scripts.benchmark.measure.checkpoints
    python -m scripts.benchmark.measure.checkpoints --model_variant=1b --folder=/scratch/me --rounds=5

All contenders save and load the same tensors (parameters and AdamW's moments) in turns, with one process, then with two
processes that shard them. Every save flushes all files to the disk (`sync_files`, DCP's default):

    project           a save with manifest, checksums and commit; a load that compares every checksum
    raw files         a file per process: `write` and `fsync`; a load into a small buffer, discarding the data
    DCP               safetensors: each process writes its own shards; four threads for loads, which check nothing

Loaded tensors are compared with the saved ones. Then runs train in turns with synchronous and asynchronous saves. Each
run saves twice, because the first save also allocates the memory for copies. `pretrain average` of five checkpoints
takes turns with five loads of their weights. Last, runs are killed by SIGKILL soon after a save, and the same command
starts at once.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from pretraining.checkpoint.chunks import local_tensor, tensor_state
from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.restore import load_model
from pretraining.checkpoint.run_folder import checkpoint_path, committed_checkpoints
from pretraining.checkpoint.start_point import find_start
from pretraining.checkpoint.writer import plan_save, save_checkpoint
from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.dims import build_dims
from pretraining.distributed.processes import Processes, join_processes
from pretraining.estimate.costs import parameter_count
from pretraining.launch.layout import ProcessLayout, free_port
from pretraining.model.init import initialize_parameters
from pretraining.optim.registry import build_optimizer
from pretraining.optim.state import materialise_state
from pretraining.progress import TrainState
from pretraining.tools.average import average
from pretraining.tools.command_settings import AverageConfig
from pretraining.train.build import build_model
from pretraining.train.loop import train_loop
from scripts.benchmark.common import (
    LENGTH,
    PRETRAIN,
    Number,
    announce,
    flag_parser,
    join,
    parse_with_settings,
    print_table,
    read_settings,
    spread,
    start_run,
    synchronize,
)
from scripts.benchmark.measure import startup

DEFAULTS = ("use_dummy_dataset=true", "model_variant=tiny", "seq_length=64", "batch_size=1", "tracker=none")
QUIET = ("report_interval=0", "progress=plain")
OWN = (*LENGTH, "checkpoint_interval", "keep_last", "async_save", "report_interval")
MANIFEST_OF_STEP_1 = Manifest(step=1, tokens_seen=1, global_batch_size=1)
RAW = "raw files"
READ_BYTES = 2**22
THREADS = 4
"""Threads per process, as in the project's reader."""
KINDS = ("save", "load", "load, file cache")
SAVE_STEPS, LAST_STEP, FOLLOWING_STEPS = (5, 15), 21, 5
AVERAGED = 5
Tensors = Mapping[str, torch.Tensor]
Seconds = dict[tuple[str, str], list[float]]
"""Seconds of each turn, by contender and kind."""


@dataclass(frozen=True)
class Contender:
    """Functions that save and load a checkpoint; all processes call them with its folder and the tensors."""

    save: Callable[[Path, Tensors, TrainConfig], None]
    load: Callable[[Path, Tensors, TrainConfig], None]


def save_project(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    save_checkpoint(checkpoint_path(folder, 1), plan_save(tensors), MANIFEST_OF_STEP_1)


def load_project(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    found = find_start(replace(config.checkpoint, ckpt_save_path=str(folder)))
    assert found is not None
    load_tensors(found.path, found.manifest.files, tensors)


def save_raw(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / str(dist.get_rank())).open("wb", buffering=0) as file:
        for piece in (piece for pieces in plan_save(tensors).files.values() for piece in pieces):
            content = piece.values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            while content:
                content = content[file.write(content) :]
        os.fsync(file.fileno())


def load_raw(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    buffer = bytearray(READ_BYTES)
    with (folder / str(dist.get_rank())).open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def save_dcp(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_dcp(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder), thread_count=THREADS))


CONTENDERS = {
    "project": Contender(save_project, load_project),
    RAW: Contender(save_raw, load_raw),
    "DCP": Contender(save_dcp, load_dcp),
}


def main() -> None:
    parser = flag_parser(
        "Checkpoints against raw files and torch's DCP.",
        rounds=Number(11, "turns per contender"),
        runs=Number(5, "runs per kind of save, and runs that are killed"),
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder on the disk (default %(default)s)")
    flags, settings = parse_with_settings(parser, OWN)
    settings = [*DEFAULTS, *QUIET, *settings]
    config = read_settings(settings)
    announce()
    print(f"model     {parameter_count(resolve_shape(config.model)):,} parameters; files in {flags.folder}", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=flags.folder) as folder:
        for world_size in (1, 2) if torch.cuda.device_count() != 1 else (1,):
            compare(Path(folder), config, world_size, flags.rounds)
        compare_blocking(Path(folder) / "training", config, flags.runs)
        compare_average(Path(folder) / "averaged", settings, flags.rounds)
        starts = [_kill_and_resume(Path(folder) / f"killed-{number}", settings) for number in range(flags.runs + 1)]
    print_table(("after kill -9", "seconds", "quartiles"), [("end of the next step", *spread(starts[1:], ".2f"))])


def compare(root: Path, config: TrainConfig, world_size: int, rounds: int) -> None:
    """Print the table of jobs with `world_size` processes."""
    payload, seconds = run_job(world_size, root, config, rounds)
    title = f"{world_size} process{'es' if world_size > 1 else ''}"
    columns = [column for kind in KINDS for column in (f"{kind}, GB/s", f"{kind}, project / it")]
    rows = []
    for name in CONTENDERS:
        cells = [name]
        for kind in KINDS:
            own, its = seconds["project", kind], seconds[name, kind]
            middle, quartiles = spread([b / a for a, b in zip(own, its, strict=True)], ".2f")
            cells += [spread([payload / each / 1e9 for each in its], ".2f")[0], f"{middle} ({quartiles})"]
        rows.append(cells)
    print_table((title, *columns), rows)
    print(f"\n{payload:,} bytes of tensors; median (quartiles) of {rounds} rounds", flush=True)


def run_job(world_size: int, root: Path, config: TrainConfig, rounds: int) -> tuple[int, Seconds]:
    """Return payload bytes and seconds, measured in new processes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    port = free_port()
    job = [
        context.Process(target=_work, args=(rank, world_size, port, there, root, config, rounds))
        for rank in range(world_size)
    ]
    for process in job:
        process.start()
    there.close()
    try:
        result: tuple[int, Seconds] = here.recv()
    except EOFError:
        sys.exit("the measured processes failed: see their error above")
    for process in job:
        process.join()
    return result


def _work(
    rank: int, world_size: int, port: int, results: Connection, root: Path, config: TrainConfig, rounds: int
) -> None:
    layout = ProcessLayout(rank, world_size, rank, world_size, "environment", "127.0.0.1", port)
    with join_processes(layout) as processes:
        tensors = tensors_of_a_run(config, processes)
        seconds = take_turns(root, tensors, config, rounds)
        if rank == 0:
            results.send((plan_save(tensors).total_bytes, seconds))
        dist.barrier()  # rank 0 hosts the store, so it must exit last


def tensors_of_a_run(config: TrainConfig, processes: Processes) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer state, as a checkpoint holds them."""
    shape = resolve_shape(config.model)
    model = build_model(shape, config, build_dims(config.parallel, processes), processes.device)
    initialize_parameters(model.parameters, shape, config.run.seed, processes.device)
    optimizer = build_optimizer(model.parameters, config.optimizer)
    materialise_state(optimizer)
    return tensor_state(model.parameters, optimizer)


def take_turns(root: Path, tensors: Tensors, config: TrainConfig, rounds: int) -> Seconds:
    """Let all contenders save, then load, in rotating order; a turn ends when all processes are done."""
    names = list(CONTENDERS)
    seconds: Seconds = {}
    for number in range(rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        for kind, name in ((kind, name) for kind in KINDS for name in order):
            folder, contender = root / name, CONTENDERS[name]
            if kind == "save" and dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            if kind == "load" and dist.get_rank() == 0:
                for path in _files_of(folder):
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if kind == "load" and number == 0 and name != RAW:
                _check_load(contender, folder, tensors, config)
            work = contender.save if kind == "save" else contender.load
            dist.barrier()
            began = time.perf_counter()
            work(folder, tensors, config)
            synchronize()
            dist.barrier()
            if number:  # the first round is a warm-up
                seconds.setdefault((name, kind), []).append(time.perf_counter() - began)
    return seconds


def _check_load(contender: Contender, folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    """Load into zeros, and assert that the saved tensors come back."""
    saved = {name: local_tensor(tensor).detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    contender.load(folder, tensors, config)
    for name, tensor in tensors.items():
        assert torch.equal(local_tensor(tensor), saved[name]), f"{name} is not what was saved"


def _files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def compare_blocking(folder: Path, config: TrainConfig, runs: int) -> None:
    """Train in turns with synchronous and asynchronous saves, and print the ratio of the times that block the loop."""
    blocked: dict[bool, list[float]] = {False: [], True: []}
    with join() as processes:
        for _ in range(runs + 1):
            for asynchronous in blocked:
                blocked[asynchronous].append(_blocked_seconds(folder, config, processes, asynchronous))
    ratios = [beside / in_place for in_place, beside in list(zip(*blocked.values(), strict=True))[1:]]
    row = ("asynchronous / synchronous", *spread(ratios, ".3f"), str(runs))
    print_table(("time that a save blocks training", "median", "quartiles", "runs"), [row])


def _blocked_seconds(folder: Path, config: TrainConfig, processes: Processes, asynchronous: bool) -> float:
    """Train a run that saves twice; return the seconds that the second save blocks its step and the next steps."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    checkpoint = replace(config.checkpoint, ckpt_save_path=str(folder / "run"), async_save=asynchronous, keep_last=1)
    length = replace(config.run, num_steps=type(config.run.num_steps)(LAST_STEP, "steps"))
    waited = []
    with (folder / "log").open("w") as log, redirect_stdout(log):
        run = start_run(replace(config, checkpoint=checkpoint, run=length), processes)
        maybe_save = run.checkpoints.maybe_save

        def timed(state: TrainState, *, is_evaluated: bool) -> None:
            synchronize()
            began = time.perf_counter()
            maybe_save(state, is_evaluated=is_evaluated)
            waited.append(time.perf_counter() - began)

        run.checkpoints.maybe_save = timed  # type: ignore[method-assign]
        run.checkpoints._interval = _SaveSteps()  # type: ignore[assignment]
        train_loop(run)
    second = SAVE_STEPS[1] - 1
    return sum(waited[second : second + 1 + FOLLOWING_STEPS])


def compare_average(run: Path, settings: list[str], rounds: int) -> None:
    """Print the time of an average of five checkpoints, relative to five loads of their weights."""
    own = [*settings, f"num_steps={AVERAGED}", "checkpoint_interval=1", f"ckpt_save_path={run}"]
    subprocess.run([*PRETRAIN, "train", *own], check=True, stdout=subprocess.DEVNULL)
    paths, ratios = [str(each.path) for each in committed_checkpoints(run)], []
    for number in range(rounds + 1):
        output = run.with_name(f"average-{number}")
        with redirect_stdout(io.StringIO()):
            began = time.perf_counter()
            for path in paths:
                load_model(path, torch.device("cpu"), torch.float32)
            loaded = time.perf_counter()
            average(AverageConfig(paths=(str(run),), last=AVERAGED, output_path=str(output)))
        ratios.append((time.perf_counter() - loaded) / (loaded - began))
        shutil.rmtree(output)
    print_table(("", "median", "quartiles"), [("average / load of its checkpoints", *spread(ratios[1:], ".2f"))])


class _SaveSteps:
    """An interval that is due at `SAVE_STEPS`."""

    def is_due(self, state: Any) -> bool:
        return state.progress.steps in SAVE_STEPS


def _kill_and_resume(run: Path, settings: list[str]) -> float:
    """Return the seconds from `kill -9` to the end of the next step."""
    own = [*settings, "num_steps=1000000", "checkpoint_interval=5", "keep_last=2", f"ckpt_save_path={run}"]
    command = [*PRETRAIN, "train", *own]
    with run.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log)
        try:
            while not committed_checkpoints(run):
                if process.poll() is not None:
                    sys.exit("the run to be killed failed by itself: see its error above")
                time.sleep(0.02)
        finally:
            process.kill()
            killed = time.time()
            process.wait()
    return startup.start(own, since=killed)


if __name__ == "__main__":
    main()
