"""Sketches of the curves: what a plot shows until the script has drawn it, and where no script may run.

The plotting library is large, and a browser takes seconds to read it; sketches are there at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pretraining.tools.report.curves import bucket_width, places_to_keep
from pretraining.tools.report.markup import Markup, element
from pretraining.tools.report.plots import Plot, reports_and_curves
from pretraining.tools.report.run_record import RunRecord

WIDTH, HEIGHT = 1000, 300
"""Of a sketch, in units of its own; the page stretches it."""
COARSER = 4
"""Times as many reports in a bucket as in the plot itself."""
_LINE_ENDS = 0.04
"""Share of the height that is left free above and below."""

Points = NDArray[np.float64]


def sketch(plot: Plot, runs: Sequence[RunRecord]) -> Markup:
    """Returns a plot's curves over steps, with the ends of both axes as numbers; nothing where there is no point."""
    curves = [points for points in _curves(plot, runs) if len(points)]
    if not curves:
        return Markup("")
    together = np.concatenate(curves)
    lowest, highest = together.min(0), together.max(0)
    lines = [element("polyline", points=_placed(points, lowest, highest)) for points in curves]
    drawing = element("svg", *lines, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", aria_hidden="true")
    ends = {
        "high": f"{highest[1]:.4g}",
        "low": f"{lowest[1]:.4g}",
        "steps": f"steps {lowest[0]:,.0f} to {highest[0]:,.0f}",
    }
    words = (element("span", text, class_=place) for place, text in ends.items())
    return element("div", drawing, *words, class_="sketch")


def _curves(plot: Plot, runs: Sequence[RunRecord]) -> Iterator[Points]:
    """Yields the points (step, value) of each curve, [points, 2]; few, with the extremes among them."""
    for run in runs:
        for kind, name, _ in plot.numbers:
            reports, curves = reports_and_curves(run, kind)
            if (curve := curves.get(name)) is not None:
                kept = places_to_keep(curve.rows, curve.values, COARSER * bucket_width(int(curve.rows[-1]) + 1))
                points = np.stack((reports.position("step")[curve.rows[kept]], curve.values[kept]), axis=1)
                yield points[np.isfinite(points).all(1)]


def _placed(points: Points, lowest: Points, highest: Points) -> str:
    """Places points in the drawing, the highest value above; an axis of one value is drawn in the middle."""
    sizes = highest - lowest
    shares = np.where(sizes > 0, (points - lowest) / np.where(sizes > 0, sizes, 1.0), 0.5)
    heights = 1 - _LINE_ENDS - shares[:, 1] * (1 - 2 * _LINE_ENDS)
    return " ".join(f"{x:.0f},{y:.0f}" for x, y in zip(shares[:, 0] * WIDTH, heights * HEIGHT, strict=True))
