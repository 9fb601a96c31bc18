"""site_pages.py: links of the repository's page view become links of the site."""

from __future__ import annotations

import pytest

from scripts.site_pages import site_links

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
        ("docs/model.md", "[`a`](../pretraining/api.py#L1)", f"[`a`]({HERE}blob/HEAD/pretraining/api.py#L1)"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_into_the_repository(source: str, link: str, expected: str) -> None:
    assert site_links(link, source, HERE) == expected


def test_links_that_lead_nowhere_are_an_error() -> None:
    with pytest.raises(LookupError, match=r"docs/data\.md"):
        site_links("[x](../nowhere.py)", "docs/data.md", HERE)
