from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from unit.data.token_files import write_documents

from pretraining.config.training import DataConfig
from pretraining.data.storage.arrow import ArrowFormat
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
    with pytest.raises(DataError, match=r"web/real is in .*web under more than 64 names, such as .*link to each other"):
        list_datasets(config(tmp_path))


def test_what_is_no_file_is_no_token_file(tmp_path: Path) -> None:
    put(tmp_path / "web/1.arrow")
    os.mkfifo(tmp_path / "web/2.arrow")
    with pytest.raises(DataError, match=r"web/2\.arrow is no file that could hold tokens: a pipe or a device"):
        list_datasets(config(tmp_path))


def test_folders_that_are_nested_without_end_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "web/1.arrow")
    scan = os.scandir

    def nested(path: str) -> Any:
        if str(path).endswith("web"):
            raise RecursionError
        return scan(path)

    monkeypatch.setattr(os, "scandir", nested)
    with pytest.raises(DataError, match=r"cannot list .*web: folders there are nested too deep"):
        list_datasets(config(tmp_path))


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


def test_no_data_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give --data_path="):
        list_datasets(DataConfig())


def test_a_missing_root_is_named_with_what_is_beside_it(tmp_path: Path) -> None:
    put(tmp_path / "tokens/web/x.arrow")
    with pytest.raises(DataError, match=rf"data_path {tmp_path}/token is not a folder; {tmp_path} holds tokens/"):
        list_datasets(config(tmp_path / "token"))
    with pytest.raises(DataError, match=rf"{tmp_path}/no does not exist either"):
        list_datasets(config(tmp_path / "no/such"))


def test_a_missing_dataset_is_named_with_the_nearest(tmp_path: Path) -> None:
    put(tmp_path / "wikipedia/x.arrow")
    put(tmp_path / "code/x.arrow")
    with pytest.raises(DataError, match=rf"dataset 'wikpedia' is not in {tmp_path}; did you mean 'wikipedia'\?"):
        list_datasets(config(tmp_path, datasets=("code", "wikpedia")))
    with pytest.raises(DataError, match=r"dataset 'zzz' is not in .* holds code/, wikipedia/"):
        list_datasets(config(tmp_path, datasets=("zzz",)))


def test_a_dataset_without_token_files_says_what_is_there(tmp_path: Path) -> None:
    put(tmp_path / "web/notes.txt")
    with pytest.raises(
        DataError, match=r"dataset 'web' has no \*\.arrow, \*\.npy or \*\.bin files in .*web; .*web holds notes\.txt"
    ):
        list_datasets(config(tmp_path, datasets=("web",)))
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=r"void is empty"):
        list_datasets(config(tmp_path, datasets=("void",)))


def test_a_root_without_datasets_says_what_is_there(tmp_path: Path) -> None:
    put(tmp_path / "web/notes.txt")
    with pytest.raises(
        DataError,
        match=r"no dataset in .*: none of its sub-folders holds \*\.arrow, \*\.npy or \*\.bin files; .* holds web/",
    ):
        list_datasets(config(tmp_path))


def test_a_dataset_given_as_the_root_is_recognised(tmp_path: Path) -> None:
    write_documents(tmp_path / "web/x.arrow", [[1]])
    with pytest.raises(DataError, match=rf"give --datasets=x\.arrow .* --data_path={tmp_path} --datasets=web"):
        list_datasets(config(tmp_path / "web"))


def test_a_dataset_may_be_a_single_file(tmp_path: Path) -> None:
    for name in ("train.arrow", "val.arrow", "deep/x.arrow"):
        put(tmp_path / name)
    deep, train = list_datasets(config(tmp_path, datasets=("train.arrow", "deep/x.arrow")))
    assert (train.name, train.paths, train.path(0)) == ("train.arrow", ("train.arrow",), f"{tmp_path}/train.arrow")
    assert (deep.name, deep.path(0)) == ("deep/x.arrow", f"{tmp_path}/deep/x.arrow")
    with pytest.raises(DataError, match=r"'train' is not in .*; did you mean 'train\.arrow'\?"):
        list_datasets(config(tmp_path, datasets=("train",)))
    with pytest.raises(DataError, match=rf"give --data_path={tmp_path} --datasets=val\.arrow"):
        list_datasets(config(tmp_path / "val.arrow"))


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "data.jsonl.gz"])
def test_data_of_other_forms_is_refused_with_the_command_that_makes_token_files(tmp_path: Path, name: str) -> None:
    put(tmp_path / "web" / name)
    for settings, place in (
        ({}, tmp_path),
        ({"datasets": ("web",)}, tmp_path / "web"),
        ({"datasets": (f"web/{name}",)}, tmp_path / "web" / name),
    ):
        with pytest.raises(DataError, match=rf"`pretrain prepare --input_path={place}`"):
            list_datasets(config(tmp_path, **settings))
    with pytest.raises(DataError, match=rf"`pretrain prepare --input_path={tmp_path}/web/{name}`"):
        list_datasets(config(tmp_path / "web" / name))


def test_a_saved_dataset_of_hugging_face_is_refused_with_the_command(tmp_path: Path) -> None:
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    put(tmp_path / "saved/state.json")
    with pa.ipc.new_stream(str(tmp_path / "saved/data-00000-of-00001.arrow"), schema) as writer:
        writer.write_table(pa.table({"input_ids": [[1, 2]]}, schema))
    with pytest.raises(DataError, match=rf"`pretrain prepare --input_path={tmp_path}/saved`"):
        list_datasets(config(tmp_path / "saved"))
    with pytest.raises(DataError, match=rf"stream.* `pretrain prepare --input_path={tmp_path}/saved`"):
        ArrowFormat(DataConfig()).documents(f"{tmp_path}/saved/data-00000-of-00001.arrow")


def test_mds_is_refused_with_what_writes_it_as_parquet(tmp_path: Path) -> None:
    put(tmp_path / "web/shard.00000.mds.zstd")
    for settings in ({}, {"datasets": ("web",)}):
        with pytest.raises(DataError, match=rf"LocalDataset.*prepare --input_path={tmp_path}/web\.parquet"):
            list_datasets(config(tmp_path, **settings))


def test_a_dataset_named_twice_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "web/x.arrow")
    with pytest.raises(DataError, match="names web more than once"):
        list_datasets(config(tmp_path, datasets=("web", "web/")))


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "web/deep/x.arrow")
    real = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot list .*web/deep: Permission denied"):
        list_datasets(config(tmp_path))
