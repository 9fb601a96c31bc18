"""`pretrain import`: a run made from a Hugging Face Llama.

    config.json, safetensors -> checks -> float32, one tensor at a time -> <run>/checkpoints/step_0_ckp

The checkpoint holds weights only, and training starts from it at step 0. `pretrain train --ckpt_load_path=<folder>`
starts from the same weights without an import.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from pretraining.checkpoint.branches import begin_branch
from pretraining.checkpoint.hf_import import open_folder, record_origin
from pretraining.checkpoint.manifest import BRANCHES, MANIFEST, RUN_ID, RUN_STATE, Manifest
from pretraining.checkpoint.reader import read_tensor
from pretraining.checkpoint.run_folder import checkpoint_path, committed_checkpoints
from pretraining.checkpoint.writer import write_tensors
from pretraining.config.recipe_files import dump_config
from pretraining.config.training import CheckpointConfig, DataConfig, TrainConfig
from pretraining.config.variants import LlamaShape, model_settings
from pretraining.data.tokenizer import TOKENIZER_FILE
from pretraining.errors import CheckpointError
from pretraining.estimate.costs import parameter_count
from pretraining.files import atomic_folder, from_hub, is_file, write_json
from pretraining.launch.terminal import print_text
from pretraining.model.hf import MODEL_FILES, parameter_shapes
from pretraining.tools.command_settings import ImportConfig
from pretraining.tools.export import plan_files

FILE_BYTES = 2**30


def import_weights(config: ImportConfig) -> None:
    """Write the first checkpoint of a run from the weights in a folder.

    Raises:
        CheckpointError: no Llama that can be trained here, a run with checkpoints, or a folder that cannot be written.
    """
    run = Path(config.ckpt_save_path)
    if committed_checkpoints(run):
        raise CheckpointError(
            "has checkpoints already, and training would resume from them. Name another folder", path=run
        )
    source = from_hub(config.input_path, MODEL_FILES, CheckpointError)
    shape, stored = open_folder(source)
    folder, sizes = checkpoint_path(run, 0), parameter_shapes(shape)
    record = {RUN_ID: secrets.token_hex(8), BRANCHES: begin_branch(None, 0, [], above=0, is_plain=True, seen=None)}
    manifest = Manifest(model=asdict(shape), config=_settings(source, shape, run), state={RUN_STATE: record})
    with atomic_folder(folder, "--ckpt_save_path", sum(4 * size.numel() for size in sizes.values())) as temporary:
        write_weights(temporary, sizes, lambda name: read_tensor(stored, name).float(), manifest)
        record_origin(run, source, config.input_path)
    print_text(f"{folder}: the weights of {source}, {parameter_count(shape):,} parameters, float32")
    print_text(f"  train      pretrain train {shlex.quote(f'--ckpt_save_path={run}')} --data_path=…")


def write_weights(
    folder: Path, sizes: Mapping[str, torch.Size], read: Callable[[str], torch.Tensor], manifest: Manifest
) -> None:
    """Write a checkpoint of float32 weights alone, one tensor at a time.

    Args:
        read: returns the tensor of a name.
        manifest: of the checkpoint, without files.
    """
    kinds = {name: (torch.float32, tuple(size)) for name, size in sizes.items()}
    files = {
        name: write_tensors(folder / name, content, map(read, content))
        for name, content in plan_files(kinds, FILE_BYTES).items()
    }
    write_json(folder / MANIFEST, replace(manifest, files=files).document())


def _settings(source: Path, shape: LlamaShape, run: Path) -> str:
    """Return the known settings of the run: its model, its folder, and the tokenizer if the source has one."""
    tokenizer = str(source.resolve()) if is_file(source / TOKENIZER_FILE) else None
    return dump_config(
        TrainConfig(
            model=model_settings(shape),
            data=DataConfig(tokenizer_path=tokenizer),
            checkpoint=CheckpointConfig(ckpt_save_path=str(run)),
        )
    )
