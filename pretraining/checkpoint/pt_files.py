"""Unsharded ("full") form of a checkpoint: four torch.save files with tensors and plain values only.

    model_state_dict.pt    name -> weight under Hugging Face names; for `load_state_dict` of a Llama
    optim_state_dict.pt    "state": name -> {step, exp_avg, exp_avg_sq}, or the state of another optimizer;
                           "param_groups": settings and names, in the order of the model's parameters; for
                           `load_state_dict` of an optimizer over these parameters
    lr_state_dict.pt       state of torch's LRScheduler: last_epoch, base_lrs, _last_lr; settings of the schedule
    iter_state_dict.pt     epoch, segment, its first and its next sample, best loss and its name; the manifest

These files replace the shards in a checkpoint's folder. manifest.json is the same, and a restore uses it.
Rank 0 gathers all tensors in host memory, one after the other. `headers` reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretraining.checkpoint.headers import load_file
from pretraining.checkpoint.manifest import (
    FIELDS,
    ITERATION_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    OPTIMIZER_PREFIX,
    SCHEDULE_FILE,
    FileEntry,
    Manifest,
    shape_of,
)
from pretraining.checkpoint.stored_files import ChecksummedFile
from pretraining.config.recipe_files import settings_in
from pretraining.config.training import TrainConfig
from pretraining.distributed.grad_norm import is_sharded
from pretraining.durations import TokenSchedule
from pretraining.errors import CheckpointError, ConfigError
from pretraining.launch.machine import machine_memory
from pretraining.model.hf import parameter_shapes
from pretraining.optim.registry import settings_of_groups
from pretraining.optim.schedules import build_learning_rate
from pretraining.text import format_bytes

# Writing


def check_host_memory(tensor_bytes: int, remedy: str) -> None:
    """Raise a CheckpointError if the tensors of a full checkpoint do not fit in this machine's memory."""
    memory = machine_memory()
    if tensor_bytes > memory.available:
        raise CheckpointError(
            f"a full checkpoint gathers {format_bytes(tensor_bytes)} of tensors in one process's memory, and "
            f"{format_bytes(memory.available)} are available in {memory.limited_by}. {remedy}"
        )


@dataclass(frozen=True)
class FullSave:
    """Save of a full checkpoint: rank 0 writes, and all ranks gather."""

    tensors: Mapping[str, torch.Tensor]
    manifest: Manifest

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write the four files; a collective call. Return their sizes and checksums on rank 0."""
        gathered: dict[str, torch.Tensor] = {}
        failure: RuntimeError | None = None
        for name, tensor in self.tensors.items():  # never stops early: the other ranks are in these collectives
            value = tensor.detach()
            value = value.full_tensor() if is_sharded(value) else value
            try:
                if dist.get_rank() == 0:
                    gathered[name] = _copy_to_host(value)
            except RuntimeError as error:  # out of memory
                failure = error
        if failure is not None:
            raise failure
        return write_full(folder, gathered, self.manifest) if gathered else {}


def _copy_to_host(value: torch.Tensor) -> torch.Tensor:
    value = value.cpu().contiguous()
    # torch.save writes the whole storage of a tensor that is a view.
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def write_full(folder: Path, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, FileEntry]:
    """Write the four files from one process, from tensors on the CPU; return their sizes and checksums by name."""
    shape, config = shape_of(manifest), settings_in(manifest.config, "config of the checkpoint")
    parameters = parameter_shapes(shape)
    weights = {name: tensors[name] for name in parameters}
    if shape.tie_word_embeddings:  # under both names, as in a model's `state_dict()`; torch.save stores it once
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    groups = settings_of_groups(parameters, config.optimizer)
    contents: dict[str, dict[str, Any]] = {
        MODEL_FILE: weights,
        OPTIMIZER_FILE: {"state": _optimizer_state(tensors), "param_groups": groups},
        SCHEDULE_FILE: _schedule_state(manifest, config, [group["lr"] for group in groups]),
        ITERATION_FILE: _iteration_state(manifest),
    }
    return {name: write_file(folder / name, content) for name, content in contents.items()}


def write_file(path: Path, content: dict[str, Any]) -> FileEntry:
    """Write a torch.save file, flushed to disk; raise an OSError if it cannot be written."""
    with ChecksummedFile(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's writer only reports the byte at which it stopped
            raise file.failure or error from None
        return file.finish()


def _optimizer_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER_PREFIX):
            key, _, owner = name.removeprefix(OPTIMIZER_PREFIX).partition(".")
            state.setdefault(owner, {})[key] = tensor
    return state


def _schedule_state(manifest: Manifest, config: TrainConfig, peaks: list[float]) -> dict[str, Any]:
    warmup = config.schedule.warmup_steps
    state = {
        "step": manifest.step,
        "learning_rate": config.optimizer.peak_learning_rate,
        "min_lr_ratio": config.schedule.min_lr_ratio,
        "warmup_steps": None if warmup is None else str(warmup),
        "num_steps": str(config.run.num_steps),
        "last_epoch": manifest.step,
        "base_lrs": peaks,
    }
    # Left out for lengths in epochs, since a manifest cannot count them, and for a user-defined schedule.
    with suppress(ConfigError):
        phases = manifest.data.get("phases", [{"first_step": 0, "global_batch_size": 1}])
        schedule = TokenSchedule.of_phases(
            (phase["first_step"], phase["global_batch_size"] * config.data.seq_length) for phase in phases
        )
        rate = build_learning_rate(config.schedule, config.run.num_steps, schedule, None, manifest.annealing_from)
        state["_last_lr"] = [rate.at(manifest.step, peak) for peak in peaks]
    return state


def _iteration_state(manifest: Manifest) -> dict[str, Any]:
    phases = manifest.data.get("phases", [{"first_sample": 0}])
    content, (best_name, best_loss) = manifest.document(), manifest.best_loss
    return {
        "epoch": _whole_passes(manifest.data),
        "segment": len(phases) - 1,
        "segment_start": phases[-1]["first_sample"],
        "segment_end": manifest.data.get("next_sample", 0),
        "best_loss": best_loss,
        "best_loss_name": best_name,
        **{name: content[name] for name in FIELDS if name != "files"},
    }


def _whole_passes(data: Mapping[str, Any]) -> int:
    """Return whole passes over the dataset with the fewest passes, of the current mixture; 0 without datasets."""
    weights = data["phases"][-1]["weights"] if data else {}
    tokens = {name: data["datasets"][name].get("tokens", 0) for name, weight in weights.items() if weight > 0}
    seen = {name: sum(length * samples for length, samples in data["counts"][name]) for name in tokens}
    passes = [seen[name] // tokens[name] for name in tokens if tokens[name] > 0]
    return min(passes, default=0)


# Reading


def manifest_of_files(folder: Path) -> Manifest:
    """Return the manifest in the four files, without sizes and checksums; raise a CheckpointError without one."""
    path = folder / ITERATION_FILE
    manifest = Manifest.from_values({**load_file(path), "files": {}}, str(path))
    return replace(manifest, files=dict.fromkeys((MODEL_FILE, OPTIMIZER_FILE)))
