"""The experiments of docs/experiments.md: every one is a sweep that would start, and the tables say what runs say."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from pretraining.tools.sweep import read_sweep
from scripts.experiments import (
    BEST,
    LEVERS,
    RATES,
    Run,
    by_seed,
    command_of,
    draw,
    experiments,
    levers_table,
    rates_table,
    tokens_until,
    winners_table,
)


@pytest.mark.parametrize("name", experiments())
def test_an_experiment_is_a_sweep_of_settings_that_fit_each_other(name: str, tmp_path: Path) -> None:
    _, _, package, verb, *flags = command_of(name, tmp_path, Path("data/demo"))
    assert (package, verb) == ("pretraining", "sweep")
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    assert len(read_sweep((), given)[1]) in (2, 3, 4)


def test_the_best_rates_are_among_those_that_are_tried() -> None:
    assert all(rate in RATES[name] for name, rate in BEST.items())


def write_sweep(folder: Path, name: str, varied: str, losses: dict[str, list[float]]) -> None:
    """Writes what `pretrain sweep` leaves of runs with these held-out losses, one each 100 tokens."""
    rows: list[dict[str, object]] = []
    for value, values in losses.items():
        run = folder / name / f"{varied}={value}"
        (run / "logs").mkdir(parents=True)
        reports = [{"tokens_seen": 100 * (number + 1), "evaluation_loss": loss} for number, loss in enumerate(values)]
        (run / "logs" / "metrics.jsonl").write_text("".join(f"{json.dumps(report)}\n" for report in reports))
        rows.append({"number": len(rows), varied: value, "status": "finished" if values else "failed", "run": run})
    with (folder / name / "sweep.csv").open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sweep(tmp_path, "r_adamw", "learning_rate", {"1e-3": [6.0, 5.0], "3e-3": [5.0, 4.0], "1e-2": []})
    write_sweep(tmp_path, "seeds_adamw", "seed", {"1": [5.0, 4.02], "2": [5.0, 3.98]})
    write_sweep(tmp_path, "r_muon", "learning_rate", {"1e-2": [4.5, 3.5]})
    write_sweep(tmp_path, "wsd", "seed", {"2023": [5.0, 3.8], "1": [5.0, 3.82], "2": [5.0, 3.81]})
    write_sweep(tmp_path, "best_fit", "seed", {"2023": [5.0, 4.05], "1": [5.0, 4.0]})
    return tmp_path


def test_tokens_until_a_loss_lie_on_the_line_between_evaluations() -> None:
    run = Run({}, "finished", ((100, 5.0), (200, 4.0)))
    assert tokens_until(4.25, run) == 175
    assert tokens_until(3.9, run) is None


def test_rates_are_those_of_one_seed_and_a_failed_run_is_a_row(folder: Path) -> None:
    told = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in rates_table(folder).splitlines()[2:]]
    adamw = [("adamw", "1e-3", "5.000"), ("adamw", "3e-3", "4.000"), ("adamw", "1e-2", "failed")]
    assert told == [*adamw, ("muon", "1e-2", "3.500")]


def test_winners_have_mean_range_and_the_tokens_that_they_save(folder: Path) -> None:
    assert set(by_seed("adamw", folder)) == {"2023", "1", "2"}
    table = winners_table(folder)
    assert "4.000 (3.980 to 4.020)" in table
    muon = next(line for line in table.splitlines() if "muon" in line)
    assert muon.split("|")[-2].strip() == "0.75"


def test_a_lever_counts_where_its_difference_is_above_twice_what_seeds_make(folder: Path) -> None:
    wsd, best_fit = levers_table(folder).splitlines()[2:]
    assert "-0.190 (-0.200 to -0.170)" in wsd and wsd.endswith("yes |")
    assert "+0.015 (-0.020 to +0.050)" in best_fit and "2 |" in best_fit and best_fit.endswith("no |")


def test_pictures_are_drawn_of_what_is_there(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (extra report)")
    draw(folder, tmp_path)
    assert "</svg>" in (tmp_path / "experiments_optimizers.svg").read_text()
    assert all(name.split("_")[0] in (tmp_path / "experiments_levers.svg").read_text() for name in ("wsd", "best_fit"))
    assert LEVERS
