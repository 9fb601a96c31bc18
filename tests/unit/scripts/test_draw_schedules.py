from __future__ import annotations

from pathlib import Path

from pretraining.config.plugins import SCHEDULES
from scripts import draw_schedules


def test_the_picture_shows_every_schedule_that_ships(tmp_path: Path) -> None:
    draw_schedules.main(tmp_path / "schedules.svg")
    assert "</svg>" in (tmp_path / "schedules.svg").read_text()
    assert {schedule.schedule for schedule in draw_schedules.EXAMPLES.values()} == set(SCHEDULES)
    for name, schedule in draw_schedules.examples().items():
        rates = [schedule.at(step, 1.0) for step in range(draw_schedules.STEPS)]
        assert min(rates) >= 0.0 and 0.99 < max(rates) <= 1.0, name
