"""The listing of a dataset's files: complete, and in one order for any listing order of the system."""

from __future__ import annotations

import os
import pickle
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.errors import DataError, PretrainError


def put(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def config(root: Path, **changes: object) -> DataConfig:
    return DataConfig(data_path=str(root), **changes)  # type: ignore[arg-type]


def test_links_are_followed_but_not_round_in_circles(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/1.arrow")
    put(tmp_path / "root/web/2.arrow")
    (tmp_path / "root/web/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/web/circle").symlink_to(tmp_path / "root/web")
    listing = list_datasets(config(tmp_path / "root"))
    assert listing[0].paths == ("2.arrow", "linked/1.arrow") and pickle.loads(pickle.dumps(listing)) == listing
    gone = tmp_path / "root/web/3.arrow"
    gone.symlink_to(tmp_path / "gone/3.arrow")
    with pytest.raises(DataError) as raised:  # not one file fewer
        list_datasets(config(tmp_path / "root"))
    assert raised.value.path == gone


def test_a_dataset_is_a_sub_folder_with_token_files_or_a_folder_or_file_that_is_named(tmp_path: Path) -> None:
    for name in ("web/b.arrow", "web/a/z.arrow", "web/a.arrow", "web/.index/i.arrow", "web/.part.arrow"):
        put(tmp_path / name)
    for name in ("lang=en/x/1.arrow", "lang=en/y/1.arrow", "flat.arrow", ".hidden/x.arrow", "meta/1.arrow"):
        put(tmp_path / name)
    assert [dataset.name for dataset in list_datasets(config(tmp_path))] == ["lang=en", "meta", "web"]
    put(tmp_path / "meta/combined_counts.csv")  # the counts of another tool are no dataset
    *_, web = list_datasets(config(tmp_path))
    assert web.paths == ("a.arrow", "a/z.arrow", "b.arrow") and web.path(1) == str(tmp_path / "web/a/z.arrow")
    named = list_datasets(config(tmp_path, datasets=("lang=en/y/", "lang=en/x", "flat.arrow", "web/b.arrow")))
    assert [dataset.name for dataset in named] == ["flat.arrow", "lang=en/x", "lang=en/y", "web/b.arrow"]
    assert [named[0].path(0), named[3].path(0)] == [f"{tmp_path}/flat.arrow", f"{tmp_path}/web/b.arrow"]


@pytest.mark.parametrize(
    ("place", "names", "named"),
    [
        (None, (), None),
        ("nowhere", (), "nowhere"),
        ("flat.arrow", (), "flat.arrow"),
        ("web", (), "web"),
        ("", ("web", "wob"), "wob"),
        ("", ("web", "web/"), None),
        ("", ("void",), "void"),
        ("", ("notes/a.txt",), "notes/a.txt"),
        ("", ("loop",), "loop"),
    ],
)
def test_what_holds_no_token_files_is_named(
    tmp_path: Path, place: str | None, names: tuple[str, ...], named: str | None
) -> None:
    for path in ("web/x.arrow", "flat.arrow", "notes/a.txt"):
        put(tmp_path / path)
    (tmp_path / "void").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PretrainError) as raised:
        list_datasets(DataConfig() if place is None else config(tmp_path / place, datasets=names))
    assert raised.value.path == (None if named is None else tmp_path / named)


def test_a_misspelt_dataset_is_named_with_its_flag_and_the_folders_that_exist(tmp_path: Path) -> None:
    put(tmp_path / "web/1.arrow")
    with pytest.raises(DataError) as raised:
        list_datasets(config(tmp_path, datasets=("wbe",)))
    assert "--datasets" in str(raised.value) and f"{tmp_path} has web" in str(raised.value)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "web/1.arrow")
    error = PermissionError(13, "Permission denied", str(tmp_path / "web"))
    monkeypatch.setattr(os, "scandir", Mock(side_effect=error))
    with pytest.raises(DataError) as raised:
        list_datasets(config(tmp_path, datasets=("web",)))
    assert raised.value.path == tmp_path / "web"


def test_the_order_of_files_depends_on_no_listing_and_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("", "deep/", "deep/er/", "Z/", "é/"):
        for number in range(6):
            put(tmp_path / f"data/web/{folder}{number}.arrow", bytes(number))
    put(tmp_path / "data/code/x.arrow")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data/web/deep").rename(tmp_path / "elsewhere/deep")
    (tmp_path / "data/web/deep").symlink_to(tmp_path / "elsewhere/deep")
    listing = list_datasets(config(tmp_path / "data"))
    moved = list_datasets(config((tmp_path / "data").rename(tmp_path / "moved")))
    assert [each.digest for each in moved] == [each.digest for each in listing]
    chance, real = random.Random(0), os.scandir

    def scandir(path: Any) -> Any:
        with real(path) as entries:
            found = list(entries)
        chance.shuffle(found)
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", scandir)
    for _ in range(8):
        assert list_datasets(config(tmp_path / "moved")) == moved
