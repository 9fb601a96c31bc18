"""A checkpoint in a form that other programs read: `pretrain export`.

    checkpoint, sharded or full -> a tensor at a time, put together -> hf    config.json, safetensors, tokenizer, README
                                                                    -> full  four .pt files and a manifest

It takes one process, no GPU, and the memory of one tensor. The folder appears complete or not at all. Weights in
Hugging Face's form fill files of a bounded size, in the model's order, and an index says what is where.
"""

from __future__ import annotations

import logging
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.completeness import check_finite, tensor_faults
from pretraining.checkpoint.manifest import FULL_FILES, MANIFEST, shape_of
from pretraining.checkpoint.pt_files import in_order, write_full
from pretraining.checkpoint.reader import TensorFiles
from pretraining.checkpoint.start_point import CheckpointRef, named_checkpoint, open_tensors
from pretraining.checkpoint.writer import Kinds, size_of, write_tensors
from pretraining.config.commands import ExportConfig
from pretraining.config.recipes import settings_in
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.data.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from pretraining.errors import CheckpointError, ConfigError, DataError
from pretraining.files import atomic_folder, from_hub, is_file, is_folder, read_json, write_flushed, write_json
from pretraining.launch.terminal import print_text
from pretraining.model.hf import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    config_document,
    generation_document,
    parameter_shapes,
)
from pretraining.text import count_of
from pretraining.tools.model_card import MODEL_CARD, model_card

log = logging.getLogger(__name__)

# Beside tokenizer.json and tokenizer_config.json, what a tokenizer's folder may hold and AutoTokenizer reads.
ORIGIN_FILE = "imported.json"
"""In the folder of a run that `pretrain import` has made: what exports keep of the imported model."""
_MORE_TOKENIZER_FILES = (
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)


def export(config: ExportConfig) -> None:
    """Writes a checkpoint as `config` says.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or nothing can be written.
        ConfigError, DataError: the settings or the tokenizer cannot be used.
    """
    max_bytes = config.max_shard_bytes  # first: a size that is none should not wait for the checkpoint
    checkpoint = named_checkpoint(config.ckpt_load_path)
    for damaged in checkpoint.passed_over:
        log.info("%s: passed over", damaged)
    tensors = open_tensors(checkpoint)
    check_complete(checkpoint, tensors)
    if config.format == "full":
        _export_full(config, checkpoint, tensors)
    else:
        _export_hf(config, checkpoint, tensors, max_bytes)


def _export_hf(config: ExportConfig, checkpoint: CheckpointRef, tensors: TensorFiles, max_bytes: int) -> None:
    shape = shape_of(checkpoint.manifest)
    settings = settings_in(checkpoint.manifest.config, f"config of {checkpoint.path}")
    tokenizer, tokenizer_path, told = _find_tokenizer(config, settings, shape)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    kinds = {name: (dtype, tuple(size)) for name, size in parameter_shapes(shape).items()}
    files = plan_files(kinds, max_bytes)
    is_trained, origin = bool(checkpoint.manifest.data), _read_origin(checkpoint)
    context = max(settings.data.seq_length if is_trained else 0, shape.max_position_embeddings)
    end_of_text = None if tokenizer is None else tokenizer.end_of_text
    bos = _first_known(settings.data.bos_token, origin.get("bos_token_id"))
    eos = _first_known(settings.data.sep_token, origin.get("eos_token_id"), end_of_text)
    end = eos[0] if isinstance(eos, list) else eos
    pad = None if tokenizer is None else _first_known(tokenizer.pad_token, end)
    output = Path(config.output_path)
    total = sum(size_of(*kind) for kind in kinds.values())
    with atomic_folder(output, "--output_path", total) as folder:
        for name, content in files.items():
            weights = (check_finite(checkpoint.path, each, tensors.read(each)).to(dtype) for each in content)
            write_tensors(folder / name, content, weights)
        if len(files) > 1:
            write_json(folder / INDEX_FILE, index_document(files))
        write_json(folder / CONFIG_FILE, config_document(shape, config.dtype, context, bos, eos, pad))
        write_json(folder / GENERATION_CONFIG_FILE, generation_document(bos, eos, pad))
        if tokenizer is not None and tokenizer_path is not None:
            _write_tokenizer(tokenizer.with_settings(context, pad), tokenizer_path, folder)
        card = model_card(
            output.name, checkpoint.manifest, settings, config.dtype, origin, has_tokenizer=tokenizer is not None
        )
        write_flushed(folder / MODEL_CARD, card)
    print_text(f"{output}: step {checkpoint.manifest.step} of {checkpoint.path}, {config.dtype}, {total / 1e9:.2f} GB")
    print_text(f"  weights    {count_of(len(files), 'safetensors file')}")
    print_text(f"  tokenizer  {told}")
    print_text(f"  load it    AutoModelForCausalLM.from_pretrained({str(output)!r})")
    begin = None if tokenizer is None else tokenizer.begin_of_text
    if begin is not None and settings.data.bos_token is None and is_trained:
        log.warning(
            "the tokenizer puts token %d before every text, and the run had no bos_token: unless it stood in the token "
            "files, the model has never seen it. Give tokenizers of transformers add_special_tokens=False",
            begin,
        )


def _first_known(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _read_origin(checkpoint: CheckpointRef) -> dict[str, Any]:
    """Return what `pretrain import` has noted of the model that the checkpoint's run began with, if it has."""
    path = checkpoint.path.parent.parent / ORIGIN_FILE
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Remove it to export without it") from error


def _export_full(config: ExportConfig, checkpoint: CheckpointRef, tensors: TensorFiles) -> None:
    parameters = parameter_shapes(shape_of(checkpoint.manifest))
    kinds = _in_model_order(tensors, list(parameters))

    def read(name: str) -> torch.Tensor:
        tensor = tensors.read(name)
        return check_finite(checkpoint.path, name, tensor) if name in parameters else tensor

    output = Path(config.output_path)
    total = sum(size_of(*kind) for kind in kinds.values())
    with atomic_folder(output, "--output_path", total) as folder:
        files = write_full(folder, kinds, map(read, in_order(kinds)), checkpoint.manifest)
        write_json(folder / MANIFEST, replace(checkpoint.manifest, files=files).document())
    print_text(f"{output}: step {checkpoint.manifest.step} of {checkpoint.path}, {total / 1e9:.2f} GB")
    print_text("  files      " + ", ".join(FULL_FILES))
    print_text(f"  go on      pretrain train {shlex.quote(f'--ckpt_load_path={output}')} …")


def check_complete(checkpoint: CheckpointRef, tensors: TensorFiles) -> None:
    """Refuses a checkpoint without all parameters of its model.

    Raises:
        CheckpointError: names the first that is missing or has another shape, or what else a load would refuse.
    """
    shapes = tensors.shapes()
    for name, shape in parameter_shapes(shape_of(checkpoint.manifest)).items():
        if shapes.get(name) != shape:
            held = f"has the shape {shapes[name]}, not" if name in shapes else "is missing; its shape is"
            raise CheckpointError(f"{checkpoint.path} is damaged: {name} {held} {tuple(shape)}")
    faults = tensor_faults(checkpoint.path, tensors.chunks, checkpoint.manifest)
    if faults:
        raise CheckpointError("; ".join(faults))


def _in_model_order(tensors: TensorFiles, names: list[str]) -> Kinds:
    """All tensors of a checkpoint, those of a parameter in the order of the parameters."""
    place = {name: number for number, name in enumerate(names)}

    def key(name: str) -> tuple[int, str]:
        return place.get(name, place.get(name.split(".", 2)[-1], len(place))), name

    shapes = tensors.shapes()
    return {name: (tensors.chunks[name][0].dtype, shapes[name]) for name in sorted(shapes, key=key)}


def _find_tokenizer(
    config: ExportConfig, settings: TrainConfig, shape: LlamaShape
) -> tuple[Tokenizer | None, Path | None, str]:
    """The tokenizer to export, where it is, and what to say of it.

    Raises:
        ConfigError, DataError: one was named and cannot be used.
    """
    named = config.tokenizer_path or settings.data.tokenizer_path
    if named is None:
        return None, None, "none: the run had no tokenizer_path; give --tokenizer_path to put one in"
    try:
        tokenizer = load_tokenizer(named)
    except DataError as error:
        if config.tokenizer_path is not None:
            raise
        return None, None, f"none: {error}. Give --tokenizer_path to put one in"
    if tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"--tokenizer_path={named} has {tokenizer.vocab_size} entries, more than the model's {shape.vocab_size}: "
            "give the tokenizer that made the data"
        )
    return tokenizer, from_hub(named, TOKENIZER_FILES, DataError), str(named)


def _write_tokenizer(tokenizer: Tokenizer, path: Path, folder: Path) -> None:
    tokenizer.save(folder)
    source = path if is_folder(path) else path.parent
    for name in _MORE_TOKENIZER_FILES:
        if is_file(source / name):
            shutil.copyfile(source / name, folder / name)


def plan_files(kinds: Kinds, max_bytes: int) -> dict[str, Kinds]:
    """What goes into which file, by name; a tensor larger than a file may be has one of its own."""
    files: list[dict[str, Any]] = [{}]
    used = 0
    for name, kind in kinds.items():
        used += size_of(*kind)
        if files[-1] and used > max_bytes:
            files.append({})
            used = size_of(*kind)
        files[-1][name] = kind
    if len(files) == 1:
        return {WEIGHTS_FILE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": content for n, content in enumerate(files, start=1)}


def index_document(files: dict[str, Kinds]) -> dict[str, Any]:
    """The index of several files."""
    kinds = [kind for content in files.values() for kind in content.values()]
    parameters, size = sum(math.prod(shape) for _, shape in kinds), sum(size_of(*kind) for kind in kinds)
    return {
        "metadata": {"total_parameters": parameters, "total_size": size},
        "weight_map": {name: file for file, content in files.items() for name in content},
    }
