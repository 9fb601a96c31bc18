"""The site of docs/: every link in it leads somewhere, and a browser that shows it asks nobody else for anything."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from helpers import run_command

MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install --editable '.[docs]'"),
]

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""Of elements that a browser fetches something for by itself: the attribute that says what."""


class Html(HTMLParser):
    """What matters here of a page: its anchors, its links, and what is fetched for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.elements: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Notes an element."""
        values = {name: value or "" for name, value in attributes}
        self.elements.add(tag)
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in FETCHED and FETCHED[tag] in values:
            self.fetched.append(values[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as the command in CONTRIBUTING.md does it."""
    folder = tmp_path_factory.mktemp("site")
    build: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = run_command(build, {"REPOSITORY_URL": ""})
    assert "WARNING -" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path) for path in sorted(site.rglob("*.html"))}


def target_of(link: str, page: Path, site: Path) -> tuple[Path, str]:
    """The file that a link of a page leads to, and the anchor."""
    parts = urlsplit(link)
    path = unquote(parts.path)
    target = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve() if path else page
    return (target / "index.html" if target.is_dir() else target), unquote(parts.fragment)


def test_every_link_leads_to_a_page_and_a_place_on_it(pages: dict[Path, Html], site: Path) -> None:
    broken, followed = [], 0
    for page, html in pages.items():
        for link in [*html.links, *html.fetched]:
            if urlsplit(link).scheme:
                continue
            followed += 1
            target, anchor = target_of(link, page, site)
            there = target.is_file() and (not anchor or target.suffix != ".html" or anchor in pages[target].anchors)
            if not there and page.name != "404.html":
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == [] and followed > 1000
