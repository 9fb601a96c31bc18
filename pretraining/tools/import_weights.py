"""A run made of a Hugging Face Llama: `pretrain import`.

    config.json, safetensors -> checked, a tensor at a time to float32 -> <run>/checkpoints/step_0_ckp

The checkpoint holds weights alone. Training that finds it begins with them at step 0; `pretrain train
--ckpt_load_path=<the folder>` does the same without this step.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import torch

from pretraining.checkpoint.hf_import import HuggingFaceFolder, open_folder, origin_of
from pretraining.checkpoint.manifest import MANIFEST, Manifest
from pretraining.checkpoint.reader import read_tensor
from pretraining.checkpoint.run_folder import checkpoint_path, committed_checkpoints
from pretraining.checkpoint.writer import size_of, write_tensors
from pretraining.config.commands import ImportConfig
from pretraining.config.recipes import dump_config
from pretraining.config.training import CheckpointConfig, DataConfig, TrainConfig
from pretraining.config.variants import model_settings, parameter_count
from pretraining.data.tokenizer import TOKENIZER_FILE
from pretraining.errors import CheckpointError
from pretraining.files import atomic_folder, from_hub, is_file, write_json
from pretraining.launch.terminal import print_text
from pretraining.model.hf import MODEL_FILES, parameter_shapes
from pretraining.tools.export import ORIGIN_FILE, plan_files

FILE_BYTES = 2**30


def import_weights(config: ImportConfig) -> None:
    """Make a run's first checkpoint of the weights in a folder.

    Raises:
        CheckpointError: the folder holds no Llama that can be trained here, the run has checkpoints already, or it
            cannot be written.
    """
    run = Path(config.ckpt_save_path)
    if committed_checkpoints(run):
        raise CheckpointError(
            "holds checkpoints already: training would resume from those. Give another folder", path=run
        )
    source = open_folder(from_hub(config.input_path, MODEL_FILES, CheckpointError))
    folder = checkpoint_path(run, 0)
    kinds = {name: (torch.float32, tuple(size)) for name, size in parameter_shapes(source.shape).items()}
    planned = plan_files(kinds, FILE_BYTES)
    origin = origin_of(source.path, config.input_path)
    with atomic_folder(folder, "--ckpt_save_path", sum(size_of(*kind) for kind in kinds.values())) as temporary:
        files = {
            name: write_tensors(
                temporary / name, content, (read_tensor(source.weights, each).float() for each in content)
            )
            for name, content in planned.items()
        }
        manifest = Manifest(model=asdict(source.shape), files=files, config=_settings(source, run))
        write_json(temporary / MANIFEST, manifest.document())
        write_json(run / ORIGIN_FILE, origin)
    print_text(f"{folder}: the weights of {source.path}, {parameter_count(source.shape):,} parameters, float32")
    print_text(f"  train      pretrain train {shlex.quote(f'--ckpt_save_path={run}')} --data_path=…")


def _settings(source: HuggingFaceFolder, run: Path) -> str:
    """Return what is known of the run's settings: its model, and the tokenizer if the folder has one."""
    tokenizer = str(source.path.resolve()) if is_file(source.path / TOKENIZER_FILE) else None
    return dump_config(
        TrainConfig(
            model=model_settings(source.shape),
            data=DataConfig(tokenizer_path=tokenizer),
            checkpoint=CheckpointConfig(ckpt_save_path=str(run)),
        )
    )
