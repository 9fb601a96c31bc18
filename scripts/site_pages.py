"""A hook of mkdocs (mkdocs.yml): top-level pages of the repository, and links that leave docs/.

    README.md, CONTRIBUTING.md, CHANGELOG.md --> pages of the site
    a link to one of them, or to a page      --> that page
    a link to another file                   --> the file in the repository at `repo_url`; without it, only the text

Links are written for the page view of the repository. mkdocs calls the `on_…` functions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Pages of the site, by top-level file."""

STYLE = """\
.md-grid { max-width: 72rem }
.md-typeset thead:not(:has(th:not(:empty))) { display: none }
"""
"""Wide tables without empty headings; `extra_css` in mkdocs.yml names this file."""

LINK = re.compile(
    r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]"  # not pictures
    r"\((?!https?://|mailto:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the top-level pages and the style."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "site.css", content=STYLE))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Turn the links of a page into links of the site."""
    from mkdocs.exceptions import PluginError

    path = page.file.src_uri
    source = next((file for file, made in PAGES.items() if made == path), DOCS + path)
    try:
        return map_outside_code(markdown, lambda piece: site_links(piece, source, config.repo_url or ""))
    except LookupError as error:
        raise PluginError(str(error)) from error


def map_outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply a function to the text outside of code blocks."""
    pieces, begin = [], 0
    for block in CODE.finditer(markdown):
        pieces += [change(markdown[begin : block.start()]), block[0]]
        begin = block.end()
    return "".join([*pieces, change(markdown[begin:])])


def site_links(markdown: str, source: str, repository: str) -> str:
    """Turn links of the repository's page view into links of the site.

    Args:
        source: file with the links, relative to the root of the repository.
        repository: address of the repository; "" = unknown.

    Raises:
        LookupError: the target of a link does not exist.
    """

    def turn(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(source).parent / link["path"])
        if not (ROOT / target).exists():
            raise LookupError(f"{source} links to {link['path']}, but the repository has no {target}")
        page, anchor = page_of(target), link["anchor"] or ""
        if page is not None:
            folder = PurePosixPath(page_of(source) or "").parent
            return f"[{link['text']}]({os.path.relpath(page, folder)}{anchor})"
        address = f"{repository.rstrip('/')}/blob/HEAD/{target}{anchor}"
        return f"[{link['text']}]({address})" if repository else link["text"]

    return LINK.sub(turn, markdown)


def page_of(path: str) -> str | None:
    """Return the path on the site of a file of the repository; None if the site does not have the file."""
    return PAGES.get(path) or (path.removeprefix(DOCS) if path.startswith(DOCS) else None)
