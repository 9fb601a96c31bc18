"""Measures what training depends on: a device by itself, a disk, and what processes can exchange.

    each rank alone: matrix products, copies of memory, a file --> Rate
    all together:    collectives by size --> CollectiveTime; pairs of ranks --> GiB/s of each Link

In a collective all ranks take the same time, even if one of them is slow. So pairs exchange messages too, as many at
once as there are pairs of different ranks: what is slow there has a name.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.checkpoint.writer import plan_save
from pretraining.distributed.processes import gather_from_every_rank, on_every_rank, on_rank_zero
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import flush_folder
from pretraining.launch.machine import machine_memory
from pretraining.tools.doctor.machine_facts import last_level_cache_bytes

GIB = 2.0**30
MIB = 2**20
MATMUL_SIZES = {"cpu": (512, 1024), "cuda": (2048, 4096, 8192)}
LEAST_COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # the caches of GPUs end at some 256 MiB (MI300), those of H200 at 50
SMALLEST_BYTES = 1024
DISK_WRITE, DISK_READ = "disk write + fsync", "disk read"
REPEATS = 5
BUDGET_SECONDS = 0.3
MOST_CALLS = 2**14
MOST_FOR_ALL = 16
SAVED_TENSOR_BYTES = 2**24
FIRST_MIB, DISK_SECONDS = 16, 6
Pair = tuple[int, int]


@dataclass(frozen=True)
class Rate:
    """Something measured on one rank; the higher, the faster. `counted` says what a call was taken for."""

    name: str
    value: float
    unit: str
    counted: str = ""


def measure_device(device: torch.device, local_world_size: int) -> list[Rate]:
    """Matrix products in bfloat16 and float32, and copies of memory; all processes of the machine measure at once."""
    rates = [
        Rate(f"matmul {str(dtype)[6:]} {size}", matmul_tflops(device, dtype, size), "TFLOP/s")
        for dtype in (torch.bfloat16, torch.float32)
        for size in MATMUL_SIZES[device.type]
    ]
    return rates + _measure_copies(device, copy_bytes(device, local_world_size))


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Rate of a product of two square matrices, 2 x size^3 operations."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * size**3 / seconds_of(lambda: torch.mm(one, other, out=out), device) / 1e12


def copy_bytes(device: torch.device, local_world_size: int) -> int:
    """Size of a buffer of which a cache holds next to nothing, as far as each process has memory for two of them."""
    if device.type == "cuda":
        wanted, room = LEAST_COPY_BYTES["cuda"], torch.cuda.mem_get_info(device)[0] // 8
    else:
        wanted = max(LEAST_COPY_BYTES["cpu"], 4 * last_level_cache_bytes())
        room = machine_memory().total // 16 // local_world_size
    return min(wanted, max(1, room // MIB) * MIB)


def _measure_copies(device: torch.device, size: int) -> list[Rate]:
    # Written, because memory that never was is one page of zeros to the system, and that page is in the cache.
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)

    def rate(name: str, target: torch.Tensor, source: torch.Tensor, counted: int, words: str) -> Rate:
        seconds = seconds_of(lambda: target.copy_(source, non_blocking=True), device)
        return Rate(name, counted / GIB / seconds, "GiB/s", f"{words} a copy")

    rates = [rate("memory copy", target, source, 2 * size, f"{size // MIB} MiB read, {size // MIB} MiB written")]
    if device.type == "cuda":
        host, piece = torch.ones(size // 4, dtype=torch.uint8).pin_memory(), source[: size // 4]
        rates.append(rate("host to device", piece, host, len(piece), f"{len(piece) // MIB} MiB"))
        rates.append(rate("device to host", host, piece, len(piece), f"{len(piece) // MIB} MiB"))
    return rates


def measure_disk(folder: Path, mib: int, name: str) -> list[Rate]:
    """Writes a file to disk and reads it again, past the memory that keeps files; no other process may use its name.

    On a slow disk it is smaller, so that it takes seconds.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = folder / name
    try:
        piece = min(mib, FIRST_MIB)
        mib = max(1, min(mib, int(DISK_SECONDS * piece / _write_seconds(path, piece))))
        write_seconds = _write_seconds(path, mib)
        read_seconds = _read_seconds(path)
    except OSError as error:
        raise ConfigError(
            f"--disk_path={folder} cannot be written and read: {error}. Give a folder that this user may write, or "
            "--disk_path=none."
        ) from None
    finally:
        with suppress(OSError):
            path.unlink()
    return [
        Rate(DISK_WRITE, mib / 1024 / write_seconds, "GiB/s"),
        Rate(DISK_READ, mib / 1024 / read_seconds, "GiB/s"),
    ]


def measure_saves(folder: Path, size: int) -> float:
    """GiB/s at which all processes together save a checkpoint of `size` bytes; a collective call.

    Written as training writes one: by the same code, each process its part in several files at once, with checksums
    and flushed. The values are those of one buffer again and again, so that no memory of that size is needed.

    Raises:
        ConfigError: the folder cannot be written.
    """
    pieces = max(1, size // SAVED_TENSOR_BYTES)
    buffer = torch.randint(256, (size // pieces,), dtype=torch.uint8)
    plan = plan_save({f"layers.{number}.weight": buffer for number in range(pieces)})
    where = on_rank_zero(lambda: _temporary_folder(folder))
    try:
        barrier()
        began = time.perf_counter()
        on_every_rank(lambda: plan.write(where))
        on_rank_zero(lambda: flush_folder(where))
        seconds = _slowest(time.perf_counter() - began)
    except CheckpointError as error:
        raise ConfigError(f"a checkpoint cannot be saved in {folder}: {error}") from None
    finally:
        on_rank_zero(lambda: shutil.rmtree(where, ignore_errors=True))
    return buffer.nbytes * pieces / GIB / seconds


def _temporary_folder(folder: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=".pretrain_doctor_", dir=folder))
    except OSError as error:
        raise ConfigError(f"a checkpoint cannot be saved in {folder}: {error}. Give another --ckpt_save_path") from None


def _write_seconds(path: Path, mib: int) -> float:
    block = os.urandom(MIB)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(mib):
            file.write(block)
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _read_seconds(path: Path) -> float:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # a hint; a system that ignores it reads from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(MIB):
            pass
        return time.perf_counter() - began


@dataclass(frozen=True)
class Link:
    """Two ranks that exchange messages, the smaller one first; `is_inside` a machine, or between two."""

    one: int
    other: int
    is_inside: bool


@dataclass(frozen=True)
class CollectiveTime:
    """A collective over all ranks.

    Attributes:
        size: bytes of the whole tensor.
        seconds: of a call, on the slowest rank.
        bus_gib_per_second: what the slowest link must have carried each way, whatever the number of ranks: the rule
            of nccl-tests, size / seconds x 2 (n-1) / n for an all-reduce and x (n-1) / n for the others.
    """

    name: str
    size: int
    seconds: float
    bus_gib_per_second: float


def message_sizes(largest: int) -> list[int]:
    """Bytes: the smallest, which shows the latency, and each 32 times as large up to the largest."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 32 < largest:
        sizes.append(sizes[-1] * 32)
    return [*sizes, largest]


def measure_collectives(device: torch.device, largest_bytes: int) -> list[CollectiveTime]:
    """All-reduce, all-gather and reduce-scatter by size; a collective call, with the same result on all ranks."""
    ranks, times = dist.get_world_size(), []
    with warnings.catch_warnings():
        # PyTorch 2.13 calls two of them by other names, which 2.11 does not have.
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
        for size in message_sizes(largest_bytes):
            piece = torch.zeros(max(1, size // 4 // ranks), dtype=torch.float32, device=device)
            whole = piece.repeat(ranks)
            kinds: list[tuple[str, Callable[[], object], int]] = [
                ("all-reduce", partial(dist.all_reduce, whole), 2),
                ("all-gather", partial(dist.all_gather_into_tensor, whole, piece), 1),
                ("reduce-scatter", partial(dist.reduce_scatter_tensor, piece, whole), 1),
            ]
            for name, call, passes in kinds:
                barrier()
                seconds = _slowest(seconds_of(call, device, together=True))
                bus = whole.nbytes * passes * (ranks - 1) / ranks / seconds / GIB
                times.append(CollectiveTime(name, whole.nbytes, seconds, bus))
    return times


def measure_links(device: torch.device, size: int, hosts: list[str]) -> dict[Link, float]:
    """GiB/s each way between pairs of ranks, by messages of `size` bytes; a collective call, the same on all ranks."""
    rank = dist.get_rank()
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    own: dict[Pair, float] = {}
    for pairs in rounds_of_pairs(hosts):
        barrier()
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is None:
            seconds_of(lambda: None, device, together=True)  # the others ask all ranks how many calls to make
            continue
        own[mine] = size / GIB / exchange_seconds(sent, received, other=sum(mine) - rank)
    synchronize(device)
    everyone = gather_from_every_rank(lambda: own)
    return {
        Link(one, other, hosts[one] == hosts[other]): min(everyone[one][one, other], everyone[other][one, other])
        for one, other in sorted({pair for each in everyone for pair in each})
    }


def exchange_seconds(sent: torch.Tensor, received: torch.Tensor, other: int) -> float:
    """Seconds of a message to another rank and one from it, at the same time."""

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return seconds_of(exchange, sent.device, together=True)


def rounds_of_pairs(hosts: Sequence[str]) -> list[list[Pair]]:
    """Pairs of ranks that exchange messages, round by round; in a round no rank is in two pairs.

    First come the ranks inside each machine, then those of two machines, all against all. So a machine's network
    carries as many messages in one round between machines as in any other, and no link is slow only because of the
    others in its round. Up to `MOST_FOR_ALL` ranks all exchange with each other; of more, each exchanges with those of
    its machine and with its counterparts on the machines beside. A machine that has more exchanges between neighbours.

    Args:
        hosts: machine of each rank.
    """
    machines = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    inside = [_all_against_all(ranks) if len(ranks) <= MOST_FOR_ALL else _neighbours(ranks) for ranks in machines]
    rounds = [list(chain(*at_once)) for at_once in zip_longest(*inside, fillvalue=[])]
    is_few = len(hosts) <= MOST_FOR_ALL
    numbers = range(len(machines))
    for pairings in _all_against_all(numbers) if is_few else _neighbours(numbers):
        size = max((len(machines[number]) for pairing in pairings for number in pairing), default=0)
        for shift in range(size if is_few else 1):
            rounds.append([pair for a, b in pairings for pair in _across(machines[a], machines[b], size, shift)])
    return [pairs for pairs in rounds if pairs]


def _all_against_all(players: Sequence[int]) -> list[list[Pair]]:
    """Rounds in which each meets each other once: the circle method of tournaments."""
    places = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        couples = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in couples if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _neighbours(players: Sequence[int]) -> list[list[Pair]]:
    pairs = list(pairwise(players))
    return [pairs[::2], pairs[1::2]]


def _across(ones: Sequence[int], others: Sequence[int], size: int, shift: int) -> Iterator[Pair]:
    """Ranks of two machines, of `size` ranks at most, so that over all shifts each meets each."""
    for place, one in enumerate(ones):
        if (place + shift) % size < len(others):
            other = others[(place + shift) % size]
            yield min(one, other), max(one, other)


def seconds_of(function: Callable[[], object], device: torch.device, together: bool = False) -> float:
    """Seconds of a call: the median of a few stretches of calls that take `BUDGET_SECONDS`, about.

    The median, not the best: a device that is slow now and then is slow in training.

    Args:
        device: that the function works on; synchronized at the end of each stretch.
        together: all ranks measure at once and make the same number of calls, as collectives need.
    """
    calls = _calls_of_a_stretch(function, device, together)
    return statistics.median(_stretch(function, device, calls) for _ in range(REPEATS)) / calls


def _calls_of_a_stretch(function: Callable[[], object], device: torch.device, together: bool) -> int:
    """As many as its part of the budget allows, found by doubling: that brings caches, buffers and clocks up, too."""
    function()  # chooses algorithms, makes buffers and connections
    calls, agree = 1, _slowest if together else float
    while calls < MOST_CALLS and agree(_stretch(function, device, calls)) <= BUDGET_SECONDS / REPEATS / 2:
        calls *= 2
    return calls


def _stretch(function: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def barrier() -> None:
    """Waits until all ranks are here; over the hosts, so that no device is asked."""
    dist.all_reduce(torch.zeros(1))


def _slowest(seconds: float) -> float:
    everyone = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return everyone.item()
