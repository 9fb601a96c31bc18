from __future__ import annotations

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretraining.config.training import ReportConfig
from pretraining.observability.trackers import METRICS_FILE, JsonLines, open_trackers


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_metrics_are_one_object_a_line_and_readable_at_once(tmp_path: Path) -> None:
    tracker = JsonLines(tmp_path / "logs", restored_step=0)
    tracker.log(10, {"loss": 2.5, "mfu": None})
    assert lines_of(tmp_path / "logs") == [{"step": 10, "loss": 2.5, "mfu": None}]
    tracker.close()


def test_a_resumed_run_drops_what_it_is_about_to_report_again(tmp_path: Path) -> None:
    first = JsonLines(tmp_path, restored_step=0)
    for step in (10, 20, 30):
        first.log(step, {"loss": float(step)})
    first.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 40, "lo')  # what a killed process leaves
    resumed = JsonLines(tmp_path, restored_step=20)
    resumed.log(30, {"loss": 0.5})
    resumed.close()
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(10, 10.0), (20, 20.0), (30, 0.5)]


def test_a_new_run_in_an_old_folder_starts_its_metrics_anew(tmp_path: Path) -> None:
    first = JsonLines(tmp_path, restored_step=0)
    first.log(10, {"loss": 1.0})
    first.close()
    JsonLines(tmp_path, restored_step=0).close()
    assert lines_of(tmp_path) == []


def test_tensorboard_gets_every_known_number(tmp_path: Path) -> None:
    jsonl, tensorboard = open_trackers(
        ReportConfig(tracker_dir=str(tmp_path / "board")), tmp_path / "logs", restored_step=0
    )
    tensorboard.log(10, {"loss": 2.5, "mfu": None})
    tensorboard.close()
    jsonl.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 2.5)]


def test_without_a_tracker_there_is_metrics_jsonl_alone(tmp_path: Path) -> None:
    trackers = open_trackers(ReportConfig(tracker=()), tmp_path, restored_step=0)
    assert [type(tracker) for tracker in trackers] == [JsonLines]
    trackers[0].close()
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]
