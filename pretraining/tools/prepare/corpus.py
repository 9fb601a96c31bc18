"""Text that every machine has: the source code of the running Python's standard library.

It is for trying things out: some ten megabytes of well-written code and English (docstrings, comments), where a model
of a few million parameters visibly learns within minutes on a CPU. One module is one document. The text depends on the
version of Python, and stays where it is: nothing is copied into this project.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from pretraining.errors import DataError
from pretraining.tools.prepare.inputs import InputFile

SMALLEST_CORPUS_BYTES = 2_000_000
SMALLEST_MODULE_BYTES = 200
"""Empty `__init__.py` files and one-line stubs teach nothing."""

# Tests (long tables of cases), and modules that are data rather than code: they are unlike the rest and would be a
# fifth of the text.
LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "msilib"}
LEFT_OUT_FILES = {"html/entities.py", "this.py"}


def standard_library_files(root: Path | None = None, smallest_bytes: int = SMALLEST_CORPUS_BYTES) -> list[InputFile]:
    """List the modules of the standard library worth learning from, module after module in the order of their names.

    Only modules that Python itself names as its own count, so that installed packages beside them are never taken.

    Args:
        root: the library's folder; none = the running Python's.
        smallest_bytes: the least text to accept.

    Raises:
        DataError: there is less text than that, as in a Python that came without sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for top in sorted(sys.stdlib_module_names)
        for path in (root / f"{top}.py", *sorted((root / top).rglob("*.py")))
        if path.is_file()
    ]
    files = [InputFile(path, path.relative_to(root).as_posix(), path.stat().st_size) for path in paths]
    modules = [file for file in files if _is_kept(file)]
    size = sum(file.size for file in modules)
    if size < smallest_bytes:
        raise DataError(
            f"--source=stdlib: only {size / 1e6:.1f} MB of Python sources in {root}, {smallest_bytes / 1e6:.1f} MB "
            "are needed. This Python came"
            " without its sources: install the full one (Debian: libpython3-stdlib) or give your own text with "
            "--input_path"
        )
    return modules


def _is_kept(file: InputFile) -> bool:
    folders = file.name.split("/")[:-1]
    return (
        file.size >= SMALLEST_MODULE_BYTES
        and file.name not in LEFT_OUT_FILES
        and not LEFT_OUT_FOLDERS.intersection(folders)
    )
