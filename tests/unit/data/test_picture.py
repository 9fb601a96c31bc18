from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_picture_of_the_documentation_shows_what_the_code_does() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts/draw_data.py"))["draw"]()
    assert (ROOT / "docs/pictures/data.svg").read_text() == drawn + "\n", (
        "run: python scripts/draw_data.py > docs/pictures/data.svg"
    )
