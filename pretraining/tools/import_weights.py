"""`pretrain import`: a run made from a Hugging Face Llama.

    config.json, safetensors -> checks -> float32, one tensor at a time -> <run>/checkpoints/step_0_ckp

The checkpoint holds weights only, and training starts from it at step 0. `pretrain train --ckpt_load_path=<folder>`
starts from the same weights without an import.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import torch
import yaml

from pretraining.checkpoint.hf_import import open_folder, read_json_of
from pretraining.checkpoint.manifest import MANIFEST, Manifest, describe_model
from pretraining.checkpoint.reader import read_tensor
from pretraining.checkpoint.run_folder import checkpoint_path, committed_checkpoints
from pretraining.checkpoint.writer import size_of, write_tensors
from pretraining.config.recipes import dump_config
from pretraining.config.settings_files import read_yaml
from pretraining.config.training import CheckpointConfig, DataConfig, TrainConfig
from pretraining.config.variants import LlamaShape, model_settings, parameter_count
from pretraining.data.tokenizer import TOKENIZER_FILE
from pretraining.errors import CheckpointError
from pretraining.files import atomic_folder, exists, from_hub, is_file, read_file, write_json
from pretraining.launch.terminal import print_text
from pretraining.model.hf import CONFIG_FILE, MODEL_FILES, parameter_shapes
from pretraining.tools.commands import ImportConfig
from pretraining.tools.export import ORIGIN_FILE, plan_files

FILE_BYTES = 2**30
_WORD = re.compile(r"[\w.-]+")


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
    folder = checkpoint_path(run, 0)
    kinds = {name: (torch.float32, tuple(size)) for name, size in parameter_shapes(shape).items()}
    planned = plan_files(kinds, FILE_BYTES)
    origin = _origin_of(source, config.input_path)
    with atomic_folder(folder, "--ckpt_save_path", sum(size_of(*kind) for kind in kinds.values())) as temporary:
        files = {
            name: write_tensors(temporary / name, content, (read_tensor(stored, each).float() for each in content))
            for name, content in planned.items()
        }
        manifest = Manifest(model=describe_model(shape), files=files, config=_settings(source, shape, run))
        write_json(temporary / MANIFEST, manifest.document())
        write_json(run / ORIGIN_FILE, origin)
    print_text(f"{folder}: the weights of {source}, {parameter_count(shape):,} parameters, float32")
    print_text(f"  train      pretrain train {shlex.quote(f'--ckpt_save_path={run}')} --data_path=…")


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


def _origin_of(path: Path, name: str) -> dict[str, Any]:
    """Return what exports keep of the imported model; None = not known.

    Args:
        name: path or Hub name that the user gave.

    Returns:
        bos_token_id and eos_token_id of config.json, license of README.md, and base_model, the name on the Hub.
    """
    config = read_json_of(path, CONFIG_FILE)
    tokens = {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}
    tokens = {key: ids if _are_token_ids(ids) else None for key, ids in tokens.items()}
    base = None if exists(Path(name).expanduser()) else name
    return {**tokens, "license": _license_of(path / "README.md"), "base_model": base}


def _are_token_ids(ids: Any) -> bool:
    """Return whether an entry is a token id or a list of token ids, as `eos_token_id` may be."""
    several = ids if isinstance(ids, list) else [ids]
    return len(several) > 0 and all(type(each) is int and each >= 0 for each in several)


def _license_of(card: Path) -> str | None:
    try:
        _, header, _ = read_file(card).decode().split("---\n", 2)
        found = read_yaml(header).get("license")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None  # no card, or no valid header
    return found if isinstance(found, str) and _WORD.fullmatch(found) else None
