"""Hugging Face folder of a Llama, read without trust: it may come from anywhere.

    config.json                                                  -> LlamaShape, or an error
    model.safetensors | model.safetensors.index.json + its files -> exactly the tensors of that shape
    config.json, generation_config.json, README.md               -> origin: what exports of the run keep

Only JSON and safetensors files of the folder, and README.md, are opened. An index that points elsewhere, and pickled
weights, are refused. The files are those that transformers reads; a line names other files of weights in the folder.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from pretraining.checkpoint.completeness import first_faults, tensor_faults
from pretraining.checkpoint.headers import StoredTensors, read_headers
from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.reader import read_tensor
from pretraining.checkpoint.stored_files import read_json_of
from pretraining.config.settings_files import read_yaml
from pretraining.config.variants import LlamaShape
from pretraining.errors import CheckpointError
from pretraining.files import (
    check_inside,
    entries_of,
    exists,
    is_folder,
    read_file,
    read_json,
    read_object,
    write_atomic,
)
from pretraining.model.hf import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    INNER_MODEL,
    ORIGIN_FILE,
    WEIGHTS_FILE,
    kept_entries,
    shape_of_document,
    token_ids,
)
from pretraining.text import list_some

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ADAPTER_FILE = "adapter_config.json"
_WORD = re.compile(r"[\w.-]+")
_WEIGHTS = ("*.safetensors", "*_model*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")


def open_folder(path: Path) -> tuple[LlamaShape, StoredTensors]:
    """Find a folder's weights, and check names and shapes of its tensors; only headers of files are read.

    Raises:
        CheckpointError: the model is no Llama that can be trained here; a file is outside the folder, missing or
            damaged; a tensor is missing, surplus or of another shape.
    """
    if not exists(path / CONFIG_FILE):
        raise CheckpointError(f"is missing{describe_other_weights(path)}", path=path / CONFIG_FILE)
    check_inside(path, GENERATION_CONFIG_FILE, CheckpointError)  # an export would publish another file's entries
    shape = shape_of_document(read_json_of(path, CONFIG_FILE), str(path / CONFIG_FILE))
    files = _weight_files(path)
    weights = read_headers(path, files)
    if "embed_tokens.weight" in weights.chunks:
        raise CheckpointError(f"holds {INNER_MODEL}", path=path)
    _check_head(path, shape, weights)
    _log_unread(path, tuple(files))
    if faults := tensor_faults(weights, Manifest(model=asdict(shape))):
        raise CheckpointError(f"does not hold the tensors of its {CONFIG_FILE}: {first_faults(faults)}", path=path)
    return shape, weights


def _check_head(path: Path, shape: LlamaShape, weights: StoredTensors) -> None:
    """Raise a CheckpointError if a head is stored beside the embedding that should be the head, and differs."""
    if not shape.tie_word_embeddings or not {HEAD, EMBEDDING} <= weights.chunks.keys():
        return
    with torch.device("cpu"):  # callers build models on the meta device
        head, embedding = read_tensor(weights, HEAD), read_tensor(weights, EMBEDDING)
    if head.shape != embedding.shape or not torch.equal(head.float(), embedding.float()):
        raise CheckpointError(
            f"stores a head that differs from the embedding, but its {CONFIG_FILE} ties them: set tie_word_embeddings "
            "to false there to use this head, as transformers does, or remove the head",
            path=path,
        )


@cache
def _log_unread(path: Path, files: tuple[str, ...]) -> None:
    """Log the files of weights in a folder that are not read, once per process."""
    others = [name for name in _weights_in(path) if name not in files]
    if others:
        log.info("%s: the weights are those of %s; not read: %s", path, list_some(files, 3), list_some(others, 3))


def _weights_in(path: Path) -> list[str]:
    """Return the names of the files in a folder that hold weights of some form."""
    names = [entry.name for entry in entries_of(path)] if is_folder(path) else []
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in _WEIGHTS))


def describe_other_weights(path: Path) -> str:
    """Return which weights of other forms a folder holds, and the remedy, as the end of a message; empty if none."""
    has_weights = exists(path / WEIGHTS_FILE) or exists(path / INDEX_FILE)
    names = [] if has_weights else _weights_in(path)
    if not names:
        return ""
    return (
        f": {list_some(names, 3)} cannot be read. Fetch the files for transformers, with their index, or load these "
        "with it (a pickle may run any program), merge an adapter (merge_and_unload), and save_pretrained"
    )


def manifest_of_folder(path: Path) -> Manifest:
    """Return the manifest of a checkpoint of step 0 with this folder's weights alone; raises as `open_folder`."""
    shape, weights = open_folder(path)
    return Manifest(model=asdict(shape), files=dict.fromkeys(weights.headers))


def _weight_files(path: Path) -> list[str]:
    """Return the names of the files with a folder's weights; raise a CheckpointError if one is not in the folder."""
    if exists(path / WEIGHTS_FILE):
        names = [WEIGHTS_FILE]
    elif exists(path / INDEX_FILE):
        try:
            names = sorted(set(read_json_of(path, INDEX_FILE)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError):
            names = []
        if not names or not all(map(_is_weight_file, names)):
            raise CheckpointError("has no weight_map from tensors to safetensors files here", path=path / INDEX_FILE)
    else:
        remedy = describe_other_weights(path) or ": fetch the model's safetensors files"
        raise CheckpointError(f"has no {WEIGHTS_FILE} or {INDEX_FILE}{remedy}", path=path)
    if exists(path / ADAPTER_FILE):
        raise CheckpointError(
            f"has an adapter of PEFT ({ADAPTER_FILE}), which transformers would apply to another folder's weights: "
            "merge it (merge_and_unload, save_pretrained), or remove it to train from these weights without it",
            path=path,
        )
    for name in names:
        check_inside(path, name, CheckpointError)
    return names


def _is_weight_file(name: object) -> bool:
    """Return whether an index names a safetensors file of its own folder."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name and name.endswith(".safetensors")


# Origin of a run


def origin_of(path: Path, name: str) -> dict[str, Any]:
    """Return what exports keep of a model; None = not known.

    Args:
        path: folder of the model.
        name: path or Hub name that the user gave.

    Returns:
        bos_token_id and eos_token_id of config.json, license of README.md, base_model, the name on the Hub, and the
        entries to keep of both files.
    """
    config, generation = read_json_of(path, CONFIG_FILE), read_object(path / GENERATION_CONFIG_FILE)
    if not generation and exists(path / GENERATION_CONFIG_FILE):
        log.warning("exports do not keep %s: it is empty or no JSON object", path / GENERATION_CONFIG_FILE)
    return {
        **{name: token_ids(config).get(name) for name in ("bos_token_id", "eos_token_id")},
        "license": _license_of(path / "README.md"),
        "base_model": None if exists(Path(name).expanduser()) else name,
        "config": kept_entries(config),
        "generation_config": kept_entries(generation),
    }


def record_origin(run: Path, path: Path | None, name: str) -> None:
    """Write what exports of a new run keep of the model that it starts from, in place of an earlier record.

    Args:
        path: Hugging Face folder, or checkpoint of a run that may have such a record; None = initial weights.
        name: path or Hub name that the user gave.
    """
    origin = {} if path is None else origin_of(path, name) if exists(path / CONFIG_FILE) else read_origin(path)
    if origin:
        write_atomic(run / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
    else:
        (run / ORIGIN_FILE).unlink(missing_ok=True)


def origin_file(checkpoint: Path) -> Path | None:
    """Return the record of the model that the run of a checkpoint began with, if there is one."""
    # An export has it itself; a run may have set the checkpoint aside.
    places = (checkpoint, *checkpoint.absolute().parents[1:3])
    return next((place / ORIGIN_FILE for place in places if exists(place / ORIGIN_FILE)), None)


def read_origin(checkpoint: Path) -> dict[str, Any]:
    """Return what exports keep of the model that the run of a checkpoint began with; empty if nothing."""
    path = origin_file(checkpoint)
    if path is None:
        return {}
    try:
        origin = dict(read_json(path))
        kept = {part: kept_entries(dict(origin.get(part) or {})) for part in ("config", "generation_config")}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot be read ({error}). Delete it to continue without it", path=path) from error
    return {**origin, **kept}


def _license_of(card: Path) -> str | None:
    try:
        _, header, _ = read_file(card).decode().split("---\n", 2)
        name = read_yaml(header).get("license")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None  # no card, or no valid header
    return name if isinstance(name, str) and _WORD.fullmatch(name) else None
