"""Evaluation sets of their own files: one set per folder or file of `--eval_datasets`.

    --eval_datasets=<folders>  --`find_evaluation_folders`-->  a name and token files for each

A set uses the data settings of training and all its documents. It must not overlap the training data, unless a finished
checkpoint is evaluated (`--eval_only`).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import DatasetFiles, list_datasets
from pretraining.errors import ConfigError, DataError
from pretraining.files import Location, exists
from pretraining.object_store import StorePath, location, text_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationFolder:
    """A folder of `--eval_datasets`.

    Attributes:
        name: the last parts of its path, as few as identify the set.
        config: data settings of training, for this folder alone.
    """

    name: str
    config: DataConfig
    files: DatasetFiles


def find_evaluation_folders(
    folders: Sequence[str], config: DataConfig, training: Collection[DatasetFiles], *, may_overlap: bool = False
) -> list[EvaluationFolder]:
    """List the token files of evaluation folders.

    Args:
        folders: paths, as the user gave them.
        config: settings of the training data.
        training: training datasets, whose names the held-out sets use.
        may_overlap: whether a folder may overlap the training data; a log line then says so.

    Raises:
        ConfigError: a folder is named twice.
        DataError: a folder is missing, has no token files, or overlaps the training data.
    """
    paths = [location(folder).absolute() for folder in folders]
    real = [_real(path) for path in paths]
    for place, times in Counter(real).items():
        if times > 1:
            raise ConfigError(f"--eval_datasets names {place} {times} times: give it once")
    for path, resolved in zip(paths, real, strict=True):
        if not exists(path):
            raise DataError("does not exist: see --eval_datasets", path=path)
        _check_no_overlap(path, resolved, training, may_overlap)
    taken = {files.name for files in training}
    return [_list_folder(_unique_name(path, paths, taken), path, config) for path in paths]


def _real(path: Location) -> PurePosixPath:
    """Return a path with links resolved, or the identity of a place in a store, for comparisons."""
    return PurePosixPath(path.identity if isinstance(path, StorePath) else os.path.realpath(str(path)))


def _check_no_overlap(
    path: Location, resolved: PurePosixPath, training: Collection[DatasetFiles], may_overlap: bool
) -> None:
    for files in training:
        folder = _real(files.place(0) if files.is_file else files.root)
        if resolved == folder or resolved in folder.parents or folder in resolved.parents:
            if may_overlap:
                log.info("evaluation set %s overlaps the training dataset '%s'", path, files.name)
                continue
            raise DataError(
                f"this evaluation set overlaps the training dataset '{files.name}' in {files.folder}. Evaluate on "
                "another folder, or on a share of the training data (--held_out_fraction)",
                path=path,
            )


def _unique_name(path: Location, paths: Sequence[Location], taken: Collection[str]) -> str:
    """Return the last parts of a path, as few as no other path and no training dataset has."""
    for parts in range(1, len(path.parts)):
        name = "/".join(path.parts[-parts:])
        if name not in taken and sum(other.parts[-parts:] == path.parts[-parts:] for other in paths) == 1:
            return name
    return str(path)


def _list_folder(name: str, path: Location, config: DataConfig) -> EvaluationFolder:
    alone = replace(
        config,
        data_path=text_of(path.parent),
        datasets=(path.name,),
        weights=(),
        held_out_fraction=0.0,
        skip_samples=(),
        use_dummy_dataset=False,
    )
    (files,) = list_datasets(alone)
    return EvaluationFolder(name, alone, files)
