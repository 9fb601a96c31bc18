"""Forms of a checkpoint: the folders that hold one, and who reads what is in them.

- manifest.json: a checkpoint that a run saved, sharded or full: the manifest names all files
- iter_state_dict.pt: the four .pt files of a full checkpoint, without a manifest (`pt_files`)
- config.json: a Hugging Face folder with weights alone (`hf_import`)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from pretraining.checkpoint.manifest import FULL_FILES, ITERATION_FILE, MANIFEST, SHARD_SUFFIX, Manifest
from pretraining.checkpoint.stored_files import read_json_of, size_fault
from pretraining.errors import CheckpointError
from pretraining.files import is_file
from pretraining.model.hf import CONFIG_FILE


def _read_saved(folder: Path) -> Manifest:
    return Manifest.parse(read_json_of(folder, MANIFEST), str(folder / MANIFEST))


def _read_pt(folder: Path) -> Manifest:
    from pretraining.checkpoint.pt_files import manifest_of_files  # imports torch, which takes a second

    return manifest_of_files(folder)


def _read_hugging_face(folder: Path) -> Manifest:
    from pretraining.checkpoint.hf_import import manifest_of_folder  # imports torch

    return manifest_of_folder(folder)


FORMS = {MANIFEST: _read_saved, ITERATION_FILE: _read_pt, CONFIG_FILE: _read_hugging_face}
"""Readers of manifests, by a file that each folder of the form has; the first one counts."""


def form_of(folder: Path) -> str | None:
    """Return the form of the checkpoint in a folder, by its file; None if it is none, or has lost its manifest."""
    return next((marker for marker in FORMS if is_file(folder / marker)), None)


def read_document(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint of any form, without looking at files that a saved manifest names.

    Raises:
        CheckpointError: the checkpoint is damaged, or of an unknown form.
    """
    form = form_of(folder)
    if form is None:
        raise CheckpointError(f"damaged: its {MANIFEST} is missing", path=folder)
    return FORMS[form](folder)


def read_if_good(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint as `read_document` does; None if it is damaged or missing."""
    with suppress(CheckpointError):
        return read_document(folder)
    return None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check names and sizes of its files; their content is not read.

    Raises:
        CheckpointError: as in `read_document`; or a file is missing or of another size.
    """
    manifest = read_document(folder)
    sizes = (size_fault(folder / name, entry) for name, entry in manifest.recorded_files.items())
    fault = next(chain(misnamed_files(folder, manifest), filter(None, sizes)), None)
    if fault is not None:
        raise CheckpointError(fault)
    return manifest


def misnamed_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a message for each name in a manifest that is no tensor file of the folder; other files may be there."""
    for name in manifest.recorded_files:
        if Path(name).name != name or not (name.endswith(SHARD_SUFFIX) or name in FULL_FILES):
            yield f"{folder / MANIFEST} names {name!r}, which is no tensor file of this folder"
