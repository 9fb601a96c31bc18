"""The processes of a job: how they meet, part, fail together, and what each is doing.

    join_processes -> rendezvous.py -> process group (NCCL for GPU tensors, gloo for CPU tensors)

A mistake that one rank finds (a missing folder, a damaged checkpoint) must end every rank with the same message and
without a hang. So what may fail before training runs inside `on_rank_zero` or `on_every_rank`.
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

_ANYWHERE = ParallelConfig()

# How gloo and NCCL say that a process at the other end of a connection is gone.
SIGNS_OF_A_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited")

# glibc's options and their defaults (malloc.h), and the variables by which a user may set them.
_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD = -1, 128 * 1024
_M_MMAP_MAX, _DEFAULT_MMAP_MAX = -4, 65536
_CHOICES_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@dataclass
class Activity:
    """What the main thread of this process is doing, for the threads that watch it.

    Attributes:
        doing: "starting" until the first step, then "training", "data" (waiting for it), "evaluation", "checkpoint".
        step: steps that the run has done.
        warm: whether this start has done a step, so that everything is opened, restored and compiled.
        events: grows with everything that gets done.
    """

    doing: str = "starting"
    step: int = 0
    warm: bool = False
    events: int = 0

    def restart(self, step: int) -> None:
        """Begin at a step, at a start or after a rollback."""
        self.doing, self.step, self.warm = "starting", step, False
        self.events += 1

    def turn_to(self, doing: str) -> None:
        """Begin with something else."""
        self.doing = doing
        self.events += 1

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """Pass items on; each counts as an event."""
        for item in items:
            self.events += 1
            yield item

    def end_step(self, step: int) -> None:
        """Note that a step is done."""
        self.step, self.warm = step, True
        self.events += 1


@dataclass(frozen=True)
class Processes:
    """This process among all, and (`local_`) among those of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    activity: Activity = field(default_factory=Activity, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0


@contextmanager
def join_processes(
    layout: ProcessLayout,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
    deadline: Deadline | None = None,
    parallel: ParallelConfig = _ANYWHERE,
) -> Iterator[Processes]:
    """Join the job's process group for the time of a `with` block: NCCL for GPU tensors, gloo for CPU tensors.

    Args:
        layout: this process among all.
        timeout: after which a process that waits in a collective gives up.
        deadline: for processes that have not come yet; None = as long as in a collective.
        parallel: says on which kind of device; by default on GPUs where there are any.

    Raises:
        LaunchError: the processes do not find each other; more processes than GPUs on a node; the device or backend
            that is asked for is not there.
    """
    device = _device_of(layout.local_rank, layout.local_world_size, parallel)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        # NCCL's own monitor would abort a process that waits, after 8 minutes and without the watchdog's account.
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout.total_seconds())))
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()

    def connect(store: dist.Store) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world_size, timeout=timeout)

    if layout.world_size == 1:  # a store inside the process: no port that another job could hold
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
        if not any(sign in str(error) for sign in SIGNS_OF_A_LOST_PEER):
            raise
        lost = LostPeerError("another process of the job has ended; what it printed last says why.")
        lost.rank = layout.rank
        raise lost from error
    # After any other error this process may be alone with it, and leaving the group would wait for the others.
    dist.destroy_process_group()


def keep_freed_memory() -> bool:
    """Have glibc's allocator keep what a step on a CPU frees for the next step; returns whether glibc has taken it.

    It returns large blocks to the system at once, and the free end of its heap. Each step takes the same hundreds of
    megabytes again, and mapping and clearing their pages was a tenth of the time of a small model's step in bfloat16
    (docs/performance.md). Leaves alone what the user has set up (mallopt(3), GLIBC_TUNABLES), and other allocators.
    """
    glibc = _adjustable_glibc()
    if glibc is None:
        return False
    glibc.mallopt(_M_MMAP_MAX, 0)  # no block has a mapping of its own
    return bool(glibc.mallopt(_M_TRIM_THRESHOLD, -1))  # and the heap never shrinks


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`, in a process that goes on with something else, and returns what is free now."""
    glibc = _adjustable_glibc()
    if glibc is not None:
        glibc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        glibc.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)
        glibc.malloc_trim(0)


def _adjustable_glibc() -> ctypes.CDLL | None:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name in os.environ for name in _CHOICES_OF_THE_USER):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") else None


def on_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on rank 0 and give its result, which must be picklable, or its error to every rank.

    All ranks call it; a process that has joined no others is rank 0. `group` holds all processes, to talk over apart
    from the training thread.
    """
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [on_every_rank(function if dist.get_rank() == 0 else lambda: None, group)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    result: T = outcome[0]
    return result


def on_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on every rank; where it fails on one, all raise the error of the lowest such rank.

    `function` must not contain collectives that a failing rank would leave others waiting in.
    """
    if not dist.is_initialized():
        return function()
    result: T
    failure: BaseException | None = None
    try:
        result = function()
    except BaseException as error:
        failure = error
    told = failure
    if failure is not None and not isinstance(failure, PretrainError):  # one that can travel between processes
        told = PretrainError(f"rank {dist.get_rank()} failed: {type(failure).__name__}: {failure}")
    failures = _all_gather(told, group)
    if failure is not told and failure is not None:
        raise failure  # a bug, not a user's mistake: keep its traceback
    for each in failures:
        if each is not None:
            raise each
    return result


def gather_from_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `function` as `on_every_rank` does, and return the results of all ranks; they must be picklable."""
    result = on_every_rank(function, group)
    return _all_gather(result, group) if dist.is_initialized() else [result]


def _all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def place() -> tuple[int, int]:
    """Return rank and number of processes; one alone, as of a command, has joined no others."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _device_of(local_rank: int, local_world_size: int, parallel: ParallelConfig = _ANYWHERE) -> torch.device:
    if parallel.device == "cpu" or not torch.cuda.is_available():
        flag = "--device=cuda" if parallel.device == "cuda" else "--backend=nccl" if parallel.backend == "nccl" else ""
        if flag:
            raise LaunchError(f"{flag} needs a GPU, and PyTorch sees none on {socket.gethostname()}: leave it out")
        return torch.device("cpu")
    if parallel.backend == "gloo":
        raise LaunchError("--backend=gloo is for CPUs, and this machine has GPUs: leave it out, or give --device=cpu")
    visible = torch.cuda.device_count()
    # A launcher may give each task a GPU of its own (srun --gpus-per-task=1). If it is the same one for all, NCCL
    # refuses it in the first collective (`mesh.try_groups`).
    if visible == 1:
        return torch.device("cuda", 0)
    if local_world_size > visible:
        raise LaunchError(
            f"{local_world_size} processes were started on {socket.gethostname()}, which shows {visible} GPUs. "
            f"Start at most {visible} processes a node (--nproc-per-node, --ntasks-per-node, mpirun -n)."
        )
    return torch.device("cuda", local_rank)
