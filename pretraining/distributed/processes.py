"""The process group of a job: start, exit, shared errors, and the activity of each process.

    join_processes -> rendezvous.py -> process group (NCCL for GPU tensors, gloo for CPU tensors)

An error that one rank finds (a missing folder, a damaged checkpoint) must stop all ranks with the same message, without
a hang. So code that may fail before training runs inside `on_rank_zero` or `on_every_rank`.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pretraining.config.training import ParallelConfig
from pretraining.distributed.rendezvous import COLLECTIVE_TIMEOUT, Deadline, Rendezvous
from pretraining.errors import LaunchError, LostPeerError, PretrainError
from pretraining.launch.layout import ProcessLayout

T = TypeVar("T")

_DEFAULTS = ParallelConfig()

# Messages of gloo and NCCL when the other process of a connection has exited.
LOST_PEER_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "remote process exited")

# Options of glibc's allocator, their defaults (malloc.h), and the variables by which a user may set them.
_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD = -1, 128 * 1024
_M_MMAP_MAX, _DEFAULT_MMAP_MAX = -4, 65536
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@dataclass
class Activity:
    """Activity of the main thread, for the threads that watch it.

    Attributes:
        doing: "starting" until the first step, then "training", "data" (waiting for data), "evaluation", "checkpoint".
        step: steps done by the run.
        warm: whether a step is done since the start, so that all data is open and all code compiled.
        events: counter of completed work.
    """

    doing: str = "starting"
    step: int = 0
    warm: bool = False
    events: int = 0

    def restart(self, step: int) -> None:
        """Reset to a step, at the start or after a rollback."""
        self.doing, self.step, self.warm = "starting", step, False
        self.events += 1

    def turn_to(self, doing: str) -> None:
        """Switch to another activity."""
        self.doing = doing
        self.events += 1

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """Pass items on; each counts as an event."""
        for item in items:
            self.events += 1
            yield item

    def end_step(self, step: int) -> None:
        """Record that a step is done."""
        self.step, self.warm = step, True
        self.events += 1


@dataclass(frozen=True)
class Processes:
    """The place of this process in the job, and (`local_`) on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    activity: Activity = field(default_factory=Activity, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0


@contextmanager
def join_processes(
    layout: ProcessLayout,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
    deadline: Deadline | None = None,
    parallel: ParallelConfig = _DEFAULTS,
) -> Iterator[Processes]:
    """Join the job's process group within a `with` block: NCCL for GPU tensors, gloo for CPU tensors.

    Args:
        layout: place of this process in the job.
        timeout: time limit of collectives.
        deadline: time limit for missing processes; None = `timeout`.
        parallel: device and backend; by default GPUs if there are any.

    Raises:
        LaunchError: processes do not find each other, a node has more processes than GPUs, or the wanted device or
            backend does not exist.
    """
    device = _device_of(layout.local_rank, layout.local_world_size, parallel)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        # NCCL's own monitor would abort a waiting process after 8 minutes, without the watchdog's report.
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout.total_seconds())))
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()

    def connect(store: dist.Store) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is per thread
        dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world_size, timeout=timeout)

    if layout.world_size == 1:  # a store inside the process needs no port
        Rendezvous(layout, Deadline(timeout)).connect_all(dist.HashStore(), connect)
    else:
        os.environ.update(layout.as_environment())
        Rendezvous(layout, deadline or Deadline(timeout)).run(connect)
    try:
        yield Processes(layout.rank, layout.world_size, layout.local_rank, layout.local_world_size, device)
    except PretrainError as error:
        if error.rank is None:
            error.is_everywhere = True
            dist.destroy_process_group()
        raise
    except RuntimeError as error:
        if not any(message in str(error) for message in LOST_PEER_MESSAGES):
            raise
        lost = LostPeerError("another process of the job exited; see its last output for the cause.")
        lost.rank = layout.rank
        raise lost from error
    # Not after other errors: if only this process fails, destroying the group would wait for the others.
    dist.destroy_process_group()


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory for the next step on a CPU; return whether glibc accepted.

    By default glibc returns large blocks, and the free end of its heap, to the system. Each step allocates the same
    hundreds of megabytes again; mapping and clearing their pages took a tenth of the time of a small model's step in
    bfloat16 (docs/performance.md). Without effect if the user set allocator options (mallopt(3), GLIBC_TUNABLES), and
    on other allocators.
    """
    glibc = _adjustable_glibc()
    if glibc is None:
        return False
    glibc.mallopt(_M_MMAP_MAX, 0)  # allocate large blocks on the heap
    return bool(glibc.mallopt(_M_TRIM_THRESHOLD, -1))  # never shrink the heap


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`, and return free memory to the system, in a process that outlives its run."""
    glibc = _adjustable_glibc()
    if glibc is not None:
        glibc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        glibc.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)
        glibc.malloc_trim(0)


def _adjustable_glibc() -> ctypes.CDLL | None:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name in os.environ for name in _MALLOC_VARIABLES):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") else None


def on_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on rank 0, and return its picklable result or raise its error on every rank.

    A collective call; without a process group, this process is rank 0. `group` is a group of all processes for calls
    from other threads than the training thread.
    """
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [on_every_rank(function if dist.get_rank() == 0 else lambda: None, group)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    result: T = outcome[0]
    return result


def on_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on every rank; if it fails anywhere, all ranks raise the error of the lowest failing rank.

    `function` must not contain collectives, in which other ranks would wait for a failed one.
    """
    if not dist.is_initialized():
        return function()
    result: T
    failure: BaseException | None = None
    try:
        result = function()
    except BaseException as error:
        failure = error
    sent = failure
    if failure is not None and not isinstance(failure, PretrainError):  # other errors may not be picklable
        sent = PretrainError(f"rank {dist.get_rank()} failed: {type(failure).__name__}: {failure}")
    failures = _all_gather(sent, group)
    if failure is not sent and failure is not None:
        raise failure  # a bug keeps its traceback
    for each in failures:
        if each is not None:
            raise each
    return result


def gather_from_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `function` as `on_every_rank` does, and return the picklable results of all ranks."""
    result = on_every_rank(function, group)
    return _all_gather(result, group) if dist.is_initialized() else [result]


def _all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and number of processes; (0, 1) without a process group, as in commands."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _device_of(local_rank: int, local_world_size: int, parallel: ParallelConfig = _DEFAULTS) -> torch.device:
    if parallel.device == "cpu" or not torch.cuda.is_available():
        flag = "--device=cuda" if parallel.device == "cuda" else "--backend=nccl" if parallel.backend == "nccl" else ""
        if flag:
            raise LaunchError(f"{flag} needs a GPU, and PyTorch sees none on {socket.gethostname()}: leave it out")
        return torch.device("cpu")
    if parallel.backend == "gloo":
        raise LaunchError("--backend=gloo is for CPUs, and this machine has GPUs: leave it out, or give --device=cpu")
    visible = torch.cuda.device_count()
    # A launcher may make one GPU visible to each task (srun --gpus-per-task=1). If all tasks see the same GPU, NCCL
    # fails in the first collective (`dims.check_groups`).
    if visible == 1:
        return torch.device("cuda", 0)
    if local_world_size > visible:
        raise LaunchError(
            f"{local_world_size} processes were started on {socket.gethostname()}, which has {visible} visible GPUs. "
            f"Start at most {visible} processes per node (--nproc-per-node, --ntasks-per-node, mpirun -n)."
        )
    return torch.device("cuda", local_rank)
