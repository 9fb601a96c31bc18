"""The standard library as a corpus."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from unit.tools.prepare.prepare_files import documents_of

from pretraining.errors import DataError
from pretraining.tools.prepare.corpus import standard_library_files
from pretraining.tools.prepare.text import read_text


def test_the_running_python_has_megabytes_of_code_in_an_order_that_does_not_change() -> None:
    files = standard_library_files()
    assert sum(file.size for file in files) > 2_000_000
    assert files == standard_library_files()
    assert {"argparse.py", "json/decoder.py"} <= {file.name for file in files}


def test_no_tests_no_tables_and_no_installed_packages() -> None:
    names = [file.name for file in standard_library_files()]
    assert not [name for name in names if {"test", "tests", "encodings", "site-packages"} & set(name.split("/"))]
    assert all(name.split("/")[0].removesuffix(".py") in sys.stdlib_module_names for name in names)


def test_documents_are_python() -> None:
    for file in standard_library_files()[:20]:
        ast.parse("".join(documents_of(read_text(file))))


def test_only_modules_that_python_names_its_own_and_that_say_something(tmp_path: Path) -> None:
    code = "x = 1\n" * 100
    for name in ("heapq.py", "json/decoder.py", "json/tests/case.py", "json/__init__.py", "yourpackage.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else code)
    assert [file.name for file in standard_library_files(tmp_path, smallest_bytes=1)] == ["heapq.py", "json/decoder.py"]


def test_a_python_without_sources_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"only 0\.0 MB of Python sources.*--input_path"):
        standard_library_files(tmp_path)
