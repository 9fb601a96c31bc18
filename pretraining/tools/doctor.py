"""`pretrain doctor`: versions, devices and speeds of the machines of a job, which neither a start nor torchrun shows.

    each rank: versions, device, matrix products --+
    one rank of each machine: two folders          +--> a row per check: the median, and ranks that are slower
    all ranks together: the all-reduce           --+

All ranks measure at the same time, as in training.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.config.training import CheckpointConfig
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes, gather_from_every_rank, join_processes
from pretraining.errors import ConfigError
from pretraining.estimate.devices import peak_tflops
from pretraining.files import is_folder
from pretraining.launch.layout import resolve_layout
from pretraining.launch.program import FAILED
from pretraining.text import count_of, format_table
from pretraining.tools.command_settings import DoctorConfig

GIB, MIB = 2**30, 2**20
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
MESSAGE_BYTES = {"cpu": 2**24, "cuda": 2**28}
FILE_MIB = 256
REPEATS, CALLS = 5, 4
SLOW_FACTOR = 1.3
"""A rank is named if the median of the others is this many times faster."""


@dataclass(frozen=True)
class RankReport:
    """Versions and speeds of one rank.

    Attributes:
        versions: of software and device, by name.
        speeds: by check, which names the unit.
    """

    host: str
    versions: dict[str, str]
    speeds: dict[str, float]


def doctor(config: DoctorConfig) -> None:
    """Measure the machines of a job and print the result; every process calls this.

    Raises:
        ConfigError: a folder cannot be written.
        SystemExit: ranks have different versions; raised in all processes.
    """
    with join_processes(resolve_layout(os.environ), parallel=config.parallel) as processes:
        together = dict(_all_reduce(processes))
        ranks = gather_from_every_rank(lambda: _examine(config, processes, together))
        if processes.is_main:
            hosts = {rank.host for rank in ranks}
            heading = f"{count_of(len(ranks), 'process')} on {count_of(len(hosts), 'machine')}"
            text = "\n".join([heading, *format_table([("check", "found", ""), *_rows(ranks)])])
            print(json.dumps({"ranks": [*map(asdict, ranks)]}) if config.doctor.json else text, flush=True)
    if any(rank.versions != ranks[0].versions for rank in ranks):
        sys.exit(FAILED)


def _examine(config: DoctorConfig, processes: Processes, together: dict[str, float]) -> RankReport:
    device, dtype = processes.device, compute_dtype(config.parallel, processes.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "device": name}
    if device.type == "cuda":
        versions["CUDA"] = str(torch.version.cuda or torch.version.hip)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    peak = peak_tflops(name)
    of_peak = "" if peak is None else f" of {peak:g}"
    speeds = {f"matmul in {dtype}, TFLOP/s{of_peak}": matmul_tflops(device, dtype), **together}
    folders = {"disk_path": config.doctor.disk_path}
    if config.checkpoint.ckpt_save_path != CheckpointConfig.ckpt_save_path:
        folders["ckpt_save_path"] = config.checkpoint.ckpt_save_path
    for flag, folder in folders.items():
        if folder is not None and processes.local_rank == 0:
            speeds |= _disk(flag, Path(folder), f".pretrain_doctor_{processes.rank}_{os.getpid()}")
    return RankReport(socket.gethostname(), versions, speeds)


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of multiplying two square matrices: 2 x size^3 operations."""
    size = MATMUL_SIZE[device.type]
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * size**3 / _seconds_of(lambda: torch.mm(one, other, out=out), device) / 1e12


def _all_reduce(processes: Processes) -> Iterator[tuple[str, float]]:
    """Measure the all-reduce of a large message; all ranks must call this."""
    ranks = processes.world_size
    if ranks > 1:
        message = torch.zeros(MESSAGE_BYTES[processes.device.type] // 4, device=processes.device)
        seconds = _seconds_of(lambda: dist.all_reduce(message), processes.device)
        # The traffic of each link, as nccl-tests counts it.
        yield "all-reduce, GiB/s of bus", message.nbytes / GIB / seconds * 2 * (ranks - 1) / ranks


def _disk(flag: str, folder: Path, name: str) -> dict[str, float]:
    """Write a file with fsync, then read it without the page cache; a ConfigError if the folder cannot be used."""
    if flag == "ckpt_save_path":  # a run makes its folder
        folder = next(place for place in (folder.absolute(), *folder.absolute().parents) if is_folder(place))
    path, block, began = folder / name, os.urandom(MIB), time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(FILE_MIB):
                file.write(block)
            os.fsync(file.fileno())
        written = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # a hint: a system that ignores it reads from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(MIB):
                pass
        read = time.perf_counter()
    except OSError as error:
        raise ConfigError(f"--{flag}: {folder} cannot be written and read ({error}): set another folder") from None
    finally:
        with suppress(OSError):
            path.unlink()
    gib = FILE_MIB / 1024
    return {f"{flag}, GiB/s written": gib / (written - began), f"{flag}, GiB/s read": gib / (read - written)}


def _seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call. The median counts, because a device that is slow at times slows training down."""
    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) / CALLS  # the first is a warm-up


def _rows(ranks: Sequence[RankReport]) -> Iterator[tuple[str, str, str]]:
    """Yield check, median or version, and the ranks that differ."""
    for name, version in ranks[0].versions.items():
        versions = {number: rank.versions.get(name) for number, rank in enumerate(ranks)}
        different = [f"rank {number} has {other}" for number, other in versions.items() if other != version]
        yield name, version, ", ".join(different)
    for check in dict.fromkeys(check for rank in ranks for check in rank.speeds):
        speeds = {number: rank.speeds[check] for number, rank in enumerate(ranks) if check in rank.speeds}
        slow = [f"rank {number} on {ranks[number].host} {speeds[number]:.3g}" for number in slow_ranks(speeds)]
        yield check, f"{statistics.median(speeds.values()):.3g}", f"slow: {', '.join(slow)}" if slow else ""


def slow_ranks(speeds: dict[int, float]) -> list[int]:
    """Return the ranks than which the median of the others is `SLOW_FACTOR` times faster."""
    others = {rank: [speeds[other] for other in speeds if other != rank] for rank in speeds}
    return [rank for rank in speeds if others[rank] and speeds[rank] * SLOW_FACTOR <= statistics.median(others[rank])]
