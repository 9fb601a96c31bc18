"""Measures what one process's device can do by itself: multiply matrices, copy memory, and write and read a disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from pretraining.doctor.timing import seconds_of
from pretraining.errors import ConfigError

GIB = 2.0**30
MATMUL_SIZES = {"cpu": (512, 1024), "cuda": (2048, 4096, 8192)}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 1024 * 2**20}


@dataclass(frozen=True)
class Rate:
    """Something measured on one rank; the higher, the faster.

    Attributes:
        name: what.
        value: how much a second.
        unit: of the value.
    """

    name: str
    value: float
    unit: str


def measure_device(device: torch.device) -> list[Rate]:
    """Matrix products in bfloat16 and float32, and copies of memory."""
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        for size in MATMUL_SIZES[device.type]:
            rates.append(Rate(f"matmul {str(dtype)[6:]} {size}", matmul_tflops(device, dtype, size), "TFLOP/s"))
    rates += [Rate(name, _copy_rate(copy, size, device), "GiB/s") for name, copy, size in _copies(device)]
    return rates


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Rate of a product of two square matrices, 2 x size^3 operations."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * size**3 / seconds_of(lambda: torch.mm(one, other, out=out), device) / 1e12


def _copies(device: torch.device) -> list[tuple[str, Callable[[], object], int]]:
    """Name, copy, and the bytes that it reads and writes."""
    size = COPY_BYTES[device.type]
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found: list[tuple[str, Callable[[], object], int]] = [
        ("memory copy", lambda: target.copy_(source), 2 * size)  # each byte is read and written
    ]
    if device.type == "cuda":
        host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        piece = source[: size // 4]
        found.append(("host to device", lambda: piece.copy_(host, non_blocking=True), size // 4))
        found.append(("device to host", lambda: host.copy_(piece, non_blocking=True), size // 4))
    return found


def _copy_rate(copy: Callable[[], object], size: int, device: torch.device) -> float:
    return size / GIB / seconds_of(copy, device)


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
