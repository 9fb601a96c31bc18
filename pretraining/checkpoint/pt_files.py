"""The unsharded form of a checkpoint: four files of torch.save, tensors and plain values only.

    model_state_dict.pt    name -> weight, names as in Hugging Face; `load_state_dict` of a Llama takes it
    optim_state_dict.pt    "state": name -> {step, exp_avg, exp_avg_sq}, or what another optimizer keeps;
                           "param_groups": names and settings
    lr_state_dict.pt       settings of the learning rate and the step; it is a function of these
    iter_state_dict.pt     epoch, segment, its start and end, best loss; step, tokens, losses, position in the data

They stand in a checkpoint's folder in place of the shards, with the same manifest.json, which a restore believes.
Nothing here loads them otherwise than with `torch.load(…, weights_only=True)`.

Rank 0 writes them and holds one tensor at a time, whatever the size of the model: torch.save asks a storage that is on
no CPU for a copy there when its turn comes, and only then is the tensor fetched. `headers` finds the tensors in the
files again.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.serialization import skip_data

from pretraining.checkpoint.headers import load_file
from pretraining.checkpoint.manifest import (
    ITERATION_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    OPTIMIZER_PREFIX,
    SCHEDULE_FILE,
    FileEntry,
    Manifest,
    crc32_text,
    shape_of,
)
from pretraining.checkpoint.writer import Kinds, size_of
from pretraining.config.recipes import settings_in
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.distributed.grad_norm import is_sharded
from pretraining.errors import CheckpointError
from pretraining.model.hf import parameter_shapes
from pretraining.optim.registry import settings_of_groups

# Writing


@dataclass(frozen=True)
class FullSave:
    """The plan of a save in this form: rank 0 writes, all others take part in gathering."""

    tensors: Mapping[str, torch.Tensor]
    manifest: Manifest

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Writes the four files; a collective call. Returns what they have to be, on rank 0."""
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        values = (self.tensors[name].detach() for name in in_order(kinds))
        whole = (value.full_tensor() if is_sharded(value) else value for value in values)
        try:
            return write_full(folder, kinds, whole, self.manifest) if dist.get_rank() == 0 else {}
        finally:
            for _ in whole:  # every rank takes part in gathering every tensor, also where writing failed
                pass


def write_full(folder: Path, kinds: Kinds, values: Iterable[torch.Tensor], manifest: Manifest) -> dict[str, FileEntry]:
    """Writes the four files from one process; returns what they have to be, by name.

    Args:
        values: of all tensors, `in_order`; one is in memory at a time.
        manifest: of the checkpoint; its files do not matter.
    """
    shape, config = shape_of(manifest), settings_in(manifest.config, "config of the checkpoint")
    stream = iter(values)
    of_model, of_optimizer = _split(kinds)
    arranged: dict[str, tuple[Kinds, Callable[[Mapping[str, Any]], Any]]] = {
        MODEL_FILE: (of_model, lambda tensors: _model_state(tensors, shape)),
        OPTIMIZER_FILE: (of_optimizer, lambda tensors: _optimizer_state(tensors, shape, config)),
        SCHEDULE_FILE: ({}, lambda _: _schedule_state(manifest, config)),
        ITERATION_FILE: ({}, lambda _: _iteration_state(manifest, config)),
    }
    return {name: write_file(folder / name, held, arrange, stream) for name, (held, arrange) in arranged.items()}


def in_order(kinds: Kinds) -> list[str]:
    """The order in which tensors are written: of the model, then of the optimizer."""
    return [name for part in _split(kinds) for name in part]


def write_file(
    path: Path, kinds: Kinds, arrange: Callable[[Mapping[str, Any]], Any], values: Iterator[torch.Tensor]
) -> FileEntry:
    """Writes a file as torch.save does, flushed to disk, with one tensor in memory at a time.

    Args:
        arrange: makes the file's content of the tensors by name, which stand in it in the order of `kinds`.
        values: the tensors, in that order; each has memory of its own.
    """
    needed = sum(size_of(*kind) for kind in kinds.values())
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    names = iter(kinds)

    def fetch(name: str) -> torch.UntypedStorage:
        assert name == next(names), "tensors stand in the file in the order of their names"
        value = next(values).cpu().contiguous()
        assert (value.dtype, tuple(value.shape)) == kinds[name]
        storage = value.untyped_storage()
        return storage if storage.nbytes() == value.nbytes else value.clone().untyped_storage()

    from torch._subclasses.fake_tensor import FakeTensorMode  # here, since it takes its time

    with FakeTensorMode():
        blanks = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    for name, blank in blanks.items():
        blank.untyped_storage().cpu = partial(fetch, name)  # type: ignore[method-assign]
    with path.open("wb", buffering=0) as file:
        output = _Output(file)
        try:
            torch.save(arrange({name: _Pending(blank) for name, blank in blanks.items()}), cast(BinaryIO, output))
        except RuntimeError:
            if output.failure is not None:  # torch's writer only says at which byte it stopped
                raise output.failure from None
            raise
        os.fsync(file.fileno())
    return FileEntry(output.size, crc32_text(output.crc32))


@dataclass(frozen=True, eq=False)
class _Pending:
    """A tensor whose values are fetched when torch.save writes its bytes."""

    blank: torch.Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        with skip_data(materialize_fake_tensors=True):  # as a plain tensor on the CPU
            return self.blank.__reduce_ex__(protocol)


class _Output(io.RawIOBase):
    """A file that torch.save writes to in order; keeps size, checksum and the disk's error."""

    def __init__(self, file: BinaryIO | io.FileIO) -> None:
        self._file = file
        self.size = self.crc32 = 0
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Writes all of it."""
        left = memoryview(content)
        self.crc32 = zlib.crc32(left, self.crc32)
        self.size += len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.failure = error
            raise
        return len(content)


def _split(kinds: Kinds) -> tuple[Kinds, Kinds]:
    of_model = {name: kind for name, kind in kinds.items() if not name.startswith(OPTIMIZER_PREFIX)}
    return of_model, {name: kind for name, kind in kinds.items() if name not in of_model}


def _model_state(tensors: Mapping[str, torch.Tensor], shape: LlamaShape) -> dict[str, torch.Tensor]:
    # Under both its names, as `state_dict()` of a tied model gives it; it is in the file once.
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if shape.tie_word_embeddings else {}
    return {**tensors, **tied}


def _optimizer_state(tensors: Mapping[str, torch.Tensor], shape: LlamaShape, config: TrainConfig) -> dict[str, Any]:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in tensors.items():
        key, _, name = full_name.removeprefix(OPTIMIZER_PREFIX).partition(".")
        state.setdefault(name, {})[key] = tensor
    return {"state": state, "param_groups": settings_of_groups(parameter_shapes(shape), config.optimizer)}


def _schedule_state(manifest: Manifest, config: TrainConfig) -> dict[str, Any]:
    warmup = config.schedule.warmup_steps
    return {
        "step": manifest.step,
        "learning_rate": config.optimizer.peak_learning_rate,
        "min_lr_ratio": config.schedule.min_lr_ratio,
        "warmup_steps": None if warmup is None else str(warmup),
        "num_steps": str(config.run.num_steps),
    }


def _iteration_state(manifest: Manifest, config: TrainConfig) -> dict[str, Any]:
    phases = manifest.data.get("phases", [{"first_step": 0}])
    content = manifest.document()
    return {
        "epoch": _passes(manifest.data, config.data.seq_length),
        "segment": len(phases) - 1,
        "segment_start": phases[-1]["first_step"],
        "segment_end": manifest.step,
        "best_loss": manifest.best_evaluation_loss,
        **{name: content[name] for name in Manifest.__dataclass_fields__ if name != "files"},
    }


def _passes(data: Mapping[str, Any], seq_length: int) -> int:
    """Whole passes over the dataset that has been passed over least, of those that are mixed in now; 0 without data."""
    weights = data["phases"][-1]["weights"] if data else {}
    tokens = {name: data["datasets"][name].get("tokens", 0) for name, weight in weights.items() if weight > 0}
    passes = [data["counts"][name] * seq_length // tokens[name] for name in tokens if tokens[name] > 0]
    return min(passes, default=0)


# Reading


def manifest_of_files(folder: Path) -> Manifest:
    """The manifest that the four files carry, without sizes and checksums; a CheckpointError if they carry none."""
    content = load_file(folder / ITERATION_FILE)
    names = Manifest.__dataclass_fields__.keys() - {"files"}
    missing = sorted(names - content.keys())
    if missing:
        raise CheckpointError(f"lacks {', '.join(missing)}: it is of another program", path=folder / ITERATION_FILE)
    return Manifest.of_values({**{name: content[name] for name in names}, "files": {}}, str(folder / ITERATION_FILE))
