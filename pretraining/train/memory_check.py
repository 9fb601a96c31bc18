"""Memory of a run: refuses a model that cannot fit, and explains an out-of-memory error.

Both name settings that take less memory, from the same estimate.
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
from pretraining.config.strategies import DimSizes
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.distributed.torch_private import (
    start_recording_allocations,
    stop_recording_allocations,
    write_snapshot,
)
from pretraining.errors import ConfigError, OutOfMemoryError
from pretraining.estimate.advice import memory_advice
from pretraining.estimate.costs import parameter_count
from pretraining.estimate.memory import STATE_BYTES, MemoryEstimate, Rank, estimate_memory, optimizer_state_bytes
from pretraining.files import is_address
from pretraining.launch.machine import machine_memory
from pretraining.observability.profiler import TRACES
from pretraining.observability.throughput import peak_bytes
from pretraining.optim.registry import measure_state
from pretraining.text import format_gib, parse_bytes

log = logging.getLogger(__name__)

ADVISED_SHARE = 0.9
"""Share of the memory that the advised settings may fill."""
TOLERANCE = 0.15
"""Possible error of the estimate: a run is refused if even this share less does not fit (docs/performance.md)."""
PACKAGE = Path(__file__).parent.parent
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|HIP out of memory"
    r"|ncclUnhandledCudaError.*out of memory",
    re.DOTALL,
)


def check_memory(config: TrainConfig, shape: LlamaShape, dims: DimSizes, processes: Processes) -> None:
    """Log the memory that one process needs, and refuse a model that cannot fit; call it on every rank.

    Args:
        shape: shape of the model; a checkpoint may override the dimensions in `config`.

    Raises:
        ConfigError: the model, or data that is kept in memory, needs more than there is, and `ignore_memory` is off.
        CheckpointError: rank 0 cannot gather full checkpoints in the host's memory.
    """
    rank = _rank(config, dims, processes.device)
    needed = estimate_memory(config, shape, rank)
    parts, (limit_bytes, limit) = _format_parts(needed), _available_memory(dims, processes.device)
    if processes.is_main:
        log.info("memory      about %s of %s: %s", format_gib(needed.total), limit, parts)
    if config.run.ignore_memory:
        return
    on_cpu = processes.device.type == "cpu"
    if processes.is_main and config.checkpoint.ckpt_format == "full" and (not on_cpu or dims.shard > 1):
        gathered = STATE_BYTES * parameter_count(shape) + optimizer_state_bytes(
            config.optimizer, shape, 1, rank.state_bytes
        )
        if on_cpu:  # the host's memory holds the training state, too
            gathered += needed.total * dims.node
        check_host_memory(gathered, "Give --ckpt_format=sharded, or start anyway with --ignore_memory=true")
    if needed.total * (1 - TOLERANCE) <= limit_bytes:
        _check_cached_data(config, on_cpu * needed.total * (1 - TOLERANCE), dims)
        return
    fitting = memory_advice(config, shape, rank, ADVISED_SHARE * limit_bytes)
    would_fit = f"These would fit: {'; '.join(fitting)}" if fitting else "No smaller setting would fit"
    raise ConfigError(
        f"the model cannot fit: {parameter_count(shape):,} parameters with --batch_size={config.batch.batch_size} and "
        f"--seq_length={config.data.seq_length} need about {format_gib(needed.total)} per process ({parts}), "
        f"and there are {limit}. {would_fit}. Start anyway with --ignore_memory=true"
    )


def _check_cached_data(config: TrainConfig, beside: float, dims: DimSizes) -> None:
    """Raise a ConfigError if the data cache in memory does not fit beside `beside` bytes of each process."""
    is_in_memory = is_address(config.data.data_path) and config.data.data_cache_path is None
    cached, available = parse_bytes(config.data.data_cache_size), machine_memory().available
    if is_in_memory and cached + beside * dims.node > available:
        raise ConfigError(
            f"--data_cache_size={config.data.data_cache_size} of data in memory do not fit in the "
            f"{format_gib(available)} of this machine. Give --data_cache_path=<a local folder>, or a smaller size"
        )


@contextmanager
def explain_out_of_memory(config: TrainConfig, dims: DimSizes, processes: Processes) -> Iterator[None]:
    """Raise `OutOfMemoryError` in place of the out-of-memory errors of PyTorch, CUDA and Python.

    Raises:
        OutOfMemoryError: memory ran out on this rank; says where memory went, and what takes less.
        ConfigError: `--memory_snapshot` is on and the device is no GPU.
    """
    records = config.profiler.memory_snapshot
    if records and processes.device.type != "cuda":
        raise ConfigError(f"--memory_snapshot=true needs GPUs, and this run is on {processes.device.type}")
    if records:
        start_recording_allocations()
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        explained = OutOfMemoryError(_out_of_memory_text(error, config, dims, processes))
        explained.rank = processes.rank
        raise explained from error
    finally:
        if records:
            stop_recording_allocations()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _out_of_memory_text(error: Exception, config: TrainConfig, dims: DimSizes, processes: Processes) -> str:
    shape, device = resolve_shape(config.model), processes.device
    rank = _rank(config, dims, device)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents]
    place = f", at {Path(frames[-1].filename).relative_to(PACKAGE.parent)}:{frames[-1].lineno}" if frames else ""
    cause = str(error).strip().partition("\n")[0] or type(error).__name__
    reserved = ""
    if device.type == "cuda":
        reserved = f", {format_gib(torch.cuda.memory_reserved(device))} held by PyTorch's allocator"
    _, available = _available_memory(dims, device)
    lines = [
        f"out of memory in step {processes.activity.step + 1}{place}: {cause}",
        f"Measured on this rank: {format_gib(peak_bytes(device))} at the peak{reserved}, {available}",
        f"Estimated: {_format_parts(estimate_memory(config, shape, rank))}",
        "Settings that take less, by the estimate:",
        *(f"  {line}" for line in memory_advice(config, shape, rank)),
    ]
    if device.type == "cuda" and config.checkpoint.ckpt_save_path is not None:
        path = config.checkpoint.folder / TRACES / f"out_of_memory_rank{processes.rank}.memory.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_snapshot(path)
            lines.append(f"A snapshot for https://pytorch.org/memory_viz: {path}")
        except OSError as problem:
            lines.append(f"The memory snapshot could not be written to {path}: {problem}")
    return "\n".join(lines)


def _rank(config: TrainConfig, dims: DimSizes, device: torch.device) -> Rank:
    measured = measure_state(config.optimizer)
    state_bytes = None if measured is None else measured.bytes_per_parameter
    return Rank(dims.shard, compute_dtype(config.parallel, device).itemsize, device.type, state_bytes)


def _available_memory(dims: DimSizes, device: torch.device) -> tuple[int, str]:
    """Return the bytes that one process may use, and a text that says so."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free, f"{format_gib(free)} free on {device}"
    memory = machine_memory()
    share = f" for each of {dims.node} processes" if dims.node > 1 else ""
    size = memory.available // dims.node
    return size, f"{format_gib(size)} available in {memory.limited_by}{share}"


def _format_parts(needed: MemoryEstimate) -> str:
    names = ("parameters", "gradients", "optimizer_state", "gathered", "activations", "loss", "runtime")
    sizes = {name: getattr(needed, name) for name in names}
    text = ", ".join(f"{name.replace('_', ' ')} {format_gib(size)}" for name, size in sizes.items() if size)
    later = needed.later_gradients
    return f"{text}, minus {format_gib(later)} of gradients that are allocated after the peak" if later else text
