"""Finding the files of an input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretraining.errors import DataError
from pretraining.tools.prepare.inputs import InputFile, fingerprint, list_files, standard_library_files

ENDINGS = ("txt", "jsonl")


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}")


def names(files: list[InputFile]) -> list[str]:
    return [file.name for file in files]


def test_a_folder_is_walked_to_the_bottom_in_the_order_of_names(tmp_path: Path) -> None:
    tree(tmp_path, "b.txt", "a/z.txt", "a/deep/er/x.jsonl", "c.TXT", "no.pdf", ".hidden.txt", ".git/x.txt", "a-b.txt")
    assert names(list_files([str(tmp_path)], ENDINGS)) == ["a/deep/er/x.jsonl", "a/z.txt", "a-b.txt", "b.txt", "c.TXT"]


def test_files_and_globs_are_taken_whatever_their_ending(tmp_path: Path) -> None:
    tree(tmp_path, "one.rst", "x/b.py", "x/y/a.py", "x/y/c.txt")
    assert names(list_files([str(tmp_path / "one.rst"), str(tmp_path / "x/**/*.py")], ENDINGS)) == [
        "one.rst",
        "b.py",
        "y/a.py",
    ]


def test_a_name_with_brackets_is_a_name_where_there_is_such_a_file(tmp_path: Path) -> None:
    tree(tmp_path, "a[1].txt")
    assert names(list_files([str(tmp_path / "a[1].txt")], ENDINGS)) == ["a[1].txt"]


def test_each_file_counts_once_and_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    tree(tmp_path, "in/a.txt", "elsewhere/b.txt")
    (tmp_path / "in/circle").symlink_to(tmp_path / "in")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
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


def test_the_fingerprint_knows_names_sizes_and_order() -> None:
    a, b = ("a", 1), ("b", 2)
    assert len({fingerprint(files) for files in ([a, b], [b, a], [a], [a, ("b", 3)], [("ab", 1), b])}) == 5


def test_compressed_files_are_found_by_the_ending_of_their_text(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt.gz", "b.jsonl.zst", "c.JSONL.GZ", "d.rst.gz", "e.gz")
    assert names(list_files([str(tmp_path)], ENDINGS)) == ["a.txt.gz", "b.jsonl.zst", "c.JSONL.GZ"]


def test_token_files_made_here_are_no_input_of_the_folder_around_them(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "data/web/prepare.json", "data/web/part.txt", "data/web/deeper/x.txt", "data/y.txt")
    assert names(list_files([str(tmp_path)], ENDINGS)) == ["a.txt", "data/y.txt"]
    assert names(list_files([str(tmp_path / "data/web")], ENDINGS)) == ["deeper/x.txt", "part.txt"]


def test_a_chain_of_links_between_folders_ends(tmp_path: Path) -> None:
    tree(tmp_path, "a/x.txt", "b/y.txt")
    (tmp_path / "a/to_b").symlink_to(tmp_path / "b")
    (tmp_path / "b/to_a").symlink_to(tmp_path / "a")
    assert sorted(Path(name).name for name in names(list_files([str(tmp_path)], ENDINGS))) == ["x.txt", "y.txt"]


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.txt", "text", None),
        ("a", "text", None),
        ("a.md.zst", "text", "zst"),
        ("a.JSONL", "lines", None),
        ("a.ndjson.gz", "lines", "gz"),
        ("a.parquet", "parquet", None),
        ("a.arrow", "arrow", None),
        ("a.feather", "arrow", None),
        ("a.parquet.gz", "text", "gz"),
    ],
)
def test_the_ending_says_what_is_in_a_file(name: str, kind: str, compression: str | None) -> None:
    file = InputFile(Path(name), name, 1)
    assert (file.kind, file.compression) == (kind, compression)


# The standard library as text


def test_the_running_python_has_megabytes_of_code_in_an_order_that_does_not_change() -> None:
    files = standard_library_files()
    assert sum(file.size for file in files) > 2_000_000
    assert files == standard_library_files()
    assert {"argparse.py", "json/decoder.py"} <= {file.name for file in files}


def test_only_modules_that_python_names_its_own_and_that_say_something(tmp_path: Path) -> None:
    code = "x = 1\n" * 100
    for name in ("heapq.py", "json/decoder.py", "json/tests/case.py", "json/__init__.py", "yourpackage.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else code)
    assert [file.name for file in standard_library_files(tmp_path)] == ["heapq.py", "json/decoder.py"]


def test_a_python_without_sources_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"without its sources.*--input_path"):
        standard_library_files(tmp_path)
