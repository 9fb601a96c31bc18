"""Turns "out of memory" into where the memory went and which flags would help, with an estimate for each."""

from __future__ import annotations

import re
import resource
import sys
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.grad_norm import local_part
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.distributed.torch_private import forget_allocations, remember_allocations, write_snapshot
from pretraining.errors import ConfigError, OutOfMemoryError
from pretraining.estimate.advice import memory_advice
from pretraining.launch.machine import machine_memory, resident_bytes
from pretraining.observability.profiler import TRACES
from pretraining.progress import TrainState
from pretraining.text import format_gib, format_table

_SIGNS = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|HIP out of memory"
    r"|ncclUnhandledCudaError.*out of memory",
    re.DOTALL,
)
PACKAGE = Path(__file__).parent.parent


class MemoryWatch:
    """Knows what holds the memory of a run, so that an error can say where it went; it keeps nothing alive.

    `state` is where the run stands, None until it is built; `shard_size` ranks share one copy of the model.
    """

    def __init__(self, world_size: int) -> None:
        self.state: TrainState | None = None
        self.shard_size = world_size
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    def watch(self, optimizer: torch.optim.Optimizer, state: TrainState, shard_size: int) -> None:
        """Watch this run from now on."""
        self._optimizer, self.state, self.shard_size = weakref.ref(optimizer), state, shard_size

    def table(self, device: torch.device) -> list[str]:
        """Return where the memory of this rank is, a line each; before `watch`, a run's state is not known."""
        optimizer = None if self._optimizer is None else self._optimizer()
        groups, state = ([], {}) if optimizer is None else (optimizer.param_groups, optimizer.state)
        parameters = [parameter for group in groups for parameter in group["params"]]
        sizes = {
            "parameters": _bytes_of(parameters),
            "gradients": _bytes_of(parameter.grad for parameter in parameters),
            "optimizer state": _bytes_of(each for kept in state.values() for each in kept.values()),
        }
        peak = peak_bytes(device)
        sizes["activations, gathered parameters, temporary"] = max(0, peak - sum(sizes.values()))
        sizes["together, at the peak"] = peak
        if device.type == "cuda":
            sizes["held by PyTorch's allocator now"] = torch.cuda.memory_reserved(device)
            name = torch.cuda.get_device_name(device)
            sizes["free now"], sizes[f"{device} ({name}) has"] = torch.cuda.mem_get_info(device)
        else:
            machine = machine_memory()
            sizes |= {
                "in use now": resident_bytes(),
                "free now": machine.available,
                f"{machine.limited_by} has": machine.total,
            }
        return [f"  {line}" for line in format_table([(name, format_gib(size)) for name, size in sizes.items()], [1])]


@contextmanager
def explain_out_of_memory(config: TrainConfig, processes: Processes) -> Iterator[MemoryWatch]:
    """Raise `OutOfMemoryError` in place of the many errors that PyTorch, CUDA and Python have for it.

    Raises:
        OutOfMemoryError: with where the memory went, and what would help; of this rank alone.
        ConfigError: memory snapshots were asked for, and this device makes none.
    """
    remembers = config.profiler.memory_snapshot
    if remembers and processes.device.type != "cuda":
        raise ConfigError(f"--memory_snapshot=true is for GPUs, and this run is on {processes.device.type}")
    if remembers:
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
    device = processes.device
    when = "while the run was put together" if watch.state is None else f"in step {watch.state.step + 1}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents]
    place = f", at {Path(frames[-1].filename).relative_to(PACKAGE.parent)}:{frames[-1].lineno}" if frames else ""
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    advice = memory_advice(
        config,
        resolve_shape(config.model),
        shard_size=watch.shard_size,
        compute_bytes=compute_dtype(config.parallel, device).itemsize,
        device_type=device.type,
    )
    lines = [f"out of memory {when}{place}: {said}", "Where the memory of this rank went:", *watch.table(device)]
    lines += ["What takes less, by the estimate before a run:", *(f"  {line}" for line in advice)]
    if device.type == "cuda" and config.checkpoint.ckpt_save_path is not None:
        path = config.checkpoint.folder / TRACES / f"out_of_memory_rank{processes.rank}.memory.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_snapshot(path)
            lines.append(f"A snapshot for https://pytorch.org/memory_viz is in {path}")
        except OSError as problem:
            lines.append(f"A snapshot of the memory could not be written to {path}: {problem}")
    return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


def peak_bytes(device: torch.device) -> int:
    """Return the most that this process had in use at once; on a CPU everything that it held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
