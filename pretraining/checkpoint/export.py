"""A checkpoint in a form that other programs read: `pretrain export`.

    checkpoint, sharded or full -> a tensor at a time, put together -> hf    config.json, safetensors, tokenizer
                                                                    -> full  four .pt files and a manifest

One process, no GPU, the memory of one tensor. The folder is written aside and renamed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from pretraining.checkpoint.aside import write_json, written_aside
from pretraining.checkpoint.full import FULL_FILES, in_order, write_full
from pretraining.checkpoint.listing import MANIFEST
from pretraining.checkpoint.origin import named_checkpoint, open_tensors
from pretraining.checkpoint.restore import Restorable
from pretraining.checkpoint.sources import TensorSource
from pretraining.checkpoint.state import shape_of
from pretraining.checkpoint.tensor_files import checksum_file
from pretraining.checkpoint.torch_files import Kinds
from pretraining.checkpoint.weight_files import INDEX_FILE, bytes_of, index_document, plan_files, write_weights
from pretraining.config.checkpoints import ExportConfig
from pretraining.config.recipes import settings_in
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.errors import CheckpointError, ConfigError, DataError
from pretraining.model.hf import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    config_document,
    generation_document,
    parameter_shapes,
)

# Beside tokenizer.json and tokenizer_config.json, what a tokenizer's folder may hold and AutoTokenizer reads.
_MORE_TOKENIZER_FILES = (
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)


def export(config: ExportConfig, note: Callable[[str], None] = print) -> None:
    """Write a checkpoint as `config` says.

    Args:
        config: the settings.
        note: told what was written.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or nothing can be written.
        ConfigError, DataError: the settings or the tokenizer cannot be used.
    """
    max_bytes = config.max_shard_bytes
    checkpoint = named_checkpoint(config.ckpt_load_path)
    for damaged in checkpoint.passed_over:
        note(f"{damaged}: passed over")
    tensors = open_tensors(checkpoint)
    if config.format == "full":
        _export_full(config, checkpoint, tensors, note)
    else:
        _export_hf(config, checkpoint, tensors, max_bytes, note)


def _export_hf(
    config: ExportConfig, checkpoint: Restorable, tensors: TensorSource, max_bytes: int, note: Callable[[str], None]
) -> None:
    shape = shape_of(checkpoint.manifest)
    settings = settings_in(checkpoint.manifest.config, f"config of {checkpoint.path}")
    tokenizer, tokenizer_path, told = _find_tokenizer(config, settings, shape)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    kinds = {name: (dtype, tuple(size)) for name, size in parameter_shapes(shape).items()}
    check_complete(checkpoint, tensors, kinds)
    files = plan_files(kinds, max_bytes)
    bos = settings.data.bos_token
    eos = settings.data.sep_token if settings.data.sep_token is not None or tokenizer is None else tokenizer.end_of_text
    output = Path(config.output_path)
    total = sum(bytes_of(*kind) for kind in kinds.values())
    with written_aside(output, "--output_path", total) as folder:
        for name, content in files.items():
            write_weights(folder / name, content, (tensors.read(each).to(dtype) for each in content))
        if len(files) > 1:
            write_json(folder / INDEX_FILE, index_document(files))
        write_json(folder / CONFIG_FILE, config_document(shape, config.dtype, settings.data.seq_length, bos, eos))
        write_json(folder / GENERATION_CONFIG_FILE, generation_document(bos, eos))
        if tokenizer is not None and tokenizer_path is not None:
            _write_tokenizer(tokenizer, tokenizer_path, folder)
    note(f"{output}: step {checkpoint.manifest.step} of {checkpoint.path}, {config.dtype}, {total / 1e9:.2f} GB")
    note(f"  weights    {len(files)} safetensors file{'s' if len(files) > 1 else ''}")
    note(f"  tokenizer  {told}")
    note(f"  load it    AutoModelForCausalLM.from_pretrained({str(output)!r})")


def _export_full(
    config: ExportConfig, checkpoint: Restorable, tensors: TensorSource, note: Callable[[str], None]
) -> None:
    expected = parameter_shapes(shape_of(checkpoint.manifest))
    check_complete(checkpoint, tensors, {name: (torch.float32, tuple(size)) for name, size in expected.items()})
    kinds = _in_model_order(tensors, list(expected))
    output = Path(config.output_path)
    total = sum(bytes_of(*kind) for kind in kinds.values())
    with written_aside(output, "--output_path", total) as folder:
        write_full(folder, kinds, _read_all(tensors, in_order(kinds)), checkpoint.manifest)
        files = {name: checksum_file(folder / name) for name in FULL_FILES}
        write_json(folder / MANIFEST, replace(checkpoint.manifest, files=files).document())
    note(f"{output}: step {checkpoint.manifest.step} of {checkpoint.path}, {total / 1e9:.2f} GB")
    note("  files      " + ", ".join(FULL_FILES))
    note(f"  go on      pretrain train --ckpt_load_path={output} …")


def check_complete(checkpoint: Restorable, tensors: TensorSource, kinds: Kinds) -> None:
    """Refuse a checkpoint without all parameters of its model.

    Raises:
        CheckpointError: names the first that is missing or has another shape.
    """
    shapes = tensors.shapes()
    for name, (_, shape) in kinds.items():
        if shapes.get(name) != shape:
            held = f"has the shape {shapes[name]}, not" if name in shapes else "is missing; its shape is"
            raise CheckpointError(f"{checkpoint.path} is damaged: {name} {held} {shape}")


def _in_model_order(tensors: TensorSource, names: list[str]) -> Kinds:
    """All tensors of a checkpoint, those of a parameter in the order of the parameters."""
    place = {name: number for number, name in enumerate(names)}

    def key(name: str) -> tuple[int, str]:
        return place.get(name, place.get(name.split(".", 2)[-1], len(place))), name

    shapes = tensors.shapes()
    return {name: (tensors.dtype(name), shapes[name]) for name in sorted(shapes, key=key)}


def _read_all(tensors: TensorSource, names: list[str]) -> Iterator[torch.Tensor]:
    for name in names:
        yield tensors.read(name)


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
    return tokenizer, Path(named).expanduser(), str(named)


def _write_tokenizer(tokenizer: Tokenizer, path: Path, folder: Path) -> None:
    tokenizer.save(folder)
    source = path if path.is_dir() else path.parent
    for name in _MORE_TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
