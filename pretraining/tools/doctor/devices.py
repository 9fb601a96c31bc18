"""Measures what one process's device can do by itself: multiply matrices, copy memory, and write and read a disk."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from pretraining.errors import ConfigError
from pretraining.tools.doctor.environment import last_level_cache_bytes, memory_bytes
from pretraining.tools.doctor.timing import seconds_of

GIB = 2.0**30
MIB = 2**20
MATMUL_SIZES = {"cpu": (512, 1024), "cuda": (2048, 4096, 8192)}
LEAST_COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # the caches of GPUs end at some 256 MiB (MI300), those of H200 at 50


@dataclass(frozen=True)
class Rate:
    """Something measured on one rank; the higher, the faster.

    Attributes:
        name: what.
        value: how much a second.
        unit: of the value.
        counted: what a call was taken for, in words.
    """

    name: str
    value: float
    unit: str
    counted: str = ""


def measure_device(device: torch.device, local_world_size: int) -> list[Rate]:
    """Matrix products in bfloat16 and float32, and copies of memory.

    Args:
        device: to measure.
        local_world_size: processes on this machine, which all measure at once.
    """
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        for size in MATMUL_SIZES[device.type]:
            rates.append(Rate(f"matmul {str(dtype)[6:]} {size}", matmul_tflops(device, dtype, size), "TFLOP/s"))
    return rates + _measure_copies(device, copy_bytes(device, local_world_size))


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Rate of a product of two square matrices, 2 x size^3 operations."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * size**3 / seconds_of(lambda: torch.mm(one, other, out=out), device) / 1e12


def copy_bytes(device: torch.device, local_world_size: int) -> int:
    """Size of a buffer of which a cache holds next to nothing, as far as there is memory for two of them.

    Args:
        device: where the buffer will be.
        local_world_size: processes on this machine, which share its memory.
    """
    if device.type == "cuda":
        wanted, room = LEAST_COPY_BYTES["cuda"], torch.cuda.mem_get_info(device)[0] // 8
    else:
        wanted = max(LEAST_COPY_BYTES["cpu"], 4 * last_level_cache_bytes())
        room = memory_bytes() // 16 // local_world_size
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
    """Write a file to a folder and to its disk, and read it again past the memory that keeps files; it is removed.

    Args:
        folder: where; it must exist.
        mib: size of the file.
        name: of the file, which no other process may use.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = folder / name
    block = os.urandom(2**20)
    try:
        try:
            began = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                for _ in range(mib):
                    file.write(block)
                os.fsync(file.fileno())
            write_seconds = time.perf_counter() - began
            with path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):  # a hint; where it is not heeded, memory is measured
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.perf_counter()
                while file.read(2**20):
                    pass
            read_seconds = time.perf_counter() - began
        finally:
            with suppress(OSError):
                path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--disk_path={folder} cannot be written and read: {error}. Give a folder that this user may write, or "
            "--disk_path=none."
        ) from None
    return [
        Rate("disk write + fsync", mib / 1024 / write_seconds, "GiB/s"),
        Rate("disk read", mib / 1024 / read_seconds, "GiB/s"),
    ]
