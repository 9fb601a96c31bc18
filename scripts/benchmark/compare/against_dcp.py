"""The project's checkpoints beside those of torch's DCP: rates, size, memory, and whether a damaged byte is noticed.

    python -m scripts.benchmark.compare.against_dcp
    python -m scripts.benchmark.compare.against_dcp --model_variant=1b --folder=/scratch/me

The same tensors, parameters and AdamW's moments, are saved and loaded by turns, with one process, then with two that
shard them. All contenders flush every file to the disk before a save is over (`sync_files`, DCP's default):

    project              a save with its manifest, checksums, commit; a load that compares every checksum
    DCP                  `dcp.save` with FileSystemWriter as it is
    DCP, 4 threads       and with four files a process, written by as many threads
    DCP, safetensors     HuggingFaceStorageWriter, each process its own shards, with four threads for loads

Memory is what a process that does nothing else takes beyond its tensors, mapped files included. What was loaded is
compared with what was saved.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from pretraining.checkpoint.manifest import checkpoint_path
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.start_point import find_checkpoint
from pretraining.checkpoint.writer import local_tensor, plan_save, save_checkpoint
from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import Processes
from scripts.benchmark.common import (
    Number,
    Table,
    flag_parser,
    in_turn,
    parse_with_settings,
    read_settings,
    spread,
    synchronize,
)
from scripts.benchmark.job import (
    add_folder_flag,
    drop_from_memory,
    measured_folder,
    memory_for,
    run_job,
    world_sizes,
)
from scripts.benchmark.measure.checkpoints import DEFAULTS, MANIFEST_OF_STEP_1, OWN, QUIET, tensors_of_a_run

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
    found = find_checkpoint(replace(config.checkpoint, ckpt_save_path=str(folder)))
    assert found is not None
    load_tensors(found.path, found.manifest.files, tensors)


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
    "DCP": Contender(save_dcp, load_dcp),
    "DCP, 4 threads": Contender(partial(save_dcp, threads=THREADS), load_dcp),
    "DCP, safetensors": Contender(save_safetensors, load_safetensors),
}


@dataclass(frozen=True)
class Needs:
    """What a contender takes beside time.

    Attributes:
        disk_bytes: of its files.
        save_bytes: of memory, that the first process takes to save, at most; None = the system does not tell.
        load_bytes: and to load.
        noticed: of the loads with a damaged byte, those that ended with an error.
    """

    disk_bytes: int
    save_bytes: float | None
    load_bytes: float | None
    noticed: int


def main() -> None:
    parser = flag_parser("Checkpoints beside those of torch's DCP.", rounds=Number(11, "turns of each"))
    add_folder_flag(parser)
    flags, settings = parse_with_settings(parser, OWN)
    config = read_settings([*DEFAULTS, *QUIET, *settings])
    with measured_folder(flags) as root:
        for world_size in world_sizes():
            _compare(root, config, world_size, flags.rounds)


def _compare(root: Path, config: TrainConfig, world_size: int, rounds: int) -> None:
    """Prints the tables of jobs of this size."""
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
    for name in in_turn(list(CONTENDERS)):
        found = run_job(measure_needs, world_size, root, config, name)
        peaks = ("-" if each is None else f"{each / 2**20:,.0f}" for each in (found.save_bytes, found.load_bytes))
        needs.add(name, f"{found.disk_bytes:,}", *peaks, f"{found.noticed} of {DAMAGES}")
    needs.print()


def take_turns(
    processes: Processes, root: Path, config: TrainConfig, rounds: int
) -> tuple[int, dict[tuple[str, str], list[float]]]:
    """In each process: all contenders save, then load, in an order that changes; bytes of tensors, and seconds."""
    tensors = tensors_of_a_run(config, processes)
    names = list(CONTENDERS)
    seconds: dict[tuple[str, str], list[float]] = {}
    numbers = range(rounds + 1)
    for number in in_turn(numbers) if processes.rank == 0 else numbers:
        order = names[number % len(names) :] + names[: number % len(names)]
        for kind in KINDS:
            for name in order:
                folder, contender = root / name, CONTENDERS[name]
                if kind == "save" and processes.rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                if kind == "load" and processes.rank == 0:
                    drop_from_memory(_files_of(folder))
                if kind != "save" and number == 0:
                    _check_load(contender, folder, tensors, config)
                work = contender.save if kind == "save" else contender.load
                dist.barrier()
                began = time.perf_counter()
                work(folder, tensors, config)
                synchronize()
                dist.barrier()
                seconds.setdefault((name, kind), []).append(time.perf_counter() - began)
    return plan_save(tensors).total_bytes, {turn: each[1:] for turn, each in seconds.items()}


def measure_needs(processes: Processes, root: Path, config: TrainConfig, name: str) -> Needs:
    """In each process of a job that does nothing else: one save, one load, and loads of a damaged file."""
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
    return Needs(sum(path.stat().st_size for path in _files_of(folder)), saving, loading, noticed)


def _loads_damaged(
    contender: Contender, folder: Path, file: Path, number: int, tensors: Tensors, config: TrainConfig
) -> bool:
    """Whether a load ends well although a byte of a file is not what was written."""
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
    """Loads into zeros, and ends the benchmark where something else than what was saved comes back."""
    saved = {name: local_tensor(tensor).detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    contender.load(folder, tensors, config)
    for name, tensor in tensors.items():
        assert torch.equal(local_tensor(tensor), saved[name]), f"{name} is not what was saved"


def flip(file: Path, place: int) -> None:
    """Changes a bit of a byte of a file, or changes it back."""
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def _files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


if __name__ == "__main__":
    main()
