"""Reading a run's folder: whole, half written, damaged, and none at all."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT
from unit.tools.report.run_folders import TOKENS_A_STEP, event, training_report, write_lines, write_run

from pretraining.checkpoint import lease
from pretraining.errors import ConfigError
from pretraining.observability import environment
from pretraining.tools.report import run_record
from pretraining.tools.report.run_record import flattened, mixture_of, read_run, read_runs, short_names


def read(folder: Path) -> run_record.RunRecord:
    return read_run(folder, "a")


def test_a_whole_run_is_read_without_a_note(tmp_path: Path) -> None:
    run = read(write_run(tmp_path))
    assert run.notes == [] and (run.state, run.reason) == ("finished", "40 of 40 steps are done")
    assert len(run.training) == 20 and run.evaluation_curves["evaluation_loss"].values.tolist() == [4.5, 4.2]
    assert [each.kind for each in run.events[:3]] == ["start", "phase", "skip"]
    assert run.settings["model.hidden_size"] == "16" and run.flops_per_token is not None
    assert [record["packages.torch"] for record in run.environments] == ["2.12", "2.13"]
    assert run.latest() - run.began == 40.0


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_folders_of_earlier_versions_are_read(form: str) -> None:
    run = read(ROOT / "tests" / "golden" / "run" / form)
    assert run.state in ("finished", "preempted") and "loss" in run.training_curves and run.flops_per_token
    assert [row.state for row in run.checkpoints] and {part.dataset for part in run.mixture} == {"first", "second"}
    assert all(abs(part.asked - part.realised) * part.samples <= 2 for part in run.mixture)


def test_tokens_at_a_step_lie_between_those_of_reports(tmp_path: Path) -> None:
    run = read(write_run(tmp_path))
    assert run.tokens_at([0, 7, 40]) == [0.0, 7.0 * TOKENS_A_STEP, 40.0 * TOKENS_A_STEP]
    assert math.isnan(run.tokens_at([41])[0])


def test_a_folder_of_nothing_but_settings_is_a_run_that_has_reported_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    (tmp_path / "config.yaml").write_text((tmp_path / "whole" / "config.yaml").read_text())
    run = read_runs([str(tmp_path)])[0]
    assert run.state == "unknown" and run.settings and not run.training_curves and math.isnan(run.began)
    assert "There is no run_status.json." in run.notes and "There is no logs/metrics.jsonl." in run.notes


@pytest.mark.parametrize(
    ("file", "content", "note"),
    [
        ("run_status.json", "{", "run_status.json is damaged."),
        ("run_status.json", '{"status": 3}', "run_status.json is damaged."),
        ("logs/metrics.jsonl", "", "logs/metrics.jsonl has no report."),
        ("logs/metrics.jsonl", "nothing\n", "logs/metrics.jsonl: 1 damaged line left out."),
        ("logs/metrics.jsonl", '{"step": 1, ', "logs/metrics.jsonl: the last line is cut"),
        ("logs/events.jsonl", '{"step": 1}\n', "logs/events.jsonl: 1 damaged line left out."),
        ("logs/environment.json", "{}", "logs/environment.json is damaged: it is no list of starts."),
        ("logs/environment.json", "[", "logs/environment.json cannot be read"),
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("config.yaml", "model: {num_attention_heads: 7}", "config.yaml cannot be read"),
    ],
)
def test_a_damaged_file_costs_what_it_holds_and_a_note(tmp_path: Path, file: str, content: str, note: str) -> None:
    write_run(tmp_path)
    (tmp_path / file).write_text(content)
    run = read(tmp_path)
    assert any(each.startswith(note) for each in run.notes), run.notes


@pytest.mark.parametrize("file", ["logs/metrics.jsonl", "logs/events.jsonl", "logs/environment.json", "config.yaml"])
def test_folders_and_pipes_in_the_place_of_files_are_notes(tmp_path: Path, file: str) -> None:
    for number, make in enumerate((os.mkdir, os.mkfifo)):
        folder = write_run(tmp_path / str(number))
        (folder / file).unlink()
        make(folder / file)
        assert any(note.startswith(f"{file} cannot be read") for note in read(folder).notes)


def test_a_run_that_says_running_was_killed_unless_its_lease_is_fresh(tmp_path: Path) -> None:
    write_run(tmp_path, status="running")
    assert (read(tmp_path).state, read(tmp_path).reason) == ("killed", "")
    held = tmp_path / "lease.json"
    held.write_text("{}")
    assert read(tmp_path).state == "running"
    os.utime(held, (time.time() - 61, time.time() - 61))
    assert read(tmp_path).state == "killed"


def test_names_of_files_are_those_that_training_writes() -> None:
    assert (run_record.LEASE_FILE, run_record.LEASE_STALE_SECONDS) == (lease.LEASE, lease.STALE_SECONDS)
    assert run_record.ENVIRONMENT_FILE == environment.ENVIRONMENT_FILE


def test_what_is_no_run_is_refused_with_all_problems_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "sweep" / "first")
    given = [tmp_path / name for name in ("gone", "file", "empty", "sweep")]
    with pytest.raises(ConfigError) as raised:
        read_runs([str(path) for path in given])
    gone, file, empty, sweep = raised.value.problems
    assert gone.endswith("there is no such folder") and "is a file" in file
    assert "is no run: it has none of config.yaml, run_status.json, checkpoints, logs/metrics.jsonl" in empty
    assert sweep.endswith(f"It holds runs: give {tmp_path / 'sweep' / 'first'}, or several with spaces between")


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart() -> None:
    assert short_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert short_names([Path("/x/a"), Path("/y/a"), Path("/y/b")]) == ["x/a", "y/a", "b"]
    assert short_names([Path("/x/a"), Path("/x/a")]) == ["/x/a (1)", "/x/a (2)"]
    assert short_names([Path("/")]) == ["/"]


def test_events_beyond_what_a_page_can_hold_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "MOST_EVENTS", 3)
    run = read(write_run(tmp_path))
    assert len(run.events) == 3
    assert "logs/events.jsonl: the first 3 events are shown, 4 later ones are left out." in run.notes


def test_reports_that_go_back_are_a_note(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_lines(tmp_path / "logs" / "metrics.jsonl", [training_report(2), training_report(1)])
    assert any("1 report of no later step" in note for note in read(tmp_path).notes)


def test_texts_of_an_object_have_dotted_names() -> None:
    assert flattened({"a": {"b": 1, "c": [1, "x"]}, "d": None, "e": "text"}) == {
        **{"a.b": "1", "a.c": '[1, "x"]', "d": "null", "e": "text"}
    }


def manifest(step: int, data: dict[str, Any]) -> Any:
    return SimpleNamespace(step=step, data=data)


def test_the_realised_mixture_is_counted_from_the_state_of_the_data() -> None:
    first = {"first_step": 0, "first_sample": 0, "global_batch_size": 10, "weights": {"code": 1, "web": 3}}
    data = {"phases": [{**first, "base_counts": {"code": 0, "web": 0}}], "skipped": [], "next_sample": 100}
    code, web = mixture_of(manifest(10, data))
    assert (code.dataset, code.asked, code.samples, code.realised) == ("code", 0.25, 25, 0.25)
    assert (web.samples, web.first_step, web.end_step) == (75, 0, 10)
    assert mixture_of(manifest(0, {})) == []


def test_a_damaged_checkpoint_costs_the_mixture_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_40_ckp"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    run = read(tmp_path)
    assert run.mixture == [] and [row.state for row in run.checkpoints] == ["damaged"]


def test_an_event_keeps_its_details(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_lines(tmp_path / "logs" / "events.jsonl", [event("sample", 40, text="x", prompt="")])
    found = read(tmp_path).events[0]
    assert (found.kind, found.step, dict(found.details)) == ("sample", 40.0, {"text": "x", "prompt": ""})
    assert json.dumps(dict(found.details))
