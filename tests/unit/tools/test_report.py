"""`pretrain report`: one page that shows what a run's folder holds; no text of a file becomes HTML."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from pretraining.cli import main
from pretraining.config.read import load_train_config
from pretraining.config.recipe_files import dump_config
from pretraining.errors import ConfigError
from pretraining.files import with_checksum
from pretraining.tools.command_settings import PageConfig
from pretraining.tools.report import PLOTS, downsample, render, report
from pretraining.tools.run_records import read_run, read_runs
from pretraining.train.run_status import RunStatus

TINY = [
    *("use_dummy_dataset=true", "model_variant=tiny", "hidden_size=16", "num_attention_heads=2", "num_hidden_layers=1"),
    *("vocab_size=64", "seq_length=16", "batch_size=2", "num_steps=40"),
]


def written(seconds: int) -> str:
    return f"2026-11-20T10:{seconds // 60 % 60:02d}:{seconds % 60:02d}Z"


def training_report(step: int, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, with a second per step."""
    at = {"step": step, "time": written(step), "tokens_seen": step * 32}
    numbers = {"loss": 4.0 + 4.0 / (1 + step), "z_loss": 0.0, "learning_rate": 1e-3, "learning_rate_group_0": 1e-3}
    return {**at, **numbers, "grad_norm": 1.0, "tokens_per_second_per_gpu": 64.0, "mfu": None, **values}


def evaluation_report(step: int, loss: float) -> dict[str, Any]:
    at = {"step": step, "time": written(step), "tokens_seen": step * 32}
    return {**at, "evaluation_loss": loss, "evaluation_perplexity": math.exp(loss)}


def event(name: str, at: int, /, **details: Any) -> dict[str, Any]:
    return {"step": at, "time": written(at), "event": name, **details}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder: Path, *overrides: str, status: str = "finished", shift: float = 0.0) -> Path:
    """A run of 40 steps with two starts, two evaluations and a skipped update; its losses are shifted."""
    reports = [training_report(step, loss=4.0 + shift + 4.0 / step) for step in range(2, 41, 2)]
    reports.insert(10, evaluation_report(20, 4.5 + shift))
    reports.append(evaluation_report(40, 4.2 + shift))
    write_lines(folder / "logs" / "metrics.jsonl", reports)
    events = [
        event("start", 0, number=1),
        event("phase", 0, global_batch_size=2, weights={"dummy": 1}),
        event("skip", 7, reason="loss or gradient is not finite", in_a_row=1),
        event("checkpoint", 20, kind="interval", path="runs/a/checkpoints/step_20_ckp"),
        event("restart", 20, number=2, previous_status="killed", previous_reason=""),
        event("end", 40, status="finished", reason="40 of 40 steps are done"),
    ]
    write_lines(folder / "logs" / "events.jsonl", events)
    (folder / "config.yaml").write_text(dump_config(load_train_config([*TINY, *overrides])))
    ended = RunStatus(status=status, step=40, reason="40 of 40 steps are done", starts=2, started_at_step=20)
    (folder / "run_status.json").write_text(json.dumps(with_checksum(asdict(ended))))
    starts = [
        {"time": written(second), "step": second, "command": "pretrain train", "packages": {"torch": torch}}
        for second, torch in ((0, "2.12"), (20, "2.13"))
    ]
    (folder / "logs" / "environment.json").write_text(json.dumps(starts))
    return folder


def page_of(*folders: Path) -> str:
    return render(read_runs([str(folder) for folder in folders]))


def cells_of(page: str, heading: str) -> list[list[str]]:
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


def test_the_folder_of_a_sweep_means_its_runs_and_gets_the_page(tmp_path: Path) -> None:
    sweep = tmp_path / "lr"
    write_run(sweep / "lr=1e-3")
    write_run(sweep / "lr=2e-3", "learning_rate=2e-3", shift=0.5)
    write_run(sweep / "lr=5e-4", "learning_rate=5e-4", shift=0.25)
    (sweep / "sweep.csv").touch()
    (sweep / "notes").mkdir()
    main(["report", str(sweep)])
    page = (sweep / "report.html").read_text()
    assert [row[0] for row in cells_of(page, "Summary")[1:]] == ["lr=1e-3", "lr=2e-3", "lr=5e-4"]
    (sweep / "sweep.csv").unlink()
    with pytest.raises(SystemExit):  # any other folder of runs is not a run
        main(["report", str(sweep)])


def test_a_page_and_a_picture_of_several_runs_have_what_differs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "learning_rate=2e-3", shift=0.5)]
    report(PageConfig(tuple(map(str, runs)), str(tmp_path / "page.html"), str(tmp_path / "picture.svg")))
    page, svg = ((tmp_path / name).read_text() for name in ("page.html", "picture.svg"))
    assert cells_of(page, "Settings that differ")[1:] == [["optimizer.learning_rate", "none", "0.002"]]
    assert ">a: training<" in page and ">b: evaluation<" in page and ">b: restart<" in page and ">tokens<" in page
    assert ">Evaluation loss</text>" in svg and ">training<" not in svg
    assert [svg.count(f">{name}</text>") for name in "ab"] == [1, 1]


def test_labels_of_curves_are_the_texts_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # of a user's matplotlibrc
    names = ["_a", "$x$", "$\\frac{", "_$", "b"]
    for count in (5, 9):  # in the plot, and below it
        names += [f"_{number}" for number in range(count - len(names))]
        run = write_run(tmp_path / f"_{count}")
        losses = {f"evaluation_loss/{name}": 3.0 + number for number, name in enumerate(names)}
        write_lines(
            run / "logs/metrics.jsonl", [evaluation_report(2, 4.0) | losses, evaluation_report(4, 3.9) | losses]
        )
        main(["report", str(run), f"--picture={tmp_path}/picture.svg"])
        svg = (tmp_path / "picture.svg").read_text()
        assert [name for name in names if f">{name}</text>" not in svg] == []
        main(["report", str(run), f"--picture={tmp_path}/picture.png"])
    runs = [str(write_run(tmp_path / name)) for name in ("_one", "two")]
    main(["report", *runs, f"--picture={tmp_path}/picture.svg", f"--output_path={tmp_path}/two.html"])
    assert ">_one</text>" in (tmp_path / "picture.svg").read_text()


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


def test_an_impossible_report_is_one_error_and_writes_nothing(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    gone: tuple[str, ...] = (f"{run}/gone", f"{run}/run_status.json")
    for runs, flags in (
        *(((), {}), (gone, {})),
        *(((run,), {"output_path": path}) for path in (str(tmp_path), f"{run}/logs/metrics.jsonl")),
        ((run,), {"picture": "loss.pdf"}),
    ):
        with pytest.raises(ConfigError) as error:
            report(PageConfig(runs, **flags))
        assert error.value.settings == (tuple(flags) or ("run_path",))
        assert len(error.value.problems) == (2 if runs is gone else 1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_missing_package_is_one_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        report(PageConfig((str(write_run(tmp_path / "a")),)))


# A damaged record leaves a note, and the others are read


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run_status.json", "{"),
        ("logs/metrics.jsonl", "nothing\n"),
        ("logs/metrics.jsonl", '{"step": 1, '),
        ("logs/metrics.jsonl", '\xff\n[1]\n{"step": NaN}\n{"step": 1' + "0" * 400 + "}\n"),
        ("logs/events.jsonl", '{"event": "start"}\n'),
        ("logs/environment.json", "{}"),
        ("logs/environment.json", "[1]"),
        ("config.yaml", "a: ["),
    ],
)
def test_a_damaged_record_is_dropped_with_a_message(tmp_path: Path, file: str, content: str) -> None:
    write_run(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    run = read_run(tmp_path, "a")
    is_nothing_lost = content == "{}"
    assert is_nothing_lost or any(Path(file).name in note for note in run.notes), run.notes
    others = (run.settings, run.events, len(run.training), run.environments)
    assert sum(not each for each in others) <= 1


@pytest.mark.parametrize("file", ["logs/metrics.jsonl", "logs/events.jsonl", "logs/environment.json", "config.yaml"])
def test_folders_and_pipes_in_the_place_of_files_are_notes(tmp_path: Path, file: str) -> None:
    for number, make in enumerate((os.mkdir, os.mkfifo)):
        folder = write_run(tmp_path / str(number))
        (folder / file).unlink()
        make(folder / file)
        assert any(note.startswith(file) for note in read_run(folder, "a").notes)


def test_a_running_status_without_a_fresh_lease_means_killed(tmp_path: Path) -> None:
    write_run(tmp_path, status="running")
    assert (read_run(tmp_path, "a").state, read_run(tmp_path, "a").reason) == ("killed", "")
    held = tmp_path / "lease.json"
    held.write_text("{}")
    assert read_run(tmp_path, "a").state == "running"
    os.utime(held, (time.time() - 61, time.time() - 61))
    assert read_run(tmp_path, "a").state == "killed"


def test_runs_with_the_same_name_are_labelled_by_their_paths(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "a") for parent in ("x", "y")]
    assert [run.name for run in read_runs([str(folder) for folder in folders])] == [str(folder) for folder in folders]
