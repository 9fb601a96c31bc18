"""pretrain sweep: the grid of a command line, runs that are rows, and a sweep that goes on after a kill."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment
from unit.tools.test_report import TINY as TINY_RUN
from unit.train.whole_runs import error_of

from pretraining.checkpoint.lease import Lease
from pretraining.cli import main
from pretraining.config.command_line import assign, read_words
from pretraining.errors import ConfigError
from pretraining.tools import sweep
from pretraining.tools.command_settings import SweepConfig

TINY = [*TINY_RUN[:-1], "num_steps=4", "report_interval=2", "tracker=none"]


def grid(*overrides: str, **flags: str) -> tuple[Any, list[sweep.Combination]]:
    return sweep.read_sweep([*read_words(SweepConfig, [*TINY, *overrides]), *assign(flags)])


def test_every_combination_is_a_run_and_the_last_setting_varies_fastest() -> None:
    settings, found = grid("learning_rate=1e-4, 3e-4", "optimizer=adamw,muon", processes="2")
    assert settings.processes == 2
    assert [dict(each.values) for each in found] == [
        {"learning_rate": rate, "optimizer": name} for rate in ("1e-4", "3e-4") for name in ("adamw", "muon")
    ]
    assert found[3].name == "learning_rate=3e-4,optimizer=muon"
    assert found[3].arguments == (*TINY, "learning_rate=3e-4", "optimizer=muon")


def test_settings_that_are_lists_vary_between_semicolons_and_long_values_have_short_names() -> None:
    _, found = grid("optimizer=my.module:Own", "optimizer_options=a=1,b=2;a=2")
    assert [each.values["optimizer_options"] for each in found] == ["a=1,b=2", "a=2"]
    for one, other in (("x" * 200 + "/a", "x" * 200 + "/b"), ("語" * 110, "語" * 111)):
        words = [*TINY[1:], f"data_path=/data/{one};/data/{other}"]
        names = {each.name for each in sweep.read_sweep(read_words(SweepConfig, words))[1]}
        assert len(names) == 2 and all(len(name.encode()) <= 255 and "/" not in name for name in names)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], ""),
        (["learning_rate=1e-3,1e-3"], "learning_rate"),
        (["learning_rate=1e-3,fast"], "learning_rate=fast"),
        (["seed=1,2", "ckpt_save_path=runs/a"], "--ckpt_save_path"),
        (["seed=1,2", "run_steps=2"], "--run_steps"),
        (["seed=1,2", "dry_run=true"], "--dry_run"),
        (["seed=1,2", "only=2"], "--only=2"),
        (["seed=1,2", "alone"], "'alone'"),
        (["optimizer=adamw,muon", "muon_ns_steps=3"], "optimizer=adamw: --muon_ns_steps"),
    ],
)
def test_an_invalid_sweep_is_refused_before_anything_runs(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        grid(*given)
    assert said in str(error.value)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.thorough
def test_a_failed_run_is_a_row_and_only_unfinished_runs_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    command = ["sweep", *TINY, "max_skipped_steps=1", "learning_rate=1e-2,1e38", f"sweep_path={folder}"]
    failed = "1 of 2 combinations failed: learning_rate=1e38"
    assert failed in str(error_of(lambda: main(command)))
    good, bad = rows_of(folder)
    assert (good["status"], good["step"], good["reason"]) == ("finished", "4", "")
    assert float(good["loss"]) > 0 and float(good["seconds"]) > 0
    assert bad["status"] == "failed" and "finite" in bad["reason"]
    table = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[:3] for line in table[:2]] == [
        ["learning_rate", "loss", "status"],
        ["1e-2", f"{float(good['loss']):.4f}", "finished"],
    ]
    assert table[2].startswith("1e38") and "failed" in table[2]
    assert "step 4/4" in (folder / "learning_rate=1e-2" / "output.log").read_text()

    trained: list[str] = []

    def train(combination: sweep.Combination, run: Path, processes: int) -> None:
        trained.append(combination.name)

    monkeypatch.setattr(sweep, "_train", train)
    (folder / "sweep.csv").unlink()
    assert "1 of 1 combination failed" in str(error_of(lambda: main([*command, "only=1"])))
    assert trained == [] and not (folder / "sweep.csv").exists()  # jobs of an array do not write over each other
    assert failed in str(error_of(lambda: main(command)))  # nothing is trained, and it has failed still
    (folder / "learning_rate=1e38" / "outcome.json").unlink()
    main([*command, "only=0"])
    assert "1 combination not trained" in str(error_of(lambda: main(command)))
    assert trained == ["learning_rate=1e38"] and len(rows_of(folder)) == 2


@pytest.mark.thorough
def test_a_sweep_with_several_processes_per_run_stops_with_its_runs_and_refuses_other_settings(tmp_path: Path) -> None:
    words = [*TINY, "seed=1,2", "processes=2", "checkpoint_interval=2", f"sweep_path={tmp_path}"]
    command = [sys.executable, "-m", "pretraining", "sweep", *words]
    long = [word.replace("num_steps=4", "num_steps=100000") for word in command]
    options: dict[str, Any] = {"cwd": ROOT, "env": plain_environment(), "text": True}
    first = tmp_path / "seed=1"
    stopped, deadline = subprocess.Popen(long, **options), time.monotonic() + PATIENCE_SECONDS
    while not list(first.glob("checkpoints/*/manifest.json")):
        assert time.monotonic() < deadline and stopped.poll() is None
        time.sleep(0.1)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(PATIENCE_SECONDS) == 75
    assert json.loads((first / "run_status.json").read_text())["status"] == "preempted"
    assert not (first / "outcome.json").exists()
    refused = subprocess.run([*long, "batch_size=4"], capture_output=True, **options)
    assert f"{first} is a run with other settings (batch_size=2, batch_size=4)" in refused.stderr


def test_the_outcome_of_a_run_decides_whether_it_is_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["sweep", *TINY, "seed=1,2", f"sweep_path={tmp_path}", "only=0"]
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    outcome = tmp_path / "seed=1" / "outcome.json"
    outcome.parent.mkdir()
    outcome.write_text("{}")  # without a status: the run is started again
    (outcome.parent / "arguments.json").write_text('{"arguments": null}')
    for text, expected, last in (
        ("kill -9 $$", None, "1 combination not trained"),
        ("echo error: out of luck; exit 1", "out of luck", "1 of 1 combination failed: seed=1"),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        assert last in str(error_of(lambda: main(command)))
        assert json.loads(outcome.read_text()).get("reason") == expected
    assert "was killed (exit code -9)" in capsys.readouterr().err


def test_a_run_that_another_process_trains_has_not_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "seed=1"
    run.mkdir()
    (run / "run_status.json").write_text('{"status": "running"}')
    lease = Lease(run)
    lease.acquire()
    try:
        with pytest.raises(SystemExit) as ending:
            main(["sweep", *TINY, "seed=1,2", f"sweep_path={tmp_path}", "only=0"])
    finally:
        lease.release()
    assert ending.value.code == 1 and not (run / "outcome.json").exists()
    said = capsys.readouterr().err
    assert "1 combination not trained" in said and "another process" in said


def test_the_table_is_sorted_by_the_losses_of_finished_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = [("1", "finished", 2.0, 3.0), ("2", "failed", 1.0, 1.0), ("3", "finished", 2.5, 2.0)]
    names = ("lr", "status", "loss", "evaluation_loss")
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) | {"reason": ""} for row in losses]
    assert [line.split()[0] for line in sweep.summary(rows)] == ["lr", "3", "1", "2"]
    rows[0]["evaluation_loss"] = None  # unlike losses are not compared
    assert [line.split()[:2] for line in sweep.summary(rows)[:2]] == [["lr", "loss"], ["1", "2.0000"]]
    _, (combination, _) = grid("seed=1,2")
    logs = tmp_path / combination.name / "logs"
    logs.mkdir(parents=True)
    (logs / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\nbroken\n{"step": 2, "loss": "low"}\n')
    (logs.parent / "outcome.json").write_text("[]")
    found = sweep.row_of(combination, tmp_path)
    assert (found["step"], found["loss"], found["status"]) == (2, None, "not finished")
    assert "1 damaged line" in caplog.text
