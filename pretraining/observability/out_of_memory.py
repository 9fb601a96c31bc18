"""Recognises that memory ran out, and measures where it went."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

_SIGNS = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory"
    r"|ncclUnhandledCudaError.*out of memory",
    re.DOTALL,
)


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank, in bytes.

    Attributes:
        device: what it is the memory of, in words.
        parameters, gradients, optimizer_state: what this rank holds of them.
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


def measure_memory(
    device: torch.device,
    parameters: Iterable[torch.Tensor] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryUse:
    """The memory of this rank.

    Args:
        device: of the model.
        parameters: of the model, as sharded.
        optimizer: over them.
    """
    parameters = list(parameters)
    moments = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    sizes = (
        _bytes_of(parameters),
        _bytes_of(parameter.grad for parameter in parameters if parameter.grad is not None),
        _bytes_of(value for value in moments if isinstance(value, torch.Tensor)),
    )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUse(
            f"{device} ({torch.cuda.get_device_name(device)})",
            *sizes,
            peak=torch.cuda.max_memory_allocated(device),
            allocated=torch.cuda.memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            free=free,
            total=total,
        )
    free, total = _memory_of_the_machine()
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return MemoryUse("this machine", *sizes, peak, _resident_bytes(), None, free, total)


def memory_table(use: MemoryUse) -> list[str]:
    """Where the memory went, a line each."""
    is_cpu = use.reserved is None
    rest = "activations, temporary tensors, programs" if is_cpu else "activations, gathered parameters, temporary"
    rows = [
        ("parameters", use.parameters),
        ("gradients", use.gradients),
        ("optimizer state", use.optimizer_state),
        (rest, use.rest),
        ("together, at the peak", use.peak),
        ("in use now", use.allocated),
        ("free now", use.free),
        (f"{use.device} has", use.total),
    ]
    if use.reserved is not None:
        rows.insert(6, ("held by PyTorch's allocator now", use.reserved))
    width = max(len(name) for name, _ in rows)
    return [f"  {name:{width}}  {format_bytes(size):>10}" for name, size in rows]


def format_bytes(size: float) -> str:
    """A size as a person reads it: 12.5 GiB, 310.0 MiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def _memory_of_the_machine() -> tuple[int, int]:
    """Bytes that are available, and all."""
    fields = dict(line.split(":", 1) for line in _lines_of("/proc/meminfo"))
    sizes = [int(fields[name].split()[0]) * 1024 if name in fields else 0 for name in ("MemAvailable", "MemTotal")]
    return sizes[0], sizes[1]


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in _lines_of("/proc/self/status"))
    return int(fields["VmRSS"].split()[0]) * 1024 if "VmRSS" in fields else 0


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
