"""Checkpoints in the layout of several processes, written by this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_shape import TINY_SHAPE

from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.manifest import LOSS_STATE, MANIFEST, FileEntry, Manifest
from pretraining.checkpoint.pt_files import write_full
from pretraining.checkpoint.writer import WriteItem, write_chunks
from pretraining.config.recipe_files import dump_config
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, RopeScaling, model_settings
from pretraining.files import file_checksum, write_json
from pretraining.model.hf import parameter_shapes

SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
SHAPES = {
    "plain": TINY_SHAPE,
    "tied": replace(TINY_SHAPE, tie_word_embeddings=True),
    "scaled": replace(TINY_SHAPE, rope_theta=5e5, rope_scaling=SCALED, max_position_embeddings=128),
}
DATA = {
    "phases": [
        {"first_step": 0, "first_sample": 0, "global_batch_size": 4, "seq_length": 64, "weights": {"a": 1}},
        {"first_step": 2, "first_sample": 8, "global_batch_size": 4, "seq_length": 64, "weights": {"a": 1, "b": 2}},
    ],
    "datasets": {"a": {"tokens": 100}, "b": {"tokens": 1000}},
    "counts": {"a": [[64, 1]], "b": [[64, 2]]},
    "next_sample": 12,
}


def config_of(shape: LlamaShape, **data: Any) -> TrainConfig:
    config = TrainConfig(model=model_settings(shape))
    return replace(config, data=replace(config.data, seq_length=64, **data))


@cache
def settings_of(shape: LlamaShape) -> str:
    return dump_config(config_of(shape))


def manifest_of(shape: LlamaShape, step: int = 3, **changes: Any) -> Manifest:
    more: dict[str, Any] = {"loss": 2.5, "evaluation_loss": 2.75, "best_evaluation_loss": 2.25, "data": DATA}
    more |= {
        "global_batch_size": 4,
        "world": {"processes": 3, "sharding_strategy": "fsdp"},
        "model": asdict(shape),
        "state": {LOSS_STATE: {"value": 2.75, "step": step}},
    }
    manifest = Manifest(step=step, tokens_seen=step * 100, seconds=1.5, config=settings_of(shape), **more)
    return replace(manifest, **changes)


def tensors_of(shape: LlamaShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights so large that a wrong one changes results, and AdamW's state."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in parameter_shapes(shape).items():
        base = 1.0 if name.endswith("norm.weight") else 0.0
        tensors[name] = base + 0.2 * torch.randn(size, generator=generator)
    for name in list(tensors):
        tensors[f"optimizer.step.{name}"] = torch.tensor(3.0)
        tensors[f"optimizer.exp_avg.{name}"] = torch.randn(tensors[name].shape, generator=generator)
        tensors[f"optimizer.exp_avg_sq.{name}"] = torch.rand(tensors[name].shape, generator=generator)
    return tensors


def write_sharded(
    folder: Path, tensors: Mapping[str, torch.Tensor], manifest: Manifest, processes: int = 3
) -> dict[str, torch.Tensor]:
    """Divide each tensor's rows among the processes, as FSDP does; the first process writes scalars."""
    folder.mkdir(parents=True)
    files = {}
    for rank in range(processes):
        pieces = []
        for name, tensor in tensors.items():
            if tensor.dim() == 0:
                pieces += [WriteItem(name, Chunk((), ()), tensor)] if rank == 0 else []
                continue
            rows = -(-len(tensor) // processes)
            part = tensor[rank * rows : (rank + 1) * rows]
            offsets = (rank * rows, *(0 for _ in tensor.shape[1:]))
            pieces += [WriteItem(name, Chunk(offsets, tuple(part.shape)), part)] if len(part) else []
        for number, blocks in ((1, False), (2, True)):
            name = f"shard-{rank + 1:05d}-model-{number:05d}-of-00002.safetensors"
            files[name] = write_chunks(
                folder / name, [piece for piece in pieces if ("layers." in piece.name) == blocks]
            )
    write_manifest(folder, manifest, files)
    return dict(tensors)


def write_full_form(folder: Path, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True)
    files = write_full(folder, tensors, manifest)
    write_manifest(folder, manifest, files)
    return dict(tensors)


def write_manifest(folder: Path, manifest: Manifest, files: Mapping[str, FileEntry]) -> None:
    write_json(folder / MANIFEST, replace(manifest, files=files).document())


def file_entry(path: Path) -> FileEntry:
    """Return size and checksum of a file on disk."""
    checksum, size = file_checksum(path)
    return FileEntry(size, checksum)


def flip_byte(path: Path, at: int = -1, bits: int = 0xFF) -> None:
    """Change some bits of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)
