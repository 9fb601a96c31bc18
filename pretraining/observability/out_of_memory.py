"""Turns "out of memory" into where the memory went and which flags would help, with an estimate for each."""

from __future__ import annotations

import re
import resource
import sys
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pretraining.config.training import TrainConfig
from pretraining.config.variants import parameter_count, resolve_shape
from pretraining.distributed.grad_norm import local_part
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.distributed.torch_private import forget_allocations, remember_allocations, write_snapshot
from pretraining.errors import ConfigError, OutOfMemoryError
from pretraining.estimate.advice import memory_advice
from pretraining.estimate.memory import MASTER_BYTES, optimizer_state_bytes
from pretraining.launch.machine import machine_memory, resident_bytes
from pretraining.observability.profiler import TRACES
from pretraining.progress import TrainState

_SIGNS = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|HIP out of memory"
    r"|ncclUnhandledCudaError.*out of memory",
    re.DOTALL,
)
PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank, in bytes.

    Attributes:
        device: its name.
        parameters, gradients, optimizer_state: this rank's part.
        peak: most that was in use at once; on a CPU everything that the process held.
        allocated: in use now.
        reserved: held by PyTorch's allocator, in use or not; None on a CPU.
        free: of the device, now.
        total: of the device.
    """

    device: str
    parameters: int
    gradients: int
    optimizer_state: int
    peak: int
    allocated: int
    reserved: int | None
    free: int
    total: int

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def rest(self) -> int:
        """What came on top of it at the peak: activations, gathered parameters, temporary tensors."""
        return max(0, self.peak - self.state)


class MemoryWatch:
    """Knows what holds the memory of a run, so that an error can say where it went; it keeps nothing alive.

    `state` is where the run stands, None until it is built; `shard_size` ranks share one copy of the model.
    """

    def __init__(self, world_size: int) -> None:
        self.state: TrainState | None = None
        self.shard_size = world_size
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    def watch(self, optimizer: torch.optim.Optimizer, state: TrainState, shard_size: int) -> None:
        """Watches this run from now on."""
        self._optimizer, self.state, self.shard_size = weakref.ref(optimizer), state, shard_size

    def measure(self, device: torch.device) -> MemoryUse:
        """Returns the memory of this rank now; before `watch`, what the run's state takes is not known."""
        optimizer = None if self._optimizer is None else self._optimizer()
        groups, state = ([], {}) if optimizer is None else (optimizer.param_groups, optimizer.state)
        parameters = [parameter for group in groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [each for kept in state.values() for each in kept.values() if isinstance(each, torch.Tensor)]
        sizes = _bytes_of(parameters), _bytes_of(gradients), _bytes_of(moments)
        peak = peak_bytes(device)
        if device.type == "cuda":
            in_use = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
            name = f"{device} ({torch.cuda.get_device_name(device)})"
            return MemoryUse(name, *sizes, peak, *in_use, *torch.cuda.mem_get_info(device))
        machine = machine_memory()
        return MemoryUse(machine.limited_by, *sizes, peak, resident_bytes(), None, machine.available, machine.total)


@contextmanager
def explain_out_of_memory(config: TrainConfig, processes: Processes) -> Iterator[MemoryWatch]:
    """Raises `OutOfMemoryError` in place of the many errors that PyTorch, CUDA and Python have for it.

    Raises:
        OutOfMemoryError: with where the memory went, and what would help; of this rank alone.
        ConfigError: memory snapshots were asked for, and this device makes none.
    """
    remembers = config.profiler.memory_snapshot
    if remembers:
        if processes.device.type != "cuda":
            raise ConfigError(
                f"--memory_snapshot=true is for GPUs, and this run is on {processes.device.type}: leave it out"
            )
        remember_allocations()
    watch = MemoryWatch(processes.world_size)
    try:
        yield watch
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        explained = OutOfMemoryError(_explain(error, config, processes, watch))
        explained.rank = processes.rank
        raise explained from error
    finally:
        if remembers:
            forget_allocations()


def _explain(error: Exception, config: TrainConfig, processes: Processes, watch: MemoryWatch) -> str:
    use = watch.measure(processes.device)
    when = "while the run was put together" if watch.state is None else f"in step {watch.state.step + 1}"
    said = str(error).strip().splitlines()
    lines = [
        f"out of memory {when}, {_place_of(error)}: {said[0] if said else type(error).__name__}",
        "Where the memory of this rank went:",
        *memory_table(use),
    ]
    if watch.state is None:
        shape = resolve_shape(config.model)
        needed = 2 * MASTER_BYTES * parameter_count(shape) + optimizer_state_bytes(config.optimizer, shape)
        lines.append(
            f"Parameters, gradients and the optimizer's state of this model take {format_bytes(needed)} over all ranks "
            "that share them."
        )
    advice = advise(config, use, watch.shard_size, processes.device)
    lines += ["What takes less, by the estimate before a run:", *(f"  {line}" for line in advice)]
    lines += _snapshot(config, processes)
    return "\n".join(lines)


def advise(config: TrainConfig, use: MemoryUse, shard_size: int, device: torch.device) -> list[str]:
    """Return flags that take less memory, each with the estimate of a process that has them."""
    lines = memory_advice(
        config,
        resolve_shape(config.model),
        shard_size=shard_size,
        compute_bytes=compute_dtype(config.parallel, device).itemsize,
        device_type=device.type,
    )
    if use.reserved is not None and use.reserved - use.allocated > use.total // 10:
        lines.append(
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: the allocator holds "
            f"{format_bytes(use.reserved - use.allocated)} in pieces that did not fit"
        )
    return lines


def _snapshot(config: TrainConfig, processes: Processes) -> list[str]:
    """Writes a picture of the allocator, for the tool that shows it; returns a line about it."""
    if processes.device.type != "cuda" or config.checkpoint.ckpt_save_path is None:
        return []
    path = config.checkpoint.folder / TRACES / f"out_of_memory_rank{processes.rank}.memory.pickle"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_snapshot(path)
    except OSError as error:
        return [f"A snapshot of the memory could not be written to {path}: {error}"]
    more = "" if config.profiler.memory_snapshot else "; --memory_snapshot=true adds who allocated what"
    return [f"A snapshot for https://pytorch.org/memory_viz is in {path}{more}."]


def _place_of(error: BaseException) -> str:
    """Returns the innermost line of this project that the error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents]
    if not frames:
        return "outside of this project"
    return f"at {Path(frames[-1].filename).relative_to(PACKAGE.parent)}:{frames[-1].lineno}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


def peak_bytes(device: torch.device) -> int:
    """Returns the most that this process had in use at once; on a CPU everything that it held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_table(use: MemoryUse) -> list[str]:
    """Says where the memory went, a line each."""
    is_cpu = use.reserved is None
    rest = "activations, temporary tensors, programs" if is_cpu else "activations, gathered parameters, temporary"
    rows = [
        ("parameters", use.parameters),
        ("gradients", use.gradients),
        ("optimizer state", use.optimizer_state),
        (rest, use.rest),
        ("together, at the peak", use.peak),
        ("in use now", use.allocated),
        ("held by PyTorch's allocator now", use.reserved),
        ("free now", use.free),
        (f"{use.device} has", use.total),
    ]
    known = {name: size for name, size in rows if size is not None}
    width = max(map(len, known))
    return [f"  {name:{width}}  {format_bytes(size):>10}" for name, size in known.items()]


def format_bytes(size: float) -> str:
    """Writes a size as a person reads it: 12.5 GiB, 310.0 MiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)
