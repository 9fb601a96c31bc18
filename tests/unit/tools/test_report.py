"""`pretrain report`: one page that shows what a run's folder holds; no text of a file becomes HTML."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from unit.tools.run_folders import event, training_report, write_lines, write_run

from pretraining.cli import main
from pretraining.errors import ConfigError
from pretraining.tools.commands import PageConfig
from pretraining.tools.report import PLOTS, downsample, render, report
from pretraining.tools.run_records import read_runs


def page_of(*folders: Path) -> str:
    return render(read_runs([str(folder) for folder in folders]))


def cells_of(page: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    after = page.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    return [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in after.split("</tr>")[:-1]]


def test_a_page_of_a_run_sums_it_up_and_draws_what_it_reported(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a"))
    _, row = cells_of(page, "Summary")
    assert row[:4] == ["a", "finished: 40 of 40 steps are done", "40", "1,280"]
    assert row[5:7] == ["4.1000 (best 4.1000 at step 40)", "4.2000 (best 4.2000 at step 40)"]
    titles = [plot.title for plot in PLOTS if f">{plot.title}</text>" in page]
    assert titles == ["Loss", "Perplexity", "Learning rate", "Gradient norm", "Tokens per second and device"]
    assert ">restart<" in page and page.count("<svg") == len(titles)
    events = cells_of(page, "Events")
    assert [each[3] for each in events[1:]] == ["start", "phase", "skip", "checkpoint", "restart", "end"]
    assert ["a", "2", "20", "packages.torch", "2.12", "2.13"] in cells_of(page, "Changes between starts")
    settings = {row[0]: row[1:] for row in cells_of(page, "Settings that are not defaults")}
    assert settings["model.hidden_size"][0] == "16" and "optimizer.adam_eps" not in settings


def test_a_picture_of_several_runs_has_a_line_per_run(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in "abcde"]
    report(PageConfig(tuple(map(str, runs)), str(tmp_path / "a.html"), str(tmp_path / "a.svg")))
    svg = (tmp_path / "a.svg").read_text()
    assert ">Evaluation loss</text>" in svg and ">training<" not in svg
    assert [svg.count(f">{name}</text>") for name in "abcde"] == [1] * 5


def test_the_folder_of_a_sweep_means_its_runs_and_gets_the_page(tmp_path: Path) -> None:
    sweep = tmp_path / "lr"
    write_run(sweep / "lr=1e-3")
    write_run(sweep / "lr=2e-3", "learning_rate=2e-3", shift=0.5)
    write_run(sweep / "lr=5e-4", "learning_rate=5e-4", shift=0.25)
    (sweep / "sweep.csv").write_text("learning_rate,status,loss\n2e-3,finished,4.7\n1e-3,finished,4.2\n5e-4,killed,\n")
    (sweep / "notes").mkdir()
    main(["report", str(sweep)])
    page = (sweep / "report.html").read_text()
    assert [row[0] for row in cells_of(page, "Summary")[1:]] == ["lr=1e-3", "lr=2e-3", "lr=5e-4"]
    head, *rows = cells_of(page, "Sweep, the best run first")
    assert head == ["learning_rate", "status", "loss"] and [row[0] for row in rows] == ["1e-3", "2e-3", "5e-4"]
    (sweep / "sweep.csv").unlink()
    with pytest.raises(SystemExit):  # any other folder of runs is not a run
        main(["report", str(sweep)])


def test_a_page_of_several_runs_has_what_differs(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", "learning_rate=2e-3", shift=0.5))
    assert cells_of(page, "Settings that differ")[1:] == [["optimizer.learning_rate", "none", "0.002"]]
    assert ">a: training<" in page and ">b: evaluation<" in page and ">b: restart<" in page and ">tokens<" in page


def test_texts_of_files_are_no_html_and_no_formula(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a<b>")
    write_lines(run / "logs" / "events.jsonl", [event("<script>alert(1)</script>", 3, text="$x^2$ <img src=x>")])
    write_lines(run / "logs" / "metrics.jsonl", [training_report(1, **{"loss/<i>$\\frac{": 3.0, "custom/mine": 1.0})])
    (run / "run_status.json").write_text(json.dumps({"status": "failed", "reason": "<b>"}))
    page = page_of(run)
    assert not re.search(r"<(script|img|b|i)\b", page) and ">mine</text>" in page


def test_a_run_that_has_reported_nothing_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {model_variant: tiny}\n")
    page = page_of(tmp_path)
    assert "first" in str(cells_of(page_of(ROOT / "tests/golden/run/sharded"), "Mixture"))
    assert "The runs have no reports yet." in page and "There is no logs/metrics.jsonl." in page


def test_a_long_curve_keeps_its_spikes_and_the_page_stays_small(tmp_path: Path) -> None:
    steps = np.arange(50_000.0)
    values = np.sin(steps / 999)
    values[[7, 31_007]] = 99.0, -99.0
    x, y = downsample(steps, values)
    assert len(x) <= 602 and x[0] == 0 and x[-1] == 49_999 and (y[x == 7], y[x == 31_007]) == (99.0, -99.0)
    short = downsample(steps[:9], values[:9])
    assert short[0].tolist() == steps[:9].tolist()
    write_run(tmp_path)
    write_lines(tmp_path / "logs" / "metrics.jsonl", (training_report(step) for step in range(1, 20_000)))
    assert len(page_of(tmp_path)) < 1_000_000


def test_pages_and_pictures_are_written_to_the_given_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    main(["report", str(run)])
    main(["report", str(run), str(write_run(tmp_path / "b"))])
    main(["report", str(run), "--output_path=new/page.html", "--picture=new/loss.svg"])
    main(["report", str(run), "--output_path=new/page.html", "--picture=loss.png"])
    assert all(Path(each).exists() for each in ("a/report.html", "report.html", "new/page.html"))
    assert "<svg" in Path("new/loss.svg").read_text() and Path("loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags",
    [
        {"run_path": ()},
        {"run_path": ("{0}/gone",)},
        {"output_path": "{0}"},
        {"output_path": "{0}/a/logs/metrics.jsonl"},
        {"picture": "loss.pdf"},
    ],
)
def test_an_impossible_report_is_one_error_and_writes_nothing(tmp_path: Path, flags: dict[str, object]) -> None:
    run = write_run(tmp_path / "a")
    given: dict[str, object] = {"run_path": (str(run),)}
    for name, value in flags.items():
        given[name] = value.format(tmp_path) if isinstance(value, str) else tuple(v.format(tmp_path) for v in value)  # type: ignore[attr-defined]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as error:
        report(PageConfig(**given))  # type: ignore[arg-type]
    assert error.value.settings == tuple(flags)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_missing_package_is_one_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        report(PageConfig((str(write_run(tmp_path / "a")),)))
