"""Sketches show the whole of a curve, its extremes among few points."""

from __future__ import annotations

import re
from pathlib import Path

from unit.tools.report.run_folders import training_report, write_lines, write_run

from pretraining.tools.report.curves import MOST_BUCKETS
from pretraining.tools.report.plots import Plot, plots_of
from pretraining.tools.report.run_record import RunRecord, read_run
from pretraining.tools.report.sketches import COARSER, HEIGHT, WIDTH, sketch


def run_of(folder: Path, losses: list[float]) -> RunRecord:
    write_run(folder)
    lines = [training_report(step, loss=loss) for step, loss in enumerate(losses, 1)]
    write_lines(folder / "logs" / "metrics.jsonl", lines)
    return read_run(folder, folder.name)


def loss_plot(*runs: RunRecord) -> Plot:
    return next(plot for plot in plots_of(runs) if plot.key == "loss")


def points_of(markup: str) -> list[list[tuple[int, int]]]:
    lines = re.findall(r'points="([^"]*)"', markup)
    return [[(int(x), int(y)) for x, y in (pair.split(",") for pair in line.split())] for line in lines]


def test_a_spike_of_one_report_stays_and_points_are_few(tmp_path: Path) -> None:
    losses = [4.0 - 0.0001 * step for step in range(5000)]
    losses[3210] = 9.5
    run = run_of(tmp_path / "a", losses)
    drawn = sketch(loss_plot(run), [run])
    (points,) = points_of(drawn)
    assert len(points) <= 2 * MOST_BUCKETS // COARSER + 2
    assert points[0][0] == 0 and points[-1][0] == WIDTH
    highest = min(points, key=lambda point: point[1])
    assert abs(highest[0] - WIDTH * 3210 / 4999) <= 1 and 0 < highest[1] < HEIGHT / 10
    assert ">9.5<" in drawn and ">3.5<" in drawn and ">steps 1 to 5,000<" in drawn


def test_runs_share_axes(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a", [3.0, 2.0]), run_of(tmp_path / "b", [2.5, 2.5, 2.5])]
    first, second = points_of(sketch(loss_plot(*runs), runs))
    assert [x for x, _ in first] == [0, WIDTH // 2] and [x for x, _ in second] == [0, WIDTH]
    assert {y for _, y in second} == {HEIGHT // 2}


def test_one_value_is_drawn_in_the_middle_and_none_not_at_all(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", [2.5])
    assert points_of(sketch(loss_plot(run), [run])) == [[(WIDTH // 2, HEIGHT // 2)]]
    nothing = Plot("none", "loss", "None", "", (("training", "no_such_number", "none"),))
    assert sketch(nothing, [run]) == ""
