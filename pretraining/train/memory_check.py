"""Memory of a run: what cannot fit is refused before it starts, and an error says where memory went if it runs out.

Both know what would take less, by the same estimate.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pretraining.checkpoint.pt_files import check_host_memory
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, parameter_count, resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.distributed.torch_private import (
    start_recording_allocations,
    stop_recording_allocations,
    write_snapshot,
)
from pretraining.errors import ConfigError, OutOfMemoryError
from pretraining.estimate.advice import memory_advice
from pretraining.estimate.memory import STATE_BYTES, MemoryEstimate, estimate_memory, optimizer_state_bytes
from pretraining.launch.machine import machine_memory
from pretraining.observability.profiler import TRACES
from pretraining.observability.throughput import peak_bytes
from pretraining.text import format_gib

log = logging.getLogger(__name__)

ROOM = 0.9
"""Share of the memory that a suggestion may take."""
TOLERANCE = 0.15
"""A run is refused where even so much less than the estimate would not fit (measured: docs/performance.md)."""
PACKAGE = Path(__file__).parent.parent
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|HIP out of memory"
    r"|ncclUnhandledCudaError.*out of memory",
    re.DOTALL,
)


def check_memory(config: TrainConfig, shape: LlamaShape, shard_size: int, processes: Processes) -> None:
    """Log what one process will take, by its parts; call it on every rank, before the model is built.

    Args:
        shape: of the model; `config` may name dimensions that a checkpoint overrides.
        shard_size: ranks that share one copy of the model.

    Raises:
        ConfigError: it is more than there is, and `ignore_memory` is off; says what would fit.
        CheckpointError: so is what full checkpoints gather.
    """
    needed = _estimate(config, shape, shard_size, processes.device)
    parts, (limit_bytes, limit) = _format_parts(needed), _limit_of(processes)
    if processes.is_main:
        log.info("memory      about %s of %s: %s", format_gib(needed.total), limit, parts)
    if config.run.ignore_memory:
        return
    on_cpu = processes.device.type == "cpu"
    if processes.is_main and config.checkpoint.ckpt_format == "full" and (not on_cpu or shard_size > 1):
        gathered = STATE_BYTES * parameter_count(shape) + optimizer_state_bytes(config.optimizer, shape)
        if on_cpu:  # which holds what trains, too
            gathered += needed.total * processes.local_world_size
        check_host_memory(gathered, "Give --ckpt_format=sharded, or --ignore_memory=true to start all the same")
    if needed.total * (1 - TOLERANCE) <= limit_bytes:
        return
    fitting = _advice(config, shape, shard_size, processes.device, ROOM * limit_bytes)
    would_fit = f"What would fit: {'; '.join(fitting)}" if fitting else "Nothing smaller would fit, either"
    raise ConfigError(
        f"the model cannot fit: {parameter_count(shape):,} parameters with --batch_size={config.batch.batch_size} and "
        f"--seq_length={config.data.seq_length} take about {format_gib(needed.total)} a process ({parts}), "
        f"and there are {limit}. {would_fit}. --ignore_memory=true starts all the same"
    )


@contextmanager
def explain_out_of_memory(config: TrainConfig, shard_size: int, processes: Processes) -> Iterator[None]:
    """Raise `OutOfMemoryError` in place of the many errors that PyTorch, CUDA and Python have for it.

    Raises:
        OutOfMemoryError: with where the memory went, and what would help; of this rank alone.
        ConfigError: memory snapshots were asked for, and this device makes none.
    """
    remembers = config.profiler.memory_snapshot
    if remembers and processes.device.type != "cuda":
        raise ConfigError(f"--memory_snapshot=true is for GPUs, and this run is on {processes.device.type}")
    if remembers:
        start_recording_allocations()
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        explained = OutOfMemoryError(_explain(error, config, shard_size, processes))
        explained.rank = processes.rank
        raise explained from error
    finally:
        if remembers:
            stop_recording_allocations()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _explain(error: Exception, config: TrainConfig, shard_size: int, processes: Processes) -> str:
    shape, device = resolve_shape(config.model), processes.device
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents]
    place = f", at {Path(frames[-1].filename).relative_to(PACKAGE.parent)}:{frames[-1].lineno}" if frames else ""
    cause = str(error).strip().partition("\n")[0] or type(error).__name__
    reserved = ""
    if device.type == "cuda":
        reserved = f", {format_gib(torch.cuda.memory_reserved(device))} held by PyTorch's allocator"
    lines = [
        f"out of memory in step {processes.activity.step + 1}{place}: {cause}",
        f"Measured on this rank: {format_gib(peak_bytes(device))} at the peak{reserved}, {_limit_of(processes)[1]}",
        f"Estimated: {_format_parts(_estimate(config, shape, shard_size, device))}",
        "What takes less, by the estimate:",
        *(f"  {line}" for line in _advice(config, shape, shard_size, device)),
    ]
    if device.type == "cuda" and config.checkpoint.ckpt_save_path is not None:
        path = config.checkpoint.folder / TRACES / f"out_of_memory_rank{processes.rank}.memory.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_snapshot(path)
            lines.append(f"A snapshot for https://pytorch.org/memory_viz is in {path}")
        except OSError as problem:
            lines.append(f"A snapshot of the memory could not be written to {path}: {problem}")
    return "\n".join(lines)


def _estimate(config: TrainConfig, shape: LlamaShape, shard_size: int, device: torch.device) -> MemoryEstimate:
    itemsize = compute_dtype(config.parallel, device).itemsize
    return estimate_memory(config, shape, shard_size=shard_size, compute_bytes=itemsize, device_type=device.type)


def _advice(
    config: TrainConfig, shape: LlamaShape, shard_size: int, device: torch.device, limit_bytes: float | None = None
) -> list[str]:
    return memory_advice(
        config,
        shape,
        shard_size=shard_size,
        compute_bytes=compute_dtype(config.parallel, device).itemsize,
        device_type=device.type,
        limit_bytes=limit_bytes,
    )


def _limit_of(processes: Processes) -> tuple[int, str]:
    """Return the bytes that one process may use, and the words for them."""
    if processes.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(processes.device)
        return free, f"{format_gib(free)} free on {processes.device}"
    memory, sharing = machine_memory(), processes.local_world_size
    share = f" for each of {sharing} processes" if sharing > 1 else ""
    size = memory.available // sharing
    return size, f"{format_gib(size)} available in {memory.limited_by}{share}"


def _format_parts(needed: MemoryEstimate) -> str:
    names = ("parameters", "gradients", "optimizer_state", "gathered", "activations", "loss")
    sizes = {name: getattr(needed, name) for name in names}
    text = ", ".join(f"{name.replace('_', ' ')} {format_gib(size)}" for name, size in sizes.items() if size)
    later = needed.later_gradients
    return f"{text}, less {format_gib(later)} of gradients that come after the peak" if later else text
