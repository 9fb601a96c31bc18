from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import describe_changes, list_datasets
from pretraining.errors import DataError


def put(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def config(root: Path, **changes: object) -> DataConfig:
    return DataConfig(data_path=str(root), **changes)  # type: ignore[arg-type]


def test_every_sub_folder_with_token_files_is_a_dataset(tmp_path: Path) -> None:
    for name in (
        "web/b.arrow",
        "web/a/z.arrow",
        "web/a.arrow",
        "code/x.arrow",
        "meta/counts.csv",
        "web/.index/i.arrow",
    ):
        put(tmp_path / name)
    put(tmp_path / ".hidden/x.arrow")
    put(tmp_path / "web/.part.arrow")
    listing = list_datasets(config(tmp_path))
    assert [dataset.name for dataset in listing] == ["code", "web"]
    assert listing[1].paths == ("a.arrow", "a/z.arrow", "b.arrow")
    assert listing[1].path(1) == str(tmp_path / "web/a/z.arrow")


def test_a_folder_of_counts_is_no_dataset(tmp_path: Path) -> None:
    for name in ("web/1.arrow", "meta/1.arrow"):
        put(tmp_path / name)
    assert [dataset.name for dataset in list_datasets(config(tmp_path))] == ["meta", "web"]
    put(tmp_path / "meta/combined_counts.csv")
    assert [dataset.name for dataset in list_datasets(config(tmp_path))] == ["web"]


def test_datasets_may_be_nested_and_are_sorted_by_name(tmp_path: Path) -> None:
    put(tmp_path / "lang=en/dataset=x/1.arrow")
    put(tmp_path / "lang=en/dataset=y/1.arrow")
    listing = list_datasets(config(tmp_path, datasets=("lang=en/dataset=y/", "lang=en/dataset=x")))
    assert [dataset.name for dataset in listing] == ["lang=en/dataset=x", "lang=en/dataset=y"]


def test_links_are_followed_but_not_round_in_circles(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/1.arrow")
    put(tmp_path / "root/web/2.arrow")
    (tmp_path / "root/web/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/web/circle").symlink_to(tmp_path / "root/web")
    listing = list_datasets(config(tmp_path / "root"))
    assert listing[0].paths == ("2.arrow", "linked/1.arrow")


def test_a_folder_is_listed_under_each_of_its_names_up_to_a_bound(tmp_path: Path) -> None:
    put(tmp_path / "web/real/1.arrow")
    for number in range(63):
        (tmp_path / f"web/again{number:02}").symlink_to("real")
    paths = list_datasets(config(tmp_path))[0].paths
    assert len(paths) == 64 and paths[0] == "again00/1.arrow" and paths[-1] == "real/1.arrow"
    (tmp_path / "web/again99").symlink_to("real")
    with pytest.raises(DataError) as raised:
        list_datasets(config(tmp_path))
    assert raised.value.path == tmp_path / "web/real"


def refused(settings: DataConfig) -> DataError:
    with pytest.raises(DataError) as raised:
        list_datasets(settings)
    return raised.value


def test_what_is_no_file_is_no_token_file(tmp_path: Path) -> None:
    put(tmp_path / "web/1.arrow")
    os.mkfifo(tmp_path / "web/2.arrow")
    assert refused(config(tmp_path)).path == tmp_path / "web/2.arrow"


@pytest.mark.parametrize("error", [RecursionError(), PermissionError(13, "Permission denied")])
def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    put(tmp_path / "web/1.arrow")
    scan = os.scandir

    def failing(path: str) -> Any:
        if str(path).endswith("web"):
            raise error
        return scan(path)

    monkeypatch.setattr(os, "scandir", failing)
    assert refused(config(tmp_path)).path == tmp_path / "web"


def test_a_listing_does_not_depend_on_the_place_and_can_be_sent(tmp_path: Path) -> None:
    for place, names in (("here", "abc"), ("there", "cab")):
        for name in names:
            put(tmp_path / place / "web" / f"{name}.arrow", b"12" * ord(name))
    here, there = (list_datasets(config(tmp_path / place))[0] for place in ("here", "there"))
    assert here.digest == there.digest and here.sizes == there.sizes
    assert pickle.loads(pickle.dumps(here)) == here
    put(tmp_path / "here/web/a.arrow", b"1")
    assert list_datasets(config(tmp_path / "here"))[0].digest != here.digest


def test_changes_are_named() -> None:
    before = {"a": 1, "b": 2, "c": 3}
    assert describe_changes(before, before) == ""
    assert describe_changes(before, {"b": 5, "c": 3, "d": 1}) == "added: d; removed: a; changed in size: b"
    assert describe_changes({}, {f"{n:03}": 1 for n in range(100)}).endswith("010, 011 and 88 more")


@pytest.mark.parametrize(
    ("place", "names", "said"),
    [
        (None, (), "--data_path="),
        ("roo", (), "root"),  # beside it
        ("root", ("code", "wikpedia"), "did you mean 'wikipedia'?"),
        ("root", ("zzz",), "holds code, flat.arrow, notes, void, wikipedia"),
        ("root", ("notes",), "holds notes.txt"),
        ("root", ("void",), "holds nothing"),
        ("root", ("code", "code/"), "--datasets"),
        ("root/wikipedia", (), "--datasets=wikipedia"),
        ("root/flat.arrow", (), "--datasets=flat.arrow"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    tmp_path: Path, place: str | None, names: tuple[str, ...], said: str
) -> None:
    for path in ("wikipedia/x.arrow", "code/x.arrow", "notes/notes.txt", "flat.arrow"):
        put(tmp_path / "root" / path)
    (tmp_path / "root/void").mkdir()
    settings = DataConfig() if place is None else config(tmp_path / place, datasets=names)
    assert said in str(refused(settings))


def test_a_dataset_may_be_a_single_file(tmp_path: Path) -> None:
    for name in ("train.arrow", "val.arrow", "deep/x.arrow"):
        put(tmp_path / name)
    deep, train = list_datasets(config(tmp_path, datasets=("train.arrow", "deep/x.arrow")))
    assert (train.name, train.paths, train.path(0)) == ("train.arrow", ("train.arrow",), f"{tmp_path}/train.arrow")
    assert (deep.name, deep.path(0)) == ("deep/x.arrow", f"{tmp_path}/deep/x.arrow")


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "data.jsonl.gz"])
def test_data_of_other_forms_is_refused_with_the_command_that_makes_token_files(tmp_path: Path, name: str) -> None:
    put(tmp_path / "web" / name)
    for settings, place in (
        (config(tmp_path), tmp_path),
        (config(tmp_path, datasets=("web",)), tmp_path / "web"),
        (config(tmp_path, datasets=(f"web/{name}",)), tmp_path / "web" / name),
        (config(tmp_path / "web" / name), tmp_path / "web" / name),
    ):
        assert f"`pretrain prepare --input_path={place}`" in str(refused(settings))
