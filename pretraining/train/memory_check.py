"""Says before a run what memory it will take, and refuses what cannot fit; says at its end what it took."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from pretraining.checkpoint.pt_files import check_host_memory
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, parameter_count
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.errors import ConfigError
from pretraining.estimate.advice import memory_advice
from pretraining.estimate.memory import STATE_BYTES, MemoryEstimate, estimate_memory, optimizer_state_bytes
from pretraining.launch.machine import machine_memory
from pretraining.text import format_gib

log = logging.getLogger(__name__)

ROOM = 0.9
"""Share of the memory that a suggestion may take."""
TOLERANCE = 0.15
"""A run is refused where even so much less than the estimate would not fit (measured: docs/performance.md)."""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that one process may use, in bytes, and the words for what sets it."""

    bytes: int
    source: str

    def __str__(self) -> str:
        """Return what a message says."""
        return f"{format_gib(self.bytes)} {self.source}"


def check_memory(config: TrainConfig, shape: LlamaShape, shard_size: int, processes: Processes) -> None:
    """Log what one process will take, by its parts; call it on every rank, before the model is built.

    Args:
        shape: of the model; `config` may name dimensions that a checkpoint overrides.
        shard_size: ranks that share one copy of the model.

    Raises:
        ConfigError: it is more than there is, and `ignore_memory` is off; says what would fit.
        CheckpointError: so is what full checkpoints gather.
    """
    device = processes.device
    needed, limit = _estimate(config, shape, shard_size, device), _limit_of(processes)
    if processes.is_main:
        log.info("memory      about %s of %s: %s", format_gib(needed.total), limit, _parts(needed))
    if config.run.ignore_memory:
        return
    if processes.is_main and config.checkpoint.ckpt_format == "full" and (device.type == "cuda" or shard_size > 1):
        gathered = STATE_BYTES * parameter_count(shape) + optimizer_state_bytes(config.optimizer, shape)
        if device.type == "cpu":  # which holds what trains, too
            gathered += needed.total * processes.local_world_size
        check_host_memory(gathered, "Give --ckpt_format=sharded, or --ignore_memory=true to start all the same")
    if needed.total * (1 - TOLERANCE) <= limit.bytes:
        return
    itemsize = compute_dtype(config.parallel, device).itemsize
    fitting = memory_advice(
        config,
        shape,
        shard_size=shard_size,
        compute_bytes=itemsize,
        device_type=device.type,
        limit_bytes=ROOM * limit.bytes,
    )
    would_fit = f"What would fit: {'; '.join(fitting)}" if fitting else "Nothing smaller would fit, either"
    raise ConfigError(
        f"the model cannot fit: {parameter_count(shape):,} parameters with --batch_size={config.batch.batch_size} and "
        f"--seq_length={config.data.seq_length} take about {format_gib(needed.total)} a process ({_parts(needed)}), "
        f"and there are {limit}. {would_fit}. --ignore_memory=true starts all the same"
    )


def describe_peak(
    config: TrainConfig, shape: LlamaShape, shard_size: int, device: torch.device, measured_gib: float
) -> str:
    """Say in a line what a run has taken at its peak, beside what was estimated.

    On a GPU both are about tensors alone. On a CPU both are about all that the process held.

    Args:
        measured_gib: `memory_gib` of a report, of the fullest rank.
    """
    needed = _estimate(config, shape, shard_size, device)
    on_gpu = device.type == "cuda"
    estimated = needed.total - needed.runtime if on_gpu else needed.total
    held = "in tensors" if on_gpu else "by a process, programs included"
    return f"memory      peak {format_gib(measured_gib * 2**30)} measured, {format_gib(estimated)} estimated, {held}"


def _estimate(config: TrainConfig, shape: LlamaShape, shard_size: int, device: torch.device) -> MemoryEstimate:
    itemsize = compute_dtype(config.parallel, device).itemsize
    return estimate_memory(config, shape, shard_size=shard_size, compute_bytes=itemsize, device_type=device.type)


def _limit_of(processes: Processes) -> MemoryLimit:
    if processes.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(processes.device)
        return MemoryLimit(free, f"free on {processes.device}")
    memory = machine_memory()
    share = f" for each of {processes.local_world_size} processes" if processes.local_world_size > 1 else ""
    return MemoryLimit(memory.available // processes.local_world_size, f"available in {memory.limited_by}{share}")


def _parts(needed: MemoryEstimate) -> str:
    sizes = {
        "parameters": needed.parameters,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer_state,
        "gathered": needed.gathered,
        "activations": needed.activations,
        "loss": needed.loss,
    }
    text = ", ".join(f"{name} {format_gib(size)}" for name, size in sizes.items() if size)
    later = needed.later_gradients
    return f"{text}, less {format_gib(later)} of gradients that come after the peak" if later else text
