"""A bar chart as an SVG file: a bar a measurement, with its quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, MARGIN, LINE, BAR = 960, 16, 26, 16
LETTER = 7.2  # width of a letter at 12 px, on the safe side


@dataclass(frozen=True)
class Bar:
    """A line of the chart.

    Attributes:
        name: at its left.
        values: measured; the bar ends at their median.
        note: in place of a bar, where there are no values.
    """

    name: str
    values: Sequence[float]
    note: str | None = None


def draw_bars(title: str, bars: Sequence[Bar]) -> str:
    """The chart as SVG; bars begin at zero, so their lengths may be compared."""
    left = 2 * MARGIN + LETTER * max(len(bar.name) for bar in bars)
    largest = max((max(bar.values) for bar in bars if bar.values), default=1.0)
    scale = (WIDTH - left - MARGIN - 90) / largest
    height = 2 * MARGIN + LINE * (len(bars) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 12}" font-weight="bold">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars, start=1):
        parts += _draw(bar, left, MARGIN + LINE * number, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw(bar: Bar, left: float, y: float, scale: float) -> list[str]:
    middle = y + BAR / 2 + 4
    name = f'<text x="{left - MARGIN:.1f}" y="{middle}" text-anchor="end">{escape(bar.name)}</text>'
    if not bar.values:
        return [name, f'<text x="{left:.1f}" y="{middle}" fill="#9c2f2f">{escape(bar.note or "")}</text>']
    median = statistics.median(bar.values)
    parts = [name, f'<rect x="{left:.1f}" y="{y}" width="{median * scale:.1f}" height="{BAR}" fill="#4e79a7"/>']
    end = left + median * scale
    if len(bar.values) > 1:
        low, _, high = (left + quartile * scale for quartile in statistics.quantiles(bar.values, method="inclusive"))
        parts.append(f'<path d="M{low:.1f} {y + BAR / 2}H{high:.1f}" stroke="#333333" stroke-width="2"/>')
        end = max(end, high)
    return [*parts, f'<text x="{end + 6:.1f}" y="{middle}">{median:,.0f}</text>']
