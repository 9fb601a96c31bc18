"""The listing of a dataset's files: complete, and in one order for any listing order of the system."""

from __future__ import annotations

import json
import os
import pickle
import random
from contextlib import nullcontext
from itertools import permutations
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


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
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
    for neighbour in ("flat.npy", "flat.bin"):  # of a file that is named
        put(tmp_path / neighbour)
    put(tmp_path / "meta/state.json", b"{}")  # of no `save_to_disk`, whose files are streams
    names = ["flat.arrow", "flat.bin", "flat.npy", "lang=en/x", "lang=en/y", "meta", "web/b.arrow"]
    named = list_datasets(config(tmp_path, datasets=tuple(f"{name}/" for name in names[::-1])))
    assert [dataset.name for dataset in named] == names
    assert [each.paths for each in named[:3]] == [("flat.arrow",), ("flat.bin",), ("flat.npy",)]
    assert [named[0].path(0), named[6].path(0)] == [f"{tmp_path}/flat.arrow", f"{tmp_path}/web/b.arrow"]
    assert (named[5].file_type, named[5].paths) == ("arrow", ("1.arrow",))


# data_path, datasets, the place that the error names, what it says
REFUSED: list[tuple[str | None, tuple[str, ...], str | None, str]] = [
    (None, (), None, ""),
    ("nowhere", (), "nowhere", ""),
    ("flat.arrow", (), "flat.arrow", ""),
    ("web", (), "web", ""),
    ("", ("web", "wbe"), "wbe", "--datasets names 'wbe', which does not exist; ROOT has notes, void, web"),
    ("", ("web", "web/"), None, ""),
    ("", ("void",), "void", ""),
    ("", ("notes/a.txt",), "notes/a.txt", ""),
    ("", ("loop",), "loop", ""),
]


@pytest.mark.parametrize(("place", "names", "named", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_folder_without_token_files_is_named(
    tmp_path: Path, place: str | None, names: tuple[str, ...], named: str | None, words: str
) -> None:
    for path in ("web/x.arrow", "flat.arrow", "notes/a.txt"):
        put(tmp_path / path)
    (tmp_path / "void").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PretrainError) as raised:
        list_datasets(DataConfig() if place is None else config(tmp_path / place, datasets=names))
    assert raised.value.path == (None if named is None else tmp_path / named)
    assert words.replace("ROOT", str(tmp_path)) in str(raised.value)


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


def test_folders_that_link_to_each_other_are_read_once_under_the_names_of_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, other in permutations(range(4), 2):
        put(tmp_path / f"each/f{number}/{number}.arrow")
        (tmp_path / f"each/f{number}/to{other}").symlink_to(tmp_path / f"each/f{other}")
    for number in range(20):  # a ladder, with 2^20 ways to its end
        put(tmp_path / f"ladder/l{number:02}/x.arrow")
        for name in ("a", "b"):
            (tmp_path / f"ladder/l{number:02}/{name}").symlink_to(tmp_path / f"ladder/l{number + 1:02}")
    (tmp_path / "ladder/l20").mkdir()
    each, ladder = list_datasets(config(tmp_path))
    assert each.paths == tuple(f"f{number}/{number}.arrow" for number in range(4))
    assert ladder.paths == tuple(f"l{number:02}/x.arrow" for number in range(20))
    assert "f0/to1" in caplog.text and "link the files themselves" in caplog.text


STREAM = b"\xff\xff\xff\xff"


def save(folder: Path, *names: str, **more: object) -> None:
    """A folder of `save_to_disk`, whose state.json names files."""
    for name in names:
        put(folder / name, STREAM)
    state = {"_data_files": [{"filename": name} for name in names], **more}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_saved_dataset_has_the_files_that_its_state_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pretraining")
    save(tmp_path / "web/train", "data-0.arrow", "data-1.arrow")
    save(tmp_path / "web/more", "data-0.arrow")
    for name in ("train/cache-1f.arrow", "more/cache-2f.arrow", "other/cache-3f.arrow"):
        put(tmp_path / "web" / name, STREAM)
    (listing,) = list_datasets(config(tmp_path))
    saved = ("more/data-0.arrow", "train/data-0.arrow", "train/data-1.arrow")
    assert (listing.file_type, listing.paths) == ("arrow_stream", (saved[0], "other/cache-3f.arrow", *saved[1:]))
    assert "train/cache-1f.arrow" in caplog.text
    (alone,) = list_datasets(config(tmp_path, datasets=("web/train",)))
    assert alone.paths == ("data-0.arrow", "data-1.arrow")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow, which is not there"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "not there"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "x.arrow"}]}', "flatten_indices"),
    ],
)
def test_a_saved_dataset_that_is_incomplete_or_a_selection_is_refused(tmp_path: Path, state: str, message: str) -> None:
    put(tmp_path / "web/data-0.arrow", STREAM)
    (tmp_path / "web/state.json").write_text(state)
    with pytest.raises(DataError, match=message) as raised:
        list_datasets(config(tmp_path))
    assert raised.value.path == tmp_path / "web/state.json"


def refusal(root: Path, *names: str, earlier: tuple[str, ...] = ()) -> str:
    """Return the error with which datasets are refused."""
    with pytest.raises(DataError) as raised:
        list_datasets(config(root, datasets=names), earlier)
    return str(raised.value)


def test_row_70_one_set_of_files_under_two_names_is_refused(tmp_path: Path) -> None:
    for name in ("web/1.arrow", "web/sub/2.arrow", "code/1.arrow", "some/3.arrow", "hard/4.arrow"):
        put(tmp_path / name, name.encode())
    (tmp_path / "link").symlink_to("web")
    os.link(tmp_path / "code/1.arrow", tmp_path / "some/1.arrow")
    (tmp_path / "one.arrow").symlink_to("code/1.arrow")
    assert "datasets 'link' and 'web' are the same files" in refusal(tmp_path, "web", "link")
    assert "datasets 'web' and 'web/sub' share 1 file, such as 2.arrow" in refusal(tmp_path, "web", "web/sub")
    assert "datasets 'code' and 'some' share 1 file, such as 1.arrow" in refusal(tmp_path, "code", "some")
    assert "datasets 'code' and 'one.arrow' are the same files" in refusal(tmp_path, "code", "one.arrow")
    assert "datasets './web' and 'web' are the same files" in refusal(tmp_path, "web", "./web")
    assert [files.name for files in list_datasets(config(tmp_path, datasets=("web", "code", "hard")))]
    weightless = config(tmp_path, datasets=("web", "link"), weights=(1.0, 0.0))
    assert len(list_datasets(weightless)) == 2  # nothing of it is read


def test_row_70_a_later_name_of_a_dataset_of_the_run_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "web/1.arrow")
    (tmp_path / "again").symlink_to("web")
    assert "datasets 'again' and 'web' are the same files" in refusal(tmp_path, "again", earlier=("web",))
    assert not caplog.messages
    assert list_datasets(config(tmp_path, datasets=("again",)), ("web", "again"))  # both were trained on already
    assert ["are the same files" in line for line in caplog.messages] == [True]
    assert list_datasets(config(tmp_path, datasets=("again",)), ("gone",))


def test_the_folder_that_a_file_system_keeps_for_repairs_is_no_dataset(tmp_path: Path) -> None:
    put(tmp_path / "web/1.arrow")
    put(tmp_path / "web/lost+found/2.arrow")
    put(tmp_path / "lost+found/3.arrow")
    assert [(files.name, files.paths) for files in list_datasets(config(tmp_path))] == [("web", ("1.arrow",))]


@pytest.mark.parametrize("place", ["", "web"])
def test_a_folder_that_cannot_be_listed_is_an_error_with_the_way_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "web/1.arrow")
    put(tmp_path / "other/1.arrow")
    listed = os.scandir

    def scandir(path: Any) -> Any:  # root may read everything
        if str(path).rstrip("/") == str(tmp_path / "web"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    text = refusal(tmp_path, *([place] if place else []))
    assert "Permission denied" in text and "name the others with --datasets" in text
    assert list_datasets(config(tmp_path, datasets=("other",)))
