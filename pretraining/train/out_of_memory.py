"""Turns "out of memory" into where the memory went and which flags would help, with an estimate for each."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pretraining.config.fields import settings_of
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.config.variants import LlamaShape, parameter_count, resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.distributed.torch_private import forget_allocations, remember_allocations, write_snapshot
from pretraining.errors import ConfigError, OutOfMemoryError
from pretraining.observability.out_of_memory import (
    MemoryUse,
    format_bytes,
    is_out_of_memory,
    measure_memory,
    memory_table,
)
from pretraining.train.build_profiler import TRACES
from pretraining.train.loop import Run

LOGITS_AT_ONCE = 2**28
"""Where the loss is taken in chunks."""
PACKAGE = Path(__file__).parent.parent


@dataclass
class Explainer:
    """Knows the run whose memory is looked at; it does not keep it alive."""

    _run: weakref.ref[Run] | None = None

    def watch(self, run: Run) -> Run:
        """Look at this run from now on."""
        self._run = weakref.ref(run)
        return run

    @property
    def run(self) -> Run | None:
        """The run, once it is built."""
        return self._run() if self._run is not None else None


@contextmanager
def explain_out_of_memory(config: TrainConfig, processes: Processes) -> Iterator[Explainer]:
    """Raise `OutOfMemoryError` in place of the many errors that PyTorch, CUDA and Python have for it.

    Args:
        config: the settings, with the run's folder.
        processes: this process among the others.

    Raises:
        OutOfMemoryError: with where the memory went, and what would help; of this rank alone.
        ConfigError: snapshots of memory were asked for, and this device makes none.
    """
    remembers = config.profiler.memory_snapshot
    if remembers:
        if processes.device.type != "cuda":
            raise ConfigError(
                f"--memory_snapshot=true is for GPUs, and this run is on {processes.device.type}: leave it out"
            )
        remember_allocations()
    explainer = Explainer()
    try:
        yield explainer
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        explained = OutOfMemoryError(_explain(error, config, processes, explainer.run))
        explained.rank = processes.rank
        raise explained from error
    finally:
        if remembers:
            forget_allocations()


def _explain(error: Exception, config: TrainConfig, processes: Processes, run: Run | None) -> str:
    if run is None:
        use = measure_memory(processes.device)
        when = "while the run was put together"
    else:
        use = measure_memory(processes.device, run.context.parameters, run.context.optimizer)
        when = f"in step {run.state.step + 1}"
    said = str(error).strip().splitlines()
    lines = [
        f"out of memory {when}, {_place_of(error)}: {said[0] if said else type(error).__name__}",
        "Where the memory of this rank went:",
        *memory_table(use),
    ]
    if run is None:
        needed = 4 * 4 * parameter_count(resolve_shape(config.model))
        lines.append(
            f"Parameters, gradients and AdamW's moments of this model take {format_bytes(needed)} over all ranks that "
            "share them."
        )
    advice = advise(config, use, processes.world_size, shard_size_of(run, processes), processes.device)
    lines += ["What would help, by what it saves (estimates):", *(f"  {line}" for line in advice)]
    lines += _snapshot(config, processes)
    return "\n".join(lines)


def shard_size_of(run: Run | None, processes: Processes) -> int:
    """Ranks that share one copy of the model."""
    return run.mesh["shard"].size() if run is not None else processes.world_size


def advise(config: TrainConfig, use: MemoryUse, world_size: int, shard_size: int, device: torch.device) -> list[str]:
    """Flags that save memory, the one that saves most first, each with what it saves on this rank.

    Args:
        config: the settings that were too large.
        use: the memory of this rank.
        world_size: all ranks.
        shard_size: ranks that share one copy of the model.
        device: of this rank.
    """
    shape = resolve_shape(config.model)
    found = [
        *_smaller_batch(config, use),
        *_less_kept(config, use, shape, compute_dtype(config.parallel, device)),
        *_more_sharding(config, use, world_size, shard_size),
    ]
    lines = [f"{text}: about {format_bytes(saved)} less" for saved, text in sorted(found, reverse=True) if saved > 0]
    if use.reserved is not None and use.reserved - use.allocated > use.total // 10:
        lines.append(
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: the allocator holds "
            f"{format_bytes(use.reserved - use.allocated)} in pieces that did not fit"
        )
    lines.append(f"{_flag('seq_length', config.data.seq_length // 2)}: shorter rows, and another model in the end")
    return lines


Advice = list[tuple[float, str]]
"""Bytes that something saves, and what it is."""


def _smaller_batch(config: TrainConfig, use: MemoryUse) -> Advice:
    now = config.batch.batch_size
    if now == 1:
        return []
    text = f"{_flag('batch_size', now // 2)} in place of {now}"
    if config.batch.global_batch_size is None:
        text += f" (with {_flag('global_batch_size', '<as now>')} the updates stay the same)"
    return [(use.rest * (1 - (now // 2) / now), text)]


def _less_kept(config: TrainConfig, use: MemoryUse, shape: LlamaShape, dtype: torch.dtype) -> Advice:
    """What the forward pass leaves for the backward pass."""
    tokens = config.batch.batch_size * config.data.seq_length
    found: Advice = []
    # The logits stand outside the blocks: as computed, in float32, and their gradient.
    bytes_a_token = shape.vocab_size * (dtype.itemsize + 8)
    logits = tokens * bytes_a_token
    in_a_chunk = min(tokens, LOGITS_AT_ONCE // shape.vocab_size) * bytes_a_token
    if config.loss.loss_chunk_tokens == 0:
        found.append((logits - in_a_chunk, _flag("loss_chunk_tokens", None)))
    else:
        logits = in_a_chunk
    in_blocks = max(0, use.rest - logits)
    if not config.parallel.fsdp_activation_checkpointing:
        # Each block keeps its input, and one at a time is computed again.
        inputs = shape.num_hidden_layers * tokens * shape.hidden_size * dtype.itemsize
        saved = in_blocks * (1 - 1 / shape.num_hidden_layers) - inputs
        text = f"{_flag('fsdp_activation_checkpointing', True)} (slower by up to a third)"
        half = f"{_flag('selective_checkpointing', 2)}, for every second block, saves half of that"
        found.append((saved, f"{text}; {half}"))
    if dtype == torch.float32 and config.parallel.mixed_precision is not None:
        found.append((in_blocks / 2, _flag("mixed_precision", True)))
    return found


def _more_sharding(config: TrainConfig, use: MemoryUse, world_size: int, shard_size: int) -> Advice:
    strategy = config.parallel.sharding_strategy
    state = max(use.state, 4 * use.parameters)  # before the first update, optimizer and gradients are still to come
    if shard_size < world_size:
        saved = state * (1 - shard_size / world_size)
        return [(saved, f"{_flag('sharding_strategy', 'fsdp')} in place of {strategy}")]
    found: Advice = []
    if strategy == "zero2" and world_size > 1:
        gathered = use.parameters * shard_size / 2  # in bfloat16, kept from forward to backward
        found.append((gathered, f"{_flag('sharding_strategy', 'fsdp')} in place of {strategy}"))
    found.append((state / 2, f"{2 * world_size} GPUs in place of {world_size}, with --sharding_strategy=fsdp"))
    return found


def _snapshot(config: TrainConfig, processes: Processes) -> list[str]:
    """A picture of the allocator, for the tool that shows it."""
    if processes.device.type != "cuda":
        return []
    path = Path(config.checkpoint.ckpt_save_path) / TRACES / f"out_of_memory_rank{processes.rank}.memory.pickle"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_snapshot(path)
    except OSError as error:
        return [f"A snapshot of the memory could not be written to {path}: {error}"]
    more = "" if config.profiler.memory_snapshot else f"; {_flag('memory_snapshot', True)} adds who allocated what"
    return [f"A snapshot for https://pytorch.org/memory_viz is in {path}{more}."]


def _place_of(error: BaseException) -> str:
    """The innermost line of this project that the error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents]
    if not frames:
        return "outside of this project"
    return f"at {Path(frames[-1].filename).relative_to(PACKAGE.parent)}:{frames[-1].lineno}"


def _flag(name: str, value: object) -> str:
    """A flag as it is typed; only flags that exist are ever named."""
    assert name in settings_of(TrainConfig), name
    return f"--{name}={value if isinstance(value, str) else format_value(value)}"
