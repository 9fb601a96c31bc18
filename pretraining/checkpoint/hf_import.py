"""A folder with a Llama as Hugging Face keeps it, read with suspicion: it may come from anywhere.

    config.json                                                 -> LlamaShape, or what stands against it
    model.safetensors | model.safetensors.index.json + its files -> exactly the tensors of that shape

Only files of the folder are opened, and only JSON and safetensors: an index that points elsewhere and weights that
would have to be unpickled are refused.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from pretraining.checkpoint.completeness import first_faults, tensor_faults
from pretraining.checkpoint.headers import StoredTensors, read_headers
from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.reader import read_tensor
from pretraining.config.settings_files import read_yaml
from pretraining.config.variants import LlamaShape
from pretraining.errors import CheckpointError
from pretraining.files import exists, read_file, read_json, real_path
from pretraining.model.hf import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, shape_of_document

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IN_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
"""Where Hugging Face's cache keeps a model of the Hub."""
_WORD = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A Llama in a folder; its weights have the names and shapes of `shape`'s parameters."""

    path: Path
    shape: LlamaShape
    weights: StoredTensors


def open_folder(path: Path) -> HuggingFaceFolder:
    """Find a folder's weights; of their files only the headers are read.

    Raises:
        CheckpointError: this is no Llama that can be trained here; a file leaves the folder, is missing or damaged; a
            tensor is missing, surplus or of another shape.
    """
    shape = shape_of_document(_read_json(path, CONFIG_FILE), str(path / CONFIG_FILE))
    weights = read_headers(path, weight_files(path))
    for name in [name for name in weights.chunks if name.endswith("rotary_emb.inv_freq")]:
        del weights.chunks[name]  # older conversions keep what is computed here
    if shape.tie_word_embeddings and _HEAD in weights.chunks:
        _check_tied(path, weights)
        del weights.chunks[_HEAD]
    if faults := tensor_faults(weights, Manifest(model=asdict(shape))):
        raise CheckpointError(f"does not hold the tensors of its {CONFIG_FILE}: {first_faults(faults)}", path=path)
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
    """Describe a folder as a checkpoint of step 0 with weights alone; raises as `open_folder`."""
    return Manifest(model=asdict(open_folder(path).shape))


def weight_files(path: Path) -> list[str]:
    """Return the names of the files that hold a folder's weights; a CheckpointError unless all are files in it."""
    if exists(path / WEIGHTS_FILE):
        names = [WEIGHTS_FILE]
    elif exists(path / INDEX_FILE):
        try:
            names = sorted(set(_read_json(path, INDEX_FILE)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError):
            names = []
        if not names or not all(isinstance(name, str) for name in names):
            raise CheckpointError("has no weight_map from tensors to files", path=path / INDEX_FILE)
    else:
        raise CheckpointError(
            f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}, and weights in other files (.bin, .pt, .pth) are refused: "
            "reading a pickle may run any program. Fetch the model's safetensors files",
            path=path,
        )
    for name in names:
        _check_inside(path, name)
    return names


def _check_inside(path: Path, name: str) -> None:
    if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
        raise CheckpointError(f"names {name!r}: only safetensors files of this folder are read", path=path / INDEX_FILE)
    folder, real = real_path(path), real_path(path / name)
    # Hugging Face's own cache keeps files of all revisions in one place, and links to them.
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(f"leads out of its folder, to {real}. Put the file itself there", path=path / name)
    if not exists(real):
        raise CheckpointError("missing. Fetch the model again", path=path / name)


def _check_tied(path: Path, weights: StoredTensors) -> None:
    """Raise a CheckpointError unless a head that is kept although it is tied is the embedding."""
    is_same_size = weights.shape(_HEAD) == weights.shape(_EMBEDDING)
    if not is_same_size or not torch.equal(read_tensor(weights, _HEAD), read_tensor(weights, _EMBEDDING)):
        raise CheckpointError(
            f"its {_HEAD} is not the embedding, but {CONFIG_FILE} says tie_word_embeddings: set that to false there",
            path=path,
        )


def _read_json(path: Path, name: str) -> Any:
    try:
        return read_json(path / name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read as JSON: {error}", path=path / name) from None
