"""Hugging Face folder of a Llama, read without trust: it may come from anywhere.

    config.json                                                  -> LlamaShape, or an error
    model.safetensors | model.safetensors.index.json + its files -> exactly the tensors of that shape

Only JSON and safetensors files of the folder are opened. An index that points elsewhere, and pickled weights, are
refused.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretraining.checkpoint.completeness import first_faults, tensor_faults
from pretraining.checkpoint.headers import StoredTensors, read_headers
from pretraining.checkpoint.manifest import Manifest
from pretraining.config.variants import LlamaShape
from pretraining.errors import CheckpointError
from pretraining.files import exists, read_json, real_path
from pretraining.model.hf import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, shape_of_document


def open_folder(path: Path) -> tuple[LlamaShape, StoredTensors]:
    """Find a folder's weights, and check names and shapes of its tensors; only headers of files are read.

    Raises:
        CheckpointError: the model is no Llama that can be trained here; a file is outside the folder, missing or
            damaged; a tensor is missing, surplus or of another shape.
    """
    shape = shape_of_document(read_json_of(path, CONFIG_FILE), str(path / CONFIG_FILE))
    weights = read_headers(path, weight_files(path))
    if faults := tensor_faults(weights, Manifest(model=asdict(shape))):
        raise CheckpointError(f"does not hold the tensors of its {CONFIG_FILE}: {first_faults(faults)}", path=path)
    return shape, weights


def manifest_of_folder(path: Path) -> Manifest:
    """Return the manifest of a checkpoint of step 0 with this folder's weights alone; raises as `open_folder`."""
    return Manifest(model=asdict(open_folder(path)[0]))


def weight_files(path: Path) -> list[str]:
    """Return the names of the files with a folder's weights; raise a CheckpointError if one is not in the folder."""
    if exists(path / WEIGHTS_FILE):
        names = [WEIGHTS_FILE]
    elif exists(path / INDEX_FILE):
        try:
            names = sorted(set(read_json_of(path, INDEX_FILE)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError):
            names = []
        if not names or not all(isinstance(name, str) for name in names):
            raise CheckpointError("has no weight_map from tensors to files", path=path / INDEX_FILE)
    else:
        raise CheckpointError(
            f"has no {WEIGHTS_FILE} or {INDEX_FILE}: fetch the model's safetensors files. Pickled weights (.bin, .pt, "
            ".pth) are refused, since they may run any program",
            path=path,
        )
    for name in names:
        _check_inside(path, name)
    return names


def _check_inside(path: Path, name: str) -> None:
    if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
        raise CheckpointError(f"names {name!r}: only safetensors files of this folder are read", path=path / INDEX_FILE)
    folder, real = real_path(path), real_path(path / name)
    # The cache of Hugging Face keeps the files of all revisions in one folder, with links to them.
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(f"leads out of its folder, to {real}. Put the file itself there", path=path / name)


def read_json_of(path: Path, name: str) -> Any:
    """Read a JSON file of a folder; raise a CheckpointError if it cannot be read."""
    try:
        return read_json(path / name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read as JSON: {error}", path=path / name) from None
