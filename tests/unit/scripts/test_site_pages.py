"""The site of docs/ is built, and mkdocs finds no broken link."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import run_command

MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install --editable '.[docs]'")
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    """As the command in CONTRIBUTING.md does it; mkdocs.yml makes broken links warnings, --strict errors."""
    build: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    assert "WARNING -" not in run_command(build, {"REPOSITORY_URL": ""}).stderr
