"""HTML that is safe by construction: whatever is not `Markup` is text from a file, and is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """HTML that stays as it is."""


def element(tag: str, *content: str, **attributes: str | bool | None) -> Markup:
    """Makes an element.

    Args:
        content: texts, which are escaped, and `Markup`, which is not.
        attributes: by name, `class_` for class, `aria_label` for aria-label; True stands without a value, None and
            False are left out.
    """
    given = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{tag}{given}>{joined(content)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """Puts texts and markup together."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Markup:
    """Makes a table that scrolls inside of its own box; the first cell of a row names it.

    Args:
        caption: for those who cannot see where it stands.
        numbers: columns that are right-aligned.
    """

    def row_of(tag: str, cells: Sequence[str]) -> Markup:
        made = [
            element(
                "th" if tag == "th" or place == 0 else "td",
                cell,
                scope="col" if tag == "th" else "row" if place == 0 else None,
                class_="number" if place in numbers else None,
            )
            for place, cell in enumerate(cells)
        ]
        return element("tr", *made)

    whole = element(
        "table",
        element("caption", caption),
        element("thead", row_of("th", head)),
        element("tbody", *(row_of("td", row) for row in rows)),
    )
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(summary: str, *content: str, is_open: bool = False) -> Markup:
    """Makes a part that opens at a click."""
    return element("details", element("summary", summary), *content, open=is_open)


def section(name: str, title: str, *content: str) -> Markup:
    """Makes a section that links lead to."""
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, *content, id=name, aria_labelledby=f"{name}-title")
