from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from training_runs import write_dataset

from pretraining.config.training import DataConfig
from pretraining.data.evaluation_sets import find_evaluation_folders
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.errors import DataError, PretrainError


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    for name in ("web", "code"):
        write_dataset(tmp_path / "train" / name, documents=3)
    return DataConfig(
        data_path=str(tmp_path / "train"), datasets=("web", "code"), weights=(1, 2), held_out_fraction=0.5
    )


def found(data: DataConfig, *folders: Path | str) -> list[str]:
    return [each.name for each in find_evaluation_folders([str(each) for each in folders], data, list_datasets(data))]


def test_sets_are_named_by_the_shortest_distinct_part_of_their_paths(data: DataConfig, tmp_path: Path) -> None:
    folders = ("a/valid", "b/valid", "valid/web", "deep/valid/web", "books", "c/code", "train/other")
    for name in folders:
        write_dataset(tmp_path / name, documents=3)
    names = found(data, *(tmp_path / name for name in folders))
    assert names == ["a/valid", "b/valid", f"{tmp_path.name}/valid/web", "deep/valid/web", "books", "c/code", "other"]
    [folder] = find_evaluation_folders([str(tmp_path / "books")], data, list_datasets(data))
    assert folder.files.folder == str(tmp_path / "books") and folder.config.held_out_fraction == 0


def test_a_set_may_be_a_file_beside_the_one_that_is_trained_on(data: DataConfig, tmp_path: Path) -> None:
    parts = [tmp_path / f"flat/{name}.arrow" for name in ("train", "val")]
    write_dataset(tmp_path / "flat", documents=3)
    for part in parts:
        shutil.copy(tmp_path / "flat/part-0.arrow", part)
    flat = DataConfig(data_path=str(tmp_path / "flat"), datasets=("train.arrow",))
    (evaluation,) = find_evaluation_folders([str(parts[1])], flat, list_datasets(flat))
    assert evaluation.name == "val.arrow" and evaluation.files.path(0) == str(parts[1])
    for overlapping in (parts[0], tmp_path / "flat"):
        with pytest.raises(DataError):
            found(flat, overlapping)


OVERLAPS = ["train/web", "train/web/deeper", "train", "link"]
# folders, and what the error says
REFUSED = [
    *(([name], f"/{name}: ") for name in (*OVERLAPS, "gone", "empty")),
    (["books", "./books"], "/books 2 times"),
    (["other/web", "/web"], "/web: "),
]


@pytest.mark.parametrize(("folders", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_set_that_overlaps_the_training_data_or_is_none_is_refused(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("books", "other/web"):
        write_dataset(tmp_path / name, documents=3)
    for name in ("train/web/deeper", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "train/web")
    with pytest.raises(PretrainError, match=re.escape(words)):
        found(data, *folders)
