"""The site of docs/: links of the repository's page view become links of the site, and mkdocs finds none broken."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import run_command

from scripts.site_pages import site_links

HERE = "https://example.org/pretraining/"
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[data](docs/data.md)", "[data](data.md)"),
        ("docs/data.md", "[map](../README.md#reading-it)", "[map](index.md#reading-it)"),
        ("docs/data.md", "[there](https://example.com), [here](#data)", "[there](https://example.com), [here](#data)"),
        ("docs/model.md", "[`a`](../pretraining/api.py#L1)", f"[`a`]({HERE}blob/HEAD/pretraining/api.py#L1)"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_into_the_repository(source: str, link: str, expected: str) -> None:
    assert site_links(link, source, HERE) == expected
    with pytest.raises(LookupError, match=source):
        site_links("[x](../nowhere.py)", source, HERE)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install --editable '.[docs]'")
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    """As the command in CONTRIBUTING.md does it; mkdocs.yml makes broken links warnings, --strict errors."""
    build: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    assert "WARNING -" not in run_command(build, {"REPOSITORY_URL": ""}).stderr
