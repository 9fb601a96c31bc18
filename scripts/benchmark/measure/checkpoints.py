"""How fast checkpoints are saved and loaded, beside raw files and torch's DCP, and what saves and resumes cost a run.

    python -m scripts.benchmark.measure.checkpoints
    python -m scripts.benchmark.measure.checkpoints --model_variant=1b --folder=/scratch/me --rounds=5

The same tensors, parameters and AdamW's moments, are saved and loaded in turns, with one process, then with two that
shard them. All contenders flush every file to the disk before a save is over (`sync_files`, DCP's default):

    project           a save with its manifest, checksums, commit; a load that compares every checksum
    raw files         a file per process: `write` and `fsync`; a load into a small buffer, which keeps nothing
    DCP               `dcp.save` with FileSystemWriter as it is
    DCP, 4 threads    and with four files per process, written by as many threads
    DCP, safetensors  HuggingFaceStorageWriter, each process its own shards, with four threads for loads

Memory is what a process that does nothing else takes beyond its tensors, mapped files included. What was loaded is
compared with what was saved. Then runs are trained that save in place and beside the training (`async_saves.py`), and
runs are killed and resumed (`resume.py`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from pretraining.checkpoint.manifest import Manifest, checkpoint_path, tensor_state
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.start_point import find_start
from pretraining.checkpoint.writer import local_tensor, plan_save, save_checkpoint
from pretraining.config.training import TrainConfig
from pretraining.config.variants import parameter_count, resolve_shape
from pretraining.distributed.mesh import build_mesh
from pretraining.distributed.processes import Processes
from pretraining.model.init import parameter_name
from pretraining.optim.optimizer import materialise_state
from pretraining.optim.registry import build_optimizer
from pretraining.train.build import build_model
from scripts.benchmark.common import (
    LENGTH,
    Number,
    Table,
    flag_parser,
    in_turn,
    parse_with_settings,
    read_settings,
    spread,
    synchronize,
)
from scripts.benchmark.job import add_folder_flag, drop_from_memory, measured_folder, memory_for, run_job, world_sizes
from scripts.benchmark.measure import async_saves, resume

DEFAULTS = ("use_dummy_dataset=true", "model_variant=tiny", "seq_length=64", "batch_size=1", "tracker=none")
QUIET = ("report_interval=0", "progress=plain")
OWN = (*LENGTH, "checkpoint_interval", "keep_last", "async_save", "report_interval")
MANIFEST_OF_STEP_1 = Manifest(step=1, tokens_seen=1, global_batch_size=1)
RAW = "raw files"
READ_BYTES = 2**22
THREADS = 4
"""Of a process: as many as the project's writer and reader have."""
DAMAGES = 8
"""Bytes, spread over the largest file, that are changed one at a time."""
KINDS = ("save", "load", "load, file cache")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """A way to write a checkpoint and to read it; both take its folder and the tensors, on all processes at once."""

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


def save_dcp(folder: Path, tensors: Tensors, config: TrainConfig, threads: int = 1) -> None:
    dcp.save(dict(tensors), storage_writer=FileSystemWriter(folder, thread_count=threads))


def load_dcp(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    dcp.load(dict(tensors), storage_reader=FileSystemReader(folder))


def save_safetensors(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_safetensors(folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder), thread_count=THREADS))


CONTENDERS = {
    "project": Contender(save_project, load_project),
    RAW: Contender(save_raw, load_raw),
    "DCP": Contender(save_dcp, load_dcp),
    "DCP, 4 threads": Contender(partial(save_dcp, threads=THREADS), load_dcp),
    "DCP, safetensors": Contender(save_safetensors, load_safetensors),
}


def main() -> None:
    parser = flag_parser(
        "Checkpoints beside raw files and torch's DCP.",
        rounds=Number(11, "turns of each"),
        runs=Number(5, "runs of each kind that train and save, and of those killed"),
    )
    add_folder_flag(parser)
    flags, settings = parse_with_settings(parser, OWN)
    settings = [*DEFAULTS, *QUIET, *settings]
    config = read_settings(settings)
    with measured_folder(flags) as root:
        print(f"model     {parameter_count(resolve_shape(config.model)):,} parameters", flush=True)
        for world_size in world_sizes():
            _compare(root, config, world_size, flags.rounds)
        async_saves.compare(root / "training", config, flags.runs)
        resume.measure(root / "killed", settings, flags.runs)


def _compare(root: Path, config: TrainConfig, world_size: int, rounds: int) -> None:
    """Print the tables of jobs of this size."""
    payload, seconds = run_job(take_turns, world_size, root, config, rounds)
    of_processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    rates = Table(of_processes, *(column for kind in KINDS for column in (f"{kind}, GB/s", f"{kind}, project / it")))
    for name in CONTENDERS:
        cells = []
        for kind in KINDS:
            own, its = seconds["project", kind], seconds[name, kind]
            middle, quartiles = spread([b / a for a, b in zip(own, its, strict=True)], ".2f")
            cells += [spread([payload / each / 1e9 for each in its], ".2f")[0], f"{middle} ({quartiles})"]
        rates.add(name, *cells)
    rates.print()
    print(f"\n{payload:,} bytes of tensors; median (quartiles) of {rounds} rounds", flush=True)
    needs = Table(of_processes, "bytes on disk", "save, peak MiB", "load, peak MiB", "damaged bytes noticed")
    for name in in_turn([name for name in CONTENDERS if name != RAW]):
        disk_bytes, peaks, noticed = run_job(measure_needs, world_size, root, config, name)
        cells = ["-" if peak is None else f"{peak / 2**20:,.0f}" for peak in peaks]
        needs.add(name, f"{disk_bytes:,}", *cells, f"{noticed} of {DAMAGES}")
    needs.print()


def take_turns(
    processes: Processes, root: Path, config: TrainConfig, rounds: int
) -> tuple[int, dict[tuple[str, str], list[float]]]:
    """In each process, let all contenders save, then load, in an order that changes.

    Returns:
        The bytes of the tensors, and the seconds of each turn by contender and kind; a turn lasts until all are done.
    """
    tensors, names = tensors_of_a_run(config, processes), list(CONTENDERS)
    seconds: dict[tuple[str, str], list[float]] = {}
    numbers = range(rounds + 1)
    for number in in_turn(numbers) if processes.rank == 0 else numbers:
        order = names[number % len(names) :] + names[: number % len(names)]
        for kind, name in ((kind, name) for kind in KINDS for name in order):
            folder, contender = root / name, CONTENDERS[name]
            if kind == "save" and processes.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            if kind == "load" and processes.rank == 0:
                drop_from_memory(list(_files_of(folder)))
            if kind == "load" and number == 0 and name != RAW:
                _check_load(contender, folder, tensors, config)
            work = contender.save if kind == "save" else contender.load
            dist.barrier()
            began = time.perf_counter()
            work(folder, tensors, config)
            synchronize()
            dist.barrier()
            if number:  # the first round warms up
                seconds.setdefault((name, kind), []).append(time.perf_counter() - began)
    return plan_save(tensors).total_bytes, seconds


def measure_needs(
    processes: Processes, root: Path, config: TrainConfig, name: str
) -> tuple[int, tuple[float | None, float | None], int]:
    """In each process of a job that does nothing else, save once, load once, and load a damaged file.

    Returns:
        Bytes on disk, bytes of memory that rank 0 takes to save and to load, and how many damages a load noticed.
    """
    tensors = tensors_of_a_run(config, processes)
    folder, contender = root / name, CONTENDERS[name]
    if processes.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    saving = memory_for(lambda: contender.save(folder, tensors, config))
    dist.barrier()
    loading = memory_for(lambda: contender.load(folder, tensors, config))
    dist.barrier()
    largest = max(_files_of(folder), key=lambda path: path.stat().st_size)
    noticed = sum(not _loads_damaged(contender, folder, largest, number, tensors, config) for number in range(DAMAGES))
    return sum(path.stat().st_size for path in _files_of(folder)), (saving, loading), noticed


def _loads_damaged(
    contender: Contender, folder: Path, file: Path, number: int, tensors: Tensors, config: TrainConfig
) -> bool:
    """Return whether a load ends well although a byte of a file is not what was written."""
    place = (2 * number + 1) * file.stat().st_size // (2 * DAMAGES)
    if dist.get_rank() == 0:
        flip(file, place)
    dist.barrier()
    try:
        contender.load(folder, tensors, config)
        return True
    except (Exception, dcp.api.CheckpointException):  # the second is none of the first
        return False
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            flip(file, place)
        dist.barrier()


def _check_load(contender: Contender, folder: Path, tensors: Tensors, config: TrainConfig) -> None:
    """Load into zeros, and end the benchmark if something else than what was saved comes back."""
    saved = {name: local_tensor(tensor).detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    contender.load(folder, tensors, config)
    for name, tensor in tensors.items():
        assert torch.equal(local_tensor(tensor), saved[name]), f"{name} is not what was saved"


def flip(file: Path, place: int) -> None:
    """Change a bit of a byte of a file, or change it back."""
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def _files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def tensors_of_a_run(config: TrainConfig, processes: Processes) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer state, as a checkpoint holds them."""
    mesh = build_mesh(config.parallel, processes.world_size, processes.local_world_size, processes.device.type)
    model = build_model(resolve_shape(config.model), config, mesh, processes.device, initialize=True)
    optimizer = build_optimizer(model.parameters, config.optimizer)
    materialise_state(optimizer)
    parameters = {parameter_name(name): parameter for name, parameter in model.parameters.items()}
    return tensor_state(parameters, optimizer)


if __name__ == "__main__":
    main()
