"""A job of several processes on this machine that measure together, and the memory of a process."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pretraining.distributed.processes import join_processes
from pretraining.launch.layout import ProcessLayout
from scripts.benchmark.common import announce

T = TypeVar("T")
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def add_folder_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --folder, where files are measured."""
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="on the disk to be measured (default %(default)s)"
    )


@contextmanager
def measured_folder(flags: argparse.Namespace) -> Iterator[Path]:
    """Begins a benchmark in a new folder inside --folder, which is gone afterwards."""
    announce(flags)
    root = Path(tempfile.mkdtemp(prefix="benchmark-", dir=flags.folder))
    print(f"folder    {flags.folder}, {file_system_of(root)}", flush=True)
    try:
        yield root
    finally:
        shutil.rmtree(root)


def world_sizes() -> list[int]:
    """One process, and two where two have a device each."""
    return [count for count in (1, 2) if not torch.cuda.is_available() or torch.cuda.device_count() >= count]


def run_job(work: Callable[..., T], world_size: int, *arguments: Any) -> T:
    """Has processes that have joined each other do the same work; returns what rank 0 makes of it.

    Args:
        work: called with the processes and the arguments; a function of a module, since it runs in new processes.
        world_size: of the job.
        arguments: of the work.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = [
        context.Process(target=_do, args=(rank, world_size, port, there, work, arguments)) for rank in range(world_size)
    ]
    for process in job:
        process.start()
    there.close()
    try:
        result: T = here.recv()
    except EOFError:
        sys.exit("the measured processes failed: their error stands above")
    for process in job:
        process.join()
    return result


def _do(
    rank: int, world_size: int, port: int, results: Connection, work: Callable[..., T], arguments: Sequence[Any]
) -> None:
    layout = ProcessLayout(rank, world_size, rank, world_size, "environment", "127.0.0.1", port)
    with join_processes(layout) as processes:
        result = work(processes, *arguments)
        if rank == 0:
            results.send(result)
        dist.barrier()  # the store that all of them talk through ends with rank 0


def drop_from_memory(paths: Sequence[Path]) -> None:
    """Has the next read come from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def file_system_of(folder: Path) -> str:
    """The type of the file system that a folder is on, as Linux names it."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(point), kind) for _, point, kind, *_ in mounts if folder.resolve().is_relative_to(point))[1]


def memory_peak() -> float:
    """Bytes that this process has had at most; not ru_maxrss, which begins at what the process that started it had."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("VmHWM:"))


def reset_memory_peak() -> None:
    """Lets `memory_peak` begin with what is in use now."""
    CLEAR_REFS.write_text("5")  # see proc(5)


def memory_for(work: Callable[[], object]) -> float | None:
    """Bytes that this process takes beyond what it has, at most, to do something; None where the system tells none."""
    try:
        reset_memory_peak()
        before = memory_peak()
    except (OSError, StopIteration):  # some sandboxes have a /proc of their own
        work()
        return None
    work()
    return memory_peak() - before
