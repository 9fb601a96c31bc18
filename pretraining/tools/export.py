"""A checkpoint in a form that other programs read: `pretrain export`.

    checkpoint, sharded or full -> a tensor at a time, put together -> hf    config.json, safetensors, tokenizer
                                                                    -> full  four .pt files and a manifest

One process, no GPU, the memory of one tensor. The folder is written aside and renamed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.listing import MANIFEST
from pretraining.checkpoint.pt_files import FULL_FILES, Kinds, in_order, write_full
from pretraining.checkpoint.sources import TensorSource
from pretraining.checkpoint.start_point import CheckpointRef, named_checkpoint, open_tensors
from pretraining.checkpoint.state import FileEntry, crc32_text, shape_of
from pretraining.checkpoint.tensor_files import checksum_file
from pretraining.config.commands import ExportConfig
from pretraining.config.recipes import settings_in
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.errors import CheckpointError, ConfigError, DataError
from pretraining.files import atomic_folder, write_json
from pretraining.model.hf import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
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
    config: ExportConfig, checkpoint: CheckpointRef, tensors: TensorSource, max_bytes: int, note: Callable[[str], None]
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
    with atomic_folder(output, "--output_path", total) as folder:
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
    config: ExportConfig, checkpoint: CheckpointRef, tensors: TensorSource, note: Callable[[str], None]
) -> None:
    expected = parameter_shapes(shape_of(checkpoint.manifest))
    check_complete(checkpoint, tensors, {name: (torch.float32, tuple(size)) for name, size in expected.items()})
    kinds = _in_model_order(tensors, list(expected))
    output = Path(config.output_path)
    total = sum(bytes_of(*kind) for kind in kinds.values())
    with atomic_folder(output, "--output_path", total) as folder:
        write_full(folder, kinds, _read_all(tensors, in_order(kinds)), checkpoint.manifest)
        files = {name: checksum_file(folder / name) for name in FULL_FILES}
        write_json(folder / MANIFEST, replace(checkpoint.manifest, files=files).document())
    note(f"{output}: step {checkpoint.manifest.step} of {checkpoint.path}, {total / 1e9:.2f} GB")
    note("  files      " + ", ".join(FULL_FILES))
    note(f"  go on      pretrain train --ckpt_load_path={output} …")


def check_complete(checkpoint: CheckpointRef, tensors: TensorSource, kinds: Kinds) -> None:
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


# TODO(merge): was pretraining.tools.export
# Weights as Hugging Face keeps them: safetensors files of a bounded size, and an index that says what is where.
#
# names in the model's order -> `plan_files`: filled one after the other -> `write_weights`: a tensor at a time

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def plan_files(kinds: Kinds, max_bytes: int) -> dict[str, Kinds]:
    """What goes into which file, by name; a tensor larger than a file may be has one of its own."""
    files: list[dict[str, Any]] = [{}]
    used = 0
    for name, kind in kinds.items():
        size = bytes_of(*kind)
        if files[-1] and used + size > max_bytes:
            files.append({})
            used = 0
        files[-1][name] = kind
        used += size
    if len(files) == 1:
        return {WEIGHTS_FILE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": content for number, content in enumerate(files, start=1)
    }


def index_document(files: dict[str, Kinds]) -> dict[str, Any]:
    """The index of several files."""
    kinds = [kind for content in files.values() for kind in content.values()]
    return {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape in kinds),
            "total_size": sum(bytes_of(*kind) for kind in kinds),
        },
        "weight_map": {name: file for file, content in files.items() for name in content},
    }


def write_weights(path: Path, kinds: Kinds, values: Iterable[torch.Tensor]) -> FileEntry:
    """Write a file, flushed to disk.

    Args:
        path: of the file.
        kinds: type and shape of its tensors.
        values: the tensors in the same order, on the CPU; one is held at a time.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + bytes_of(dtype, shape)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    start = len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        size, checksum = file.write(start), zlib.crc32(start)
        for (dtype, shape), value in zip(kinds.values(), values, strict=True):
            assert value.dtype == dtype and tuple(value.shape) == tuple(shape)
            content = value.contiguous().view(-1).view(torch.uint8).numpy().data
            size, checksum = size + file.write(content), zlib.crc32(content, checksum)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, crc32_text(checksum))


def bytes_of(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Size of a tensor."""
    return math.prod(shape) * dtype.itemsize
