"""What checkpoints cost: their rate against raw files, their size, what they block, and the way back after a kill.

    python -m scripts.benchmark.measure.checkpoints
    python -m scripts.benchmark.measure.checkpoints --model_variant=1b --folder=/scratch/me

Four questions, each answered by turns that follow each other in changing order (A B, B A, ...), as medians:

    save     a whole save (checksums, flush, commit) against write and fsync of the same bytes, a file a process
    load     finding the checkpoint and loading it, every checksum compared, against reading those files
    blocked  seconds for which training steps wait for a save beside the training, against one in place
    killed   seconds from kill -9 to the end of the new process's first step

Saves and loads are measured with one process, then with two; the others with one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.checkpoint.manifest import Manifest, checkpoint_path, tensor_state
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.start_point import find_checkpoint
from pretraining.checkpoint.writer import plan_save, save_checkpoint
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
    flag_parser,
    in_turn,
    parse_with_settings,
    print_table,
    read_settings,
    spread,
    synchronize,
)
from scripts.benchmark.job import add_folder_flag, drop_from_memory, measured_folder, run_job, world_sizes
from scripts.benchmark.measure import async_saves, resume

DEFAULTS = ("use_dummy_dataset=true", "model_variant=tiny", "seq_length=64", "batch_size=1", "tracker=none")
QUIET = ("report_interval=0", "progress=plain")
OWN = (*LENGTH, "checkpoint_interval", "keep_last", "async_save", "report_interval")
READ_BYTES = 2**22
MANIFEST_OF_STEP_1 = Manifest(2, 1, 1, 0.0, "interval", None, None, None, {}, {}, 1, {}, {}, torch.__version__, {}, "")
PAIRS = {
    "save": ("write raw", "save"),
    "load": ("read raw", "load"),
    "load, file cache": ("read raw, file cache", "load, file cache"),
}

Turns = dict[str, Callable[[], None]]


def main() -> None:
    parser = flag_parser(
        "Checkpoints against raw files.",
        rounds=Number(11, "turns of each kind of save and load"),
        runs=Number(5, "runs of each kind that train and save, and of those killed"),
    )
    add_folder_flag(parser)
    flags, settings = parse_with_settings(parser, OWN)
    settings = [*DEFAULTS, *QUIET, *settings]
    config = read_settings(settings)
    with measured_folder(flags) as root:
        for world_size in world_sizes():
            _compare_with_raw(root, config, world_size, flags.rounds)
        async_saves.compare(root / "training", config, flags.runs)
        resume.measure(root / "killed", settings, flags.runs)


def _compare_with_raw(root: Path, config: TrainConfig, world_size: int, rounds: int) -> None:
    """Starts a job, lets it take its turns, and prints what came of them."""
    size, payload, seconds = run_job(_take_turns, world_size, root, config, rounds)
    count = parameter_count(resolve_shape(config.model))
    if world_size == 1:
        over = f"{size / count:.3f} a parameter, {size / count / 12 - 1:.2%} over 12"
        print(f"\n{count:,} parameters: {size:,} bytes on disk, {over}")
    rows = []
    for name, (raw, own) in PAIRS.items():
        ratios = [theirs / ours for theirs, ours in zip(seconds[raw], seconds[own], strict=True)]
        rates = [spread([payload / s / 1e9 for s in seconds[turn]], ".2f") for turn in (own, raw)]
        rows.append((name, *(f"{middle} ({quartiles})" for middle, quartiles in (*rates, spread(ratios, ".2f")))))
    header = (f"{world_size} process{'es' if world_size > 1 else ''}", "GB/s", "raw, GB/s", "ratio")
    print_table(header, rows)
    print(f"\nmedian (quartiles) of {rounds} rounds", flush=True)


def _take_turns(
    processes: Processes, root: Path, config: TrainConfig, rounds: int
) -> tuple[int, int, dict[str, list[float]]]:
    """In each measured process: every turn, begun and ended together; bytes on disk, bytes of tensors, seconds."""
    rank = processes.rank
    tensors = tensors_of_a_run(config, processes)
    run, raw = root / "run", root / "raw"
    turns = _turns(run, raw, config, tensors)
    seconds: dict[str, list[float]] = {}
    raw.mkdir(exist_ok=True)
    rounds_in_turn = range(rounds + 1)
    for number in in_turn(rounds_in_turn) if rank == 0 else rounds_in_turn:
        for pair in PAIRS.values():
            for name in pair if number % 2 else pair[::-1]:
                if name == "save" and rank == 0:
                    shutil.rmtree(run, ignore_errors=True)
                if name == "write raw":
                    (raw / str(rank)).unlink(missing_ok=True)
                if name == "load":
                    drop_from_memory(list(checkpoint_path(run, 1).iterdir()))
                if name == "read raw":
                    drop_from_memory([raw / str(rank)])
                dist.barrier()
                began = time.perf_counter()
                turns[name]()
                dist.barrier()
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    size = sum(path.stat().st_size for path in checkpoint_path(run, 1).iterdir())
    return size, plan_save(tensors).total_bytes, {name: turns[1:] for name, turns in seconds.items()}


def _turns(run: Path, raw: Path, config: TrainConfig, tensors: Mapping[str, torch.Tensor]) -> Turns:
    """What is timed, by name."""
    own_file = raw / str(dist.get_rank())
    contents = [
        piece.values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for pieces in plan_save(tensors).files.values()
        for piece in pieces
    ]

    def save() -> None:
        save_checkpoint(checkpoint_path(run, 1), plan_save(tensors), MANIFEST_OF_STEP_1)

    def load() -> None:
        found = find_checkpoint(replace(config.checkpoint, ckpt_save_path=str(run)))
        assert found is not None
        load_tensors(found.path, found.manifest.files, tensors)
        synchronize()

    def write_raw() -> None:
        with own_file.open("wb", buffering=0) as file:
            for content in contents:
                while content:
                    content = content[file.write(content) :]
            os.fsync(file.fileno())

    def read_raw() -> None:
        buffer = bytearray(READ_BYTES)
        with own_file.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return {
        "save": save,
        "write raw": write_raw,
        "load": load,
        "read raw": read_raw,
        "load, file cache": load,
        "read raw, file cache": read_raw,
    }


def tensors_of_a_run(config: TrainConfig, processes: Processes) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, as a checkpoint holds them."""
    mesh = build_mesh(config.parallel, processes.world_size, processes.local_world_size, processes.device.type)
    model = build_model(resolve_shape(config.model), config, mesh, processes.device, initialize=True)
    optimizer = build_optimizer(model.parameters, config.optimizer)
    materialise_state(optimizer)
    parameters = {parameter_name(name): parameter for name, parameter in model.parameters.items()}
    return tensor_state(parameters, optimizer)


if __name__ == "__main__":
    main()
