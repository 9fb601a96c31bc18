"""A folder with a Llama as Hugging Face keeps it, read with suspicion: it may come from anywhere.

    config.json                                                 -> LlamaShape, or what stands against it
    model.safetensors | model.safetensors.index.json + its files -> exactly the tensors of that shape

Only files of the folder are opened, and only JSON and safetensors: an index that points elsewhere and weights that
would have to be unpickled are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.reader import TensorFiles
from pretraining.checkpoint.writer import Chunk
from pretraining.config.settings_files import read_yaml
from pretraining.config.variants import LlamaShape
from pretraining.errors import CheckpointError
from pretraining.files import exists, read_file, read_json
from pretraining.model.hf import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, parameter_shapes, shape_of_document
from pretraining.text import list_some

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMES_SHOWN = 5
_IN_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
"""Where Hugging Face's cache keeps a model of the Hub."""
_WORD = re.compile(r"[\w.-]+")
_ROWS_COMPARED = 4096


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A Llama in a folder; its weights have the names and shapes of `shape`'s parameters."""

    path: Path
    shape: LlamaShape
    weights: TensorFiles


def open_folder(path: Path) -> HuggingFaceFolder:
    """Finds a folder's weights; of their files only the headers are read.

    Raises:
        CheckpointError: this is no Llama that can be trained here; a file leaves the folder, is missing or damaged; a
            tensor is missing, surplus or of another shape.
    """
    shape = shape_of_document(_read_json(path, CONFIG_FILE), str(path / CONFIG_FILE))
    weights = TensorFiles(path, dict.fromkeys(weight_files(path)))
    _check_tensors(path, shape, weights)
    return HuggingFaceFolder(path, shape, weights)


def origin_of(path: Path, name: str) -> dict[str, Any]:
    """Return what exports of a model keep of the folder it came from; None = not known.

    Args:
        name: as the user named the model.

    Returns:
        bos_token_id and eos_token_id of config.json, license of the README.md, and base_model, its name on the Hub.
    """
    config = _read_json(path, CONFIG_FILE)
    tokens = {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}
    tokens = {key: ids if _are_token_ids(ids) else None for key, ids in tokens.items()}
    cached = _IN_CACHE.search(str(path))
    base = f"{cached[1]}/{cached[2]}" if cached else None if exists(Path(name).expanduser()) else name
    return {**tokens, "license": _license_of(path / "README.md"), "base_model": base}


def _are_token_ids(ids: Any) -> bool:
    """Return whether an entry is a token id, or a list of some, as ends of a text may be."""
    several = ids if isinstance(ids, list) else [ids]
    return len(several) > 0 and all(type(each) is int and each >= 0 for each in several)


def _license_of(card: Path) -> str | None:
    """Return the license in the header of a model card."""
    try:
        _, header, _ = read_file(card).decode().split("---\n", 2)
        found = read_yaml(header).get("license")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None  # a text for people, or none
    return found if isinstance(found, str) and _WORD.fullmatch(found) else None


def manifest_of_folder(path: Path) -> Manifest:
    """Describes a folder as a checkpoint of step 0 with weights alone; raises as `open_folder`."""
    return Manifest(model=asdict(open_folder(path).shape))


def weight_files(path: Path) -> list[str]:
    """Names of the files that hold a folder's weights; a CheckpointError for pickles and files that lie elsewhere."""
    if exists(path / WEIGHTS_FILE):
        names = [WEIGHTS_FILE]
    elif exists(path / INDEX_FILE):
        index = _read_json(path, INDEX_FILE)
        places = index.get("weight_map") if isinstance(index, Mapping) else None
        if not isinstance(places, Mapping) or not places or not all(isinstance(name, str) for name in places.values()):
            raise CheckpointError("has no weight_map from tensors to files", path=path / INDEX_FILE)
        names = sorted(set(places.values()))
    else:
        raise CheckpointError(_no_weights(path), path=path)
    for name in names:
        _check_inside(path, name)
    return names


def _check_inside(path: Path, name: str) -> None:
    if not name or Path(name).name != name or "\\" in name or "\0" in name:
        raise CheckpointError(f"names {name!r}, which is no file of this folder: it is refused", path=path / INDEX_FILE)
    if not name.endswith(".safetensors"):
        raise CheckpointError(f"names {name!r}: only safetensors files are read", path=path / INDEX_FILE)
    file = path / name
    folder, real = (Path(os.path.realpath(each)) for each in (path, file))  # `resolve` fails at a link to itself
    # Hugging Face's own cache keeps files of all revisions in one place, and links to them.
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"leads out of its folder, to {real}: it is refused. Put the file itself there", path=file
        )
    if not exists(real):
        raise CheckpointError("missing. Fetch the model again", path=file)


def _no_weights(path: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if not pickles:
        return f"has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there"
    return (
        f"has its weights in {pickles[0]}, a pickle, which may run any program when it is read: it is refused. "
        "Fetch the model's safetensors files, or convert it where you trust it: "
        f"AutoModelForCausalLM.from_pretrained('{path}').save_pretrained('…')"
    )


def _check_tensors(path: Path, shape: LlamaShape, weights: TensorFiles) -> None:
    expected, found = parameter_shapes(shape), weights.shapes()
    # Older conversions keep the rotary frequencies, which are computed here.
    surplus = sorted(name for name in found.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq"))
    if surplus == [_HEAD] and shape.tie_word_embeddings:
        _check_tied(path, weights)
        surplus = []
    wrong = [
        f"{name} has the shape {list(found[name])}, not {list(size)}"
        for name, size in expected.items()
        if name in found and found[name] != tuple(size)
    ]
    dtypes = {name: chunks[0].dtype for name, chunks in weights.chunks.items()}
    strange = sorted(name for name in expected.keys() & found.keys() if dtypes[name] not in _FLOATS)
    problems = {
        "missing": [name for name in expected if name not in found],
        "not of a Llama": surplus,
        "of another shape": wrong,
        "in two files": sorted(name for name, chunks in weights.chunks.items() if len(chunks) > 1),
        "no floating-point numbers": [f"{name} ({dtypes[name]})" for name in strange],
    }
    said = [f"{len(names)} {what}: {list_some(names, _NAMES_SHOWN)}" for what, names in problems.items() if names]
    if said:
        raise CheckpointError(f"does not hold the tensors of its {CONFIG_FILE}; {'; '.join(said)}", path=path)


def _check_tied(path: Path, weights: TensorFiles) -> None:
    """A head that is kept although it is tied must be the embedding."""
    size = weights.shapes()[_HEAD]
    same = size == weights.shapes().get(_EMBEDDING)
    for first in range(0, size[0] if same else 0, _ROWS_COMPARED):
        rows = Chunk((first, *(0 for _ in size[1:])), (min(_ROWS_COMPARED, size[0] - first), *size[1:]))
        same = same and torch.equal(weights.read(_HEAD, rows), weights.read(_EMBEDDING, rows))
    if not same:
        raise CheckpointError(
            f"its {_HEAD} is not the embedding, but {CONFIG_FILE} says tie_word_embeddings: set that to false there",
            path=path,
        )


def _read_json(path: Path, name: str) -> Any:
    try:
        return read_json(path / name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read as JSON: {error}", path=path / name) from None
