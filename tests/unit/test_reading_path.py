"""The README's reading path: the files behind one step stay short."""

from __future__ import annotations

from helpers import ROOT

from scripts.count_code import count, reading_path

PATH = reading_path((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_reading_path_exists_with_its_line_counts() -> None:
    told = {path: lines for path, lines in PATH.items() if abs(count(ROOT / path).code - lines) <= 5}
    assert told == PATH, "python scripts/count_code.py --files says how long files are"


def test_the_reading_path_leads_from_the_loop_to_the_schedule_and_stays_short() -> None:
    assert next(iter(PATH)) == "pretraining/train/loop.py" and "pretraining/optim/schedules.py" in PATH
    assert sum(count(ROOT / path).code for path in PATH) < 800 and len(PATH) < 18
