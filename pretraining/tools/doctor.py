"""`pretrain doctor`: measurements of the machines of a job, with verdicts and advice.

    each rank: versions, cores, device, disk --+
    all ranks: all-reduce, messages, saves   --+--> Readings --judge--> Rows: check, verdict, advice

All ranks measure at the same time, as in training. A rank is reported if it is slower than the median of the others.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from pretraining.checkpoint.writer import plan_save
from pretraining.config.training import CheckpointConfig, ModelConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import (
    Processes,
    gather_from_every_rank,
    join_processes,
    on_every_rank,
    on_rank_zero,
)
from pretraining.errors import CheckpointError, ConfigError
from pretraining.estimate.costs import parameter_count
from pretraining.estimate.devices import peak_tflops
from pretraining.estimate.memory import MASTER_BYTES, optimizer_state_bytes
from pretraining.files import is_folder
from pretraining.launch.layout import resolve_layout
from pretraining.launch.machine import machine_memory, usable_cores
from pretraining.launch.program import FAILED
from pretraining.text import count_of, format_table
from pretraining.tools.commands import DoctorConfig

Verdict = Literal["good", "look at", "bad"]

GIB, MIB = 2.0**30, 2**20
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
MESSAGE_MIB = {"cpu": 16, "cuda": 256}
REPEATS, BUDGET_SECONDS = 5, 0.3
SAVED_TENSOR_BYTES = 2**24
BAD_TIMES = 3.0
"""A rank that is slower than the others by this factor is "bad" rather than "look at"."""
LOW_SHARE_OF_PEAK, SLOW_DISK_GIB, SLOW_BFLOAT16 = 0.4, 0.1, 1.5


@dataclass(frozen=True)
class Reading:
    """A number that one rank measured; higher is better.

    Attributes:
        normal: expected value, as text; empty if only the other ranks give a reference.
        verdict: result of comparing `value` with `normal`.
        advice: remedy if the verdict is not "good".
    """

    check: str
    value: float
    unit: str
    normal: str = ""
    verdict: Verdict = "good"
    advice: str = ""


@dataclass(frozen=True)
class Row:
    """A line of the result. `found` is the median over ranks, or an unusual value."""

    check: str
    verdict: Verdict
    found: str
    normal: str = ""
    advice: str = ""


@dataclass(frozen=True)
class RankReport:
    """The readings of one rank."""

    host: str
    versions: dict[str, str]
    readings: list[Reading]


def doctor(config: DoctorConfig) -> None:
    """Measure the machines of a job and print the result; every process calls this.

    Raises:
        ConfigError: a folder cannot be written.
        SystemExit: a verdict is "bad"; raised in all processes.
    """
    layout = resolve_layout(os.environ)
    with join_processes(layout, parallel=config.parallel) as processes:
        ranks = gather_from_every_rank(lambda: _examine(config, processes))
        for rank, more in enumerate(gather_from_every_rank(lambda: _measure_links(config, processes))):
            ranks[rank].readings.extend(more)
        saves = _measure_saves(config, processes.world_size)
        rows = [*_same_versions(ranks), *_judge(ranks, config.doctor.slow_factor), *saves]
        worst: Verdict = next(each for each in ("bad", "look at", "good") if any(row.verdict == each for row in rows))
        if processes.is_main:
            documents = {"verdict": worst, "rows": [*map(asdict, rows)], "ranks": [*map(asdict, ranks)]}
            text = "\n".join(_table(ranks, rows))
            print(json.dumps(documents) if config.doctor.json else text, flush=True)
    if worst == "bad":
        sys.exit(FAILED)


# Measurements of each rank by itself


def _examine(config: DoctorConfig, processes: Processes) -> RankReport:
    device, options = processes.device, config.doctor
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "device": name}
    if device.type == "cuda":
        versions["CUDA"] = str(torch.version.cuda or torch.version.hip)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    readings = [_cores(processes.local_world_size)]
    readings += _matmuls(device, name, compute_dtype(config.parallel, device) == torch.bfloat16)
    readings += _copies(device, processes.local_world_size)
    if options.disk_path is not None and processes.local_rank == 0:
        readings += _disk(Path(options.disk_path), options.disk_mib, f".pretrain_doctor_{processes.rank}_{os.getpid()}")
    return RankReport(socket.gethostname(), versions, readings)


def _cores(processes: int) -> Reading:
    cores, threads = usable_cores(), torch.get_num_threads()
    is_bad, is_crowded = cores < processes, cores < threads * processes
    advice = "request more cores (--cpus-per-task)" if is_bad else f"set OMP_NUM_THREADS={max(1, cores // processes)}"
    verdict: Verdict = "bad" if is_bad else "look at" if is_crowded else "good"
    normal = f"at least {processes} processes x {threads} threads"
    return Reading("cores", cores, "cores", normal, verdict, advice)


def _matmuls(device: torch.device, name: str, is_chosen: bool) -> Iterator[Reading]:
    """Yield the rates of matrix products; `is_chosen` says that the run would compute in bfloat16."""
    size = MATMUL_SIZE[device.type]
    half, full = (matmul_tflops(device, dtype, size) for dtype in (torch.bfloat16, torch.float32))
    peak = peak_tflops(name)
    verdict: Verdict = "good"
    normal = advice = ""
    if peak is not None:
        verdict = "good" if half >= LOW_SHARE_OF_PEAK * peak else "look at"
        normal = f"at least {LOW_SHARE_OF_PEAK:.0%} of the peak of {peak:g}"
        advice = "check the GPU's clocks and other programs on it (nvidia-smi)"
    elif is_chosen and full > SLOW_BFLOAT16 * half:
        verdict, normal = "look at", f"not below float32, which is {full:.3g}"
        advice = "train in float32: --mixed_precision=false"
    yield Reading(f"matmul bfloat16 {size}", half, "TFLOP/s", normal, verdict, advice)
    yield Reading(f"matmul float32 {size}", full, "TFLOP/s")


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the rate of multiplying two square matrices: 2 x size^3 operations."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * size**3 / seconds_of(lambda: torch.mm(one, other, out=out), device) / 1e12


def _copies(device: torch.device, processes: int) -> Iterator[Reading]:
    is_gpu = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[0] // 8 if is_gpu else machine_memory().total // 16 // processes
    size = min(COPY_BYTES[device.type], max(MIB, room))
    # `ones` writes every page: the system maps untouched memory to one page of zeros, which stays in the cache.
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    yield Reading("memory copy", 2 * size / GIB / seconds_of(lambda: target.copy_(source), device), "GiB/s")
    if device.type == "cuda":
        host = torch.ones(size // 4, dtype=torch.uint8).pin_memory()
        piece = source[: len(host)]
        for name, to, of in (("host to device", piece, host), ("device to host", host, piece)):
            copy = partial(to.copy_, of, non_blocking=True)
            yield Reading(name, len(host) / GIB / seconds_of(copy, device), "GiB/s")


def _disk(folder: Path, mib: int, name: str) -> Iterator[Reading]:
    """Write a file with fsync, then read it without the page cache; a ConfigError if the folder cannot be used."""
    path, block = folder / name, os.urandom(MIB)
    try:
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(mib):
                file.write(block)
            os.fsync(file.fileno())
        written = time.perf_counter() - began
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # a hint: a system that ignores it reads from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while file.read(MIB):
                pass
        read = time.perf_counter() - began
    except OSError as error:
        raise ConfigError(
            f"--disk_path={folder} cannot be written and read ({error}): set another folder or --disk_path=none"
        ) from None
    finally:
        with suppress(OSError):
            path.unlink()
    for check, seconds in (("disk write + fsync", written), ("disk read", read)):
        rate = mib / 1024 / seconds
        verdict: Verdict = "good" if rate >= SLOW_DISK_GIB else "look at"
        normal = f"at least {SLOW_DISK_GIB:g} GiB/s"
        yield Reading(check, rate, "GiB/s", normal, verdict, "put data and checkpoints on a faster disk")


# Measurements of all ranks together


def _measure_links(config: DoctorConfig, processes: Processes) -> list[Reading]:
    """Measure the all-reduce and messages to the next rank and the next machine; all ranks must call this."""
    if processes.world_size == 1:
        return []
    device, ranks = processes.device, processes.world_size
    size = (config.doctor.message_mib or MESSAGE_MIB[device.type]) * MIB
    sent = torch.zeros(size // 4, device=device)
    received = torch.empty_like(sent)
    seconds = seconds_of(lambda: dist.all_reduce(sent), device, together=True)
    bus = size / GIB / seconds * 2 * (ranks - 1) / ranks  # traffic of each link, as nccl-tests counts it
    found = [Reading("all-reduce", bus, "GiB/s of bus")]
    small = torch.zeros(256, device=device)
    calls = 1 / seconds_of(lambda: dist.all_reduce(small), device, together=True)
    found.append(Reading("all-reduce of 1 KiB", calls, "per second"))
    shifts = {"next rank": 1, "next machine": on_rank_zero(lambda: processes.local_world_size)}
    for name, shift in shifts.items():
        if shift % ranks and (name == "next rank" or 1 < shift < ranks):
            to, of = (processes.rank + shift) % ranks, (processes.rank - shift) % ranks
            exchange = partial(_exchange, sent, received, to, of)
            seconds = seconds_of(exchange, device, together=True)
            found.append(Reading(f"messages to the {name}", size / GIB / seconds, "GiB/s"))
    return found


def _exchange(sent: torch.Tensor, received: torch.Tensor, to: int, of: int) -> None:
    """Send to one rank, and receive from another at the same time."""
    operations = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, of)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _measure_saves(config: DoctorConfig, ranks: int) -> list[Row]:
    """Write a checkpoint, or --disk_mib of it per rank, into --ckpt_save_path; all ranks must call this.

    The code of training writes it. All tensors share one buffer, so memory stays small.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = config.checkpoint.ckpt_save_path
    if path is None or path == CheckpointConfig.ckpt_save_path:
        return []
    places = (Path(path).absolute(), *Path(path).absolute().parents)
    folder = on_rank_zero(lambda: next(place for place in places if is_folder(place)))
    free = on_rank_zero(lambda: shutil.disk_usage(folder).free)
    size, written = None, min(free // 2, ranks * config.doctor.disk_mib * MIB)
    if config.model != ModelConfig():
        shape = resolve_shape(config.model)
        size = MASTER_BYTES * parameter_count(shape) + optimizer_state_bytes(config.optimizer, shape)
        written = min(size, written)
    try:
        rate = _measure_save(folder, written)
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"--ckpt_save_path={path}: no checkpoint can be saved in {folder} ({error})") from None
    if size is None:
        return [Row("saves", "good", f"{rate:.3g} GiB/s, {free / GIB:,.1f} GiB free; name a model to see the size")]
    verdict: Verdict = "bad" if free < size else "look at" if free < 3 * size else "good"
    room = f"{free / GIB:,.1f} GiB free, {size / GIB:,.2f} per checkpoint"
    seconds = size / GIB / rate
    saves = f"{rate:.3g} GiB/s: {seconds:,.1f} s per checkpoint"
    return [
        Row("room for checkpoints", verdict, room, "three checkpoints", "free disk space, or set --keep_last=1"),
        Row("saves", "look at" if seconds > 300 else "good", saves, "below 5 minutes", "use a faster disk"),
    ]


def _measure_save(folder: Path, size: int) -> float:
    """Return the GiB/s of a save of this size in a temporary folder; a collective call."""
    pieces = max(1, size // SAVED_TENSOR_BYTES)
    buffer = torch.randint(256, (max(1, size // pieces),), dtype=torch.uint8)
    plan = plan_save({f"layers.{number}.weight": buffer for number in range(pieces)})
    where = on_rank_zero(lambda: Path(tempfile.mkdtemp(prefix=".pretrain_doctor_", dir=folder)))
    try:
        dist.all_reduce(torch.zeros(1))  # a barrier: all ranks start at the same time
        began = time.perf_counter()
        on_every_rank(lambda: plan.write(where))
        return buffer.nbytes * pieces / GIB / _slowest(time.perf_counter() - began)
    finally:
        on_rank_zero(lambda: shutil.rmtree(where, ignore_errors=True))


# Verdicts


def _same_versions(ranks: Sequence[RankReport]) -> Iterator[Row]:
    for name in ranks[0].versions:
        values = [rank.versions.get(name, "none") for rank in ranks]
        places = ", ".join(f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values))
        is_same = len(set(values)) == 1
        found = values[0] if is_same else places
        yield Row(name, "good" if is_same else "bad", found, "the same on all ranks", "install the same version")


def _judge(ranks: Sequence[RankReport], factor: float) -> Iterator[Row]:
    """Yield a row per check, and one per unusual or slow rank."""
    by_check: dict[str, dict[int, Reading]] = {}
    for rank, report in enumerate(ranks):
        for reading in report.readings:
            by_check.setdefault(reading.check, {})[rank] = reading
    for check, readings in by_check.items():
        values = {rank: reading.value for rank, reading in readings.items()}
        first = next(iter(readings.values()))
        median = statistics.median(values.values())
        yield Row(check, "good", f"{median:.3g} {first.unit}".strip(), first.normal)
        for rank, reading in readings.items():
            where = f"rank {rank} on {ranks[rank].host}: {reading.value:.3g} {reading.unit}".strip()
            if reading.verdict != "good":
                yield Row(check, reading.verdict, where, reading.normal, reading.advice)
        is_rate = "/s" in first.unit or first.unit == "per second"
        for rank, times in (find_slow(values, factor) if is_rate else {}).items():
            verdict: Verdict = "bad" if times >= BAD_TIMES else "look at"
            where = f"rank {rank} on {ranks[rank].host}: {values[rank]:.3g} {first.unit}, {times:.1f} times slower"
            advice = "look for other programs on the machine, or leave it out"
            yield Row(check, verdict, where, f"like the median of {median:.3g}", advice)


def find_slow(values: dict[int, float], factor: float) -> dict[int, float]:
    """Return the slowdown of each rank that is at least `factor` times slower than the median of the others."""
    found = {}
    for rank, value in values.items():
        others = [other for each, other in values.items() if each != rank]
        if others and value > 0 and value * factor <= (median := statistics.median(others)):
            found[rank] = median / value
    return found


def _table(ranks: Sequence[RankReport], rows: Sequence[Row]) -> Iterator[str]:
    hosts = len({rank.host for rank in ranks})
    yield f"{count_of(len(ranks), 'process')} on {count_of(hosts, 'machine')}"
    table = [("check", "verdict", "found", "normal", "remedy")]
    for row in rows:
        table.append((row.check, row.verdict, row.found, row.normal, row.advice if row.verdict != "good" else ""))
    yield from format_table(table)


# Timing


def seconds_of(function: Callable[[], object], device: torch.device, together: bool = False) -> float:
    """Return the seconds of a call: the median of `REPEATS` timed runs, about `BUDGET_SECONDS` in all.

    The median rather than the minimum, because a device that is slow at times slows training down.

    Args:
        together: all ranks make the same number of calls, as collectives require.
    """

    def run(calls: int) -> float:
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            function()
        _synchronize(device)
        return time.perf_counter() - began

    run(1)  # warm-up: chooses algorithms, makes buffers and connections
    calls = 1
    while calls < 2**14 and (_slowest(run(calls)) if together else run(calls)) <= BUDGET_SECONDS / REPEATS / 2:
        calls *= 2
    return statistics.median(run(calls) for _ in range(REPEATS)) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float) -> float:
    everyone = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return everyone.item()
