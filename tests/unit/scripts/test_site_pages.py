"""site_pages.py: links of the repository's page view become links of the site."""

from __future__ import annotations

import pytest

from scripts.site_pages import outside_of_code, site_links

HERE = "https://example.org/pretraining/"


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[data](docs/data.md)", "[data](data.md)"),
        ("CONTRIBUTING.md", "[map](README.md)", "[map](index.md)"),
        ("docs/data.md", "[map](../README.md#reading-it)", "[map](index.md#reading-it)"),
        ("docs/data.md", "[a](training.md), [b](model.md)", "[a](training.md), [b](model.md)"),
        ("docs/data.md", "[the log](../CHANGELOG.md)", "[the log](changes.md)"),
        ("docs/data.md", "[there](https://example.com), [here](#data)", "[there](https://example.com), [here](#data)"),
    ],
)
def test_links_to_pages_lead_to_pages(source: str, link: str, expected: str) -> None:
    assert site_links(link, source, HERE) == expected


def test_links_to_other_files_lead_into_the_repository_where_it_is_known() -> None:
    link = "[`loop.py`](../pretraining/train/loop.py#L10)"
    assert site_links(link, "docs/model.md", HERE) == f"[`loop.py`]({HERE}blob/HEAD/pretraining/train/loop.py#L10)"
    assert site_links(link, "docs/model.md", "") == "`loop.py`"


def test_links_that_lead_nowhere_are_an_error() -> None:
    with pytest.raises(LookupError, match=r"docs/data\.md links to \.\./nowhere\.py, .* no nowhere\.py"):
        site_links("[x](../nowhere.py)", "docs/data.md", HERE)


def test_code_is_left_as_it_is() -> None:
    changed = outside_of_code("a\n```python\na\n```\na\n```\na\n```\n", str.upper)
    assert changed == "A\n```python\na\n```\nA\n```\na\n```\n"
