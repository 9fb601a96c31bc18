"""Finding the files of an input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unit.tools.prepare.prepare_files import packed

from pretraining.errors import DataError
from pretraining.tools.prepare.inputs import Selection, list_files, standard_library_files
from pretraining.tools.prepare.packed_files import InputFile

ENDINGS = Selection(("txt", "jsonl"))


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(packed(name.lower(), f"text of {name}".encode()))


def names(files: list[InputFile]) -> list[str]:
    return [file.name for file in files]


def test_a_folder_is_walked_to_the_bottom_in_the_order_of_names(tmp_path: Path) -> None:
    found = ["a/deep/er/x.jsonl", "a/z.txt.gz", "a-b.txt", "b.jsonl.zst", "c.TXT", "d.JSONL.GZ"]
    tree(tmp_path, *reversed(found), "no.pdf", "no.rst.gz", "no.gz", ".hidden.txt", ".git/x.txt")
    assert names(list_files([str(tmp_path)], ENDINGS)) == found


def test_files_and_globs_are_taken_whatever_their_ending(tmp_path: Path) -> None:
    tree(tmp_path, "one[1].rst", "x/b.py", "x/y/a.py", "x/y/c.txt")
    inputs = [str(tmp_path / "one[1].rst"), str(tmp_path / "x/**/*.py")]
    assert names(list_files(inputs, ENDINGS)) == ["one[1].rst", "b.py", "y/a.py"]


def test_each_file_counts_once_and_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    tree(tmp_path, "in/a.txt", "elsewhere/b.txt")
    (tmp_path / "in/circle").symlink_to(tmp_path / "in")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "in")
    (tmp_path / "in/again.txt").symlink_to(tmp_path / "in/a.txt")
    assert names(list_files([str(tmp_path / "in")], ENDINGS)) == ["a.txt", "linked/b.txt"]


@pytest.mark.parametrize("name", ["nowhere", "*.none", "empty", "gone.txt", "with_gone"])
def test_an_input_that_gives_no_text_or_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "with_gone").mkdir()
    for link in ("gone.txt", "with_gone/gone.txt"):
        (tmp_path / link).symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError) as error:
        list_files([str(tmp_path / name)], ENDINGS)
    assert error.value.path in (tmp_path / name, tmp_path / name / "gone.txt")
    assert "input_path" in error.value.settings


def test_a_folder_that_cannot_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="Permission denied") as error:
        list_files([str(tmp_path)], ENDINGS)
    assert error.value.path == tmp_path


def test_token_files_made_here_are_no_input_of_the_folder_around_them(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "data/web/prepare.json", "data/web/part.txt", "data/web/deeper/x.txt", "data/y.txt")
    assert names(list_files([str(tmp_path)], ENDINGS)) == ["a.txt", "data/y.txt"]
    assert names(list_files([str(tmp_path / "data/web")], ENDINGS)) == ["deeper/x.txt", "part.txt"]


# The standard library as text


def test_the_running_python_has_megabytes_of_code_in_an_order_that_does_not_change() -> None:
    files = standard_library_files()
    assert sum(file.size for file in files) > 2_000_000
    assert files == standard_library_files()
    assert {"argparse.py", "json/decoder.py"} <= {file.name for file in files}


def test_a_python_without_sources_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"without its sources.*--input_path"):
        standard_library_files(tmp_path)
