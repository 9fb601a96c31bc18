"""The folders or files that a run is evaluated on besides its held-out documents: each is a set of its own.

    --eval_datasets=<folders>  --`find_evaluation_folders`-->  a name and token files for each

They are read with the settings of the training data, all of their documents, and must share no file with it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import DatasetFiles, list_datasets
from pretraining.errors import ConfigError, DataError
from pretraining.files import exists


@dataclass(frozen=True)
class EvaluationFolder:
    """A folder of `--eval_datasets`.

    Attributes:
        name: as many of the last parts of its path as tell it from other sets.
        config: the settings of the training data, for this folder alone.
        files: its token files.
    """

    name: str
    config: DataConfig
    files: DatasetFiles


def find_evaluation_folders(
    folders: Sequence[str], config: DataConfig, training: Collection[DatasetFiles]
) -> list[EvaluationFolder]:
    """List the token files of evaluation folders.

    Args:
        folders: paths, as they were given.
        config: of the training data.
        training: its datasets; their names are those of the held-out sets.

    Raises:
        ConfigError: a folder is named twice.
        DataError: a folder is missing, holds no token files, or lies in the training data or around it.
    """
    paths = [Path(folder).expanduser().absolute() for folder in folders]
    real = [Path(os.path.realpath(path)) for path in paths]
    for path, times in Counter(real).items():
        if times > 1:
            raise ConfigError(f"--eval_datasets names {path} {times} times: give it once")
    for path, resolved in zip(paths, real, strict=True):
        if not exists(path):
            raise DataError("--eval_datasets names it, and it is not there", path=path)
        _check_apart(path, resolved, training)
    taken = {files.name for files in training}
    return [_list_folder(_name_of(path, paths, taken), path, config) for path in paths]


def _check_apart(path: Path, resolved: Path, training: Collection[DatasetFiles]) -> None:
    for files in training:
        folder = Path(os.path.realpath(files.path(0) if files.is_file else files.folder))
        if resolved == folder or resolved in folder.parents or folder in resolved.parents:
            raise DataError(
                f"this evaluation set overlaps the training data: dataset '{files.name}' is {folder}. Evaluate on "
                "another folder, or on a share of the training data (--held_out_fraction)",
                path=path,
            )


def _name_of(path: Path, paths: Sequence[Path], taken: Collection[str]) -> str:
    """Return as many last parts of a path as no other path has, and no dataset."""
    for parts in range(1, len(path.parts)):
        name = "/".join(path.parts[-parts:])
        if name not in taken and sum(other.parts[-parts:] == path.parts[-parts:] for other in paths) == 1:
            return name
    return str(path)


def _list_folder(name: str, path: Path, config: DataConfig) -> EvaluationFolder:
    alone = replace(
        config,
        data_path=str(path.parent),
        datasets=(path.name,),
        weights=(),
        held_out_fraction=0.0,
        skip_samples=(),
        use_dummy_dataset=False,
    )
    (files,) = list_datasets(alone)
    return EvaluationFolder(name, alone, files)
