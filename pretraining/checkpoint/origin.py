"""What a run may start from besides nothing, and its tensors.

    checkpoint, sharded (`store`) or full (`full`)    -> everything, or with weights_only its weights
    four .pt files without a manifest                 -> the same
    folder of a Hugging Face Llama (`hf_folder`)      -> its weights

A run of weights alone begins at step 0 with an optimizer, a learning rate and a position in the data of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from pretraining.checkpoint.full import ITERATION_FILE, FullFiles, is_full, manifest_of_files
from pretraining.checkpoint.hf_folder import is_hugging_face_folder, manifest_of_folder, open_folder
from pretraining.checkpoint.listing import MANIFEST, committed_checkpoints
from pretraining.checkpoint.loading import check_files, load_tensors
from pretraining.checkpoint.restore import Restorable, find_checkpoint
from pretraining.checkpoint.sources import TensorFiles, TensorSource, fill
from pretraining.checkpoint.state import shape_of
from pretraining.config.rules import check_config
from pretraining.config.training import CheckpointConfig, ModelConfig, TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT, model_settings
from pretraining.errors import CheckpointError
from pretraining.parallel.processes import on_every_rank, on_rank_zero

Run = TypeVar("Run", bound=TrainConfig)


@dataclass(frozen=True)
class Origin:
    """What a run starts from.

    Attributes:
        checkpoint: its place and manifest; that of a Hugging Face folder says what a checkpoint of it would.
        weights_only: whether nothing but the weights is taken.
    """

    checkpoint: Restorable
    weights_only: bool

    @property
    def step(self) -> int:
        """Updates done where the run starts."""
        return 0 if self.weights_only else self.checkpoint.manifest.step


def find_origin(config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({})) -> Origin | None:
    """What a run with these settings starts from, or None for initial weights; a collective call.

    Args:
        config: where to look.
        damaged: checkpoints that loading has found damaged, and how.

    Raises:
        CheckpointError: a load path was named and holds nothing to start from, or all there is is damaged.
    """
    foreign = on_rank_zero(lambda: _foreign(config))
    found = foreign or find_checkpoint(config, damaged)
    if found is None:
        return None
    has_state = bool(found.manifest.data)
    return Origin(found, weights_only=not has_state or (config.weights_only and not found.is_own))


def named_checkpoint(path: str) -> Restorable:
    """The checkpoint at a path, or the newest of the run there, its files not read; without other processes.

    Raises:
        CheckpointError: there is none.
    """
    source = Path(path)
    if is_hugging_face_folder(source) and not (source / MANIFEST).is_file():
        raise CheckpointError(f"{source} is a Hugging Face folder, not a checkpoint: `pretrain import` makes one of it")
    config = CheckpointConfig(ckpt_save_path=path, ckpt_load_path=path)
    found = _foreign(replace(config, ckpt_save_path="")) or find_checkpoint(config)
    assert found is not None  # a load path without a checkpoint is an error
    return found


def open_tensors(checkpoint: Restorable, *, check_contents: bool = True) -> TensorSource:
    """The tensors of a checkpoint.

    Args:
        checkpoint: of any form.
        check_contents: compare files with the checksums of the manifest before they are used.

    Raises:
        CheckpointError: a file is missing, damaged or of another form.
    """
    files = {name: entry if check_contents else None for name, entry in checkpoint.manifest.files.items()}
    if is_full(files) or (checkpoint.path / ITERATION_FILE).is_file():
        return FullFiles(checkpoint.path, files)
    return TensorFiles(checkpoint.path, files) if files else open_folder(checkpoint.path).weights


def load(checkpoint: Restorable, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read tensors of a checkpoint of any form into place, whatever the layout; a collective call.

    Raises:
        DamagedError: a file is not what was written; the tensors hold anything.
        CheckpointError: a tensor is missing or of another shape.
    """
    files = checkpoint.manifest.files
    if files and not is_full(files):
        load_tensors(checkpoint.path, files, tensors)
        return
    check_files(checkpoint.path, files)
    on_every_rank(lambda: fill(tensors, open_tensors(checkpoint, check_contents=False)))


def adopt_model(config: Run) -> Run:
    """A run's settings with its model: without a model_variant, dimensions are those of what the run starts from.

    A collective call, or one of a process alone; no tensors are read. Dimensions that were given stay; where they
    differ, the start refuses them.

    Raises:
        CheckpointError: there is nothing to start from at a load path, or it does not say what it is.
        ConfigError: the settings do not fit the model.
    """
    if config.model.model_variant is not None:
        return config
    foreign = on_rank_zero(lambda: _foreign(config.checkpoint))
    found = foreign or find_checkpoint(config.checkpoint)
    model = ModelConfig(model_variant=DEFAULT_VARIANT) if found is None else model_settings(shape_of(found.manifest))
    given = {
        field.name: getattr(config.model, field.name)
        for field in fields(model)
        if getattr(config.model, field.name) not in (None, ())
    }
    adopted = replace(config, model=replace(model, **given))
    check_config(adopted)
    return adopted


def _foreign(config: CheckpointConfig) -> Restorable | None:
    """The named folder where it has no manifest of its own and the run no checkpoint yet, or None."""
    if config.ckpt_load_path is None or (config.ckpt_save_path and committed_checkpoints(Path(config.ckpt_save_path))):
        return None
    source = Path(config.ckpt_load_path)
    if (source / MANIFEST).is_file():
        return None
    if (source / ITERATION_FILE).is_file():
        return Restorable(source, manifest_of_files(source), is_own=False)
    if is_hugging_face_folder(source):
        return Restorable(source, manifest_of_folder(source), is_own=False)
    return None
