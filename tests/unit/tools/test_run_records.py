"""What is read of a run's folder: all of a whole one, and of a damaged one what is left, with a note."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from unit.tools.run_folders import training_report, write_lines, write_run

from pretraining.checkpoint import lease
from pretraining.errors import ConfigError
from pretraining.observability import environment
from pretraining.observability.report_file import read_lines
from pretraining.tools import run_records
from pretraining.tools.run_records import Columns, read_run, read_runs


def test_a_whole_run_is_read_without_a_note(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path), "a")
    assert run.notes == [] and (run.state, run.reason) == ("finished", "40 of 40 steps are done")
    assert len(run.training) == 20 and run.evaluations["evaluation_loss"].tolist() == [4.5, 4.2]
    assert [each["event"] for each in run.events[:3]] == ["start", "phase", "skip"]
    assert run.settings["model.hidden_size"] == "16"
    assert [record["packages.torch"] for record in run.environments] == ["2.12", "2.13"]
    assert np.diff(run.training["time"]).tolist() == [2.0] * 19


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_folders_of_earlier_versions_are_read(form: str) -> None:
    run = read_run(ROOT / "tests" / "golden" / "run" / form, "a")
    assert run.state in ("finished", "preempted") and np.isfinite(run.training.last("loss"))
    assert {part.dataset for part in run.mixture} == {"first", "second"}
    assert all(abs(part.asked - part.realised) * part.samples <= 2 for part in run.mixture)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run_status.json", "{"),
        ("run_status.json", '{"status": 3}'),
        ("logs/metrics.jsonl", "nothing\n"),
        ("logs/metrics.jsonl", '{"step": 1, '),
        ("logs/metrics.jsonl", '{"loss": 1}\n'),
        ("logs/events.jsonl", '{"event": "start"}\n'),
        ("logs/environment.json", "{}"),
        ("logs/environment.json", "[1]"),
        ("logs/environment.json", "["),
        ("config.yaml", "a: ["),
        ("checkpoints/step_40_ckp/manifest.json", "{}"),
    ],
)
def test_a_damaged_record_is_dropped_with_a_message(tmp_path: Path, file: str, content: str) -> None:
    write_run(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    run = read_run(tmp_path, "a")
    is_nothing_lost = content == "{}"  # but for the mixture
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


def test_names_of_files_are_those_that_training_writes() -> None:
    assert (run_records.LEASE_FILE, run_records.LEASE_STALE_SECONDS) == (lease.LEASE, lease.STALE_SECONDS)
    assert run_records.ENVIRONMENT_FILE == environment.ENVIRONMENT_FILE


def test_paths_without_a_run_are_refused_in_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as raised:
        read_runs([str(tmp_path / name) for name in ("gone", "file")])
    assert len(raised.value.problems) == 2 and raised.value.settings == ("run_path",)


def test_runs_with_the_same_name_are_labelled_by_their_paths(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "a") for parent in ("x", "y")]
    assert [run.name for run in read_runs([str(folder) for folder in folders])] == [str(folder) for folder in folders]


def test_damaged_lines_between_others_are_dropped(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [training_report(1), training_report(2)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"step": NaN}\n{"step": 1' + b"0" * 400 + b'}\n{"step": 3}\n')
    notes: list[str] = []
    steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl", notes)]
    assert steps == [1, 2, 3] and len(notes) == 1 and "4 damaged lines" in notes[0]
    columns = Columns()
    columns.add({"step": 1, "time": "never", "text": "x"})
    assert list(columns) == ["step"]
