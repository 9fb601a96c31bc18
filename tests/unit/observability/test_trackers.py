from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretraining.config.training import CheckpointConfig, ReportConfig, TrainConfig
from pretraining.errors import ConfigError
from pretraining.observability.trackers import METRICS_FILE, JsonLines, TrackedRun, open_trackers


def lines_of(folder: Path) -> list[dict[str, Any]]:
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


def config_of(run: Path, *trackers: str, tracker_dir: Path | None = None) -> TrainConfig:
    return TrainConfig(
        checkpoint=CheckpointConfig(ckpt_save_path=str(run)),
        report=ReportConfig(tracker=trackers, tracker_dir=None if tracker_dir is None else str(tracker_dir)),
    )


def test_tensorboard_gets_every_known_number(tmp_path: Path) -> None:
    trackers = open_trackers(config_of(tmp_path, "tensorboard", tracker_dir=tmp_path / "board"), 0, {})
    trackers.log(10, {"loss": 2.5, "mfu": None})
    trackers.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 2.5)]
    assert trackers.state_dict() == {}


def test_without_a_tracker_there_is_metrics_jsonl_alone(tmp_path: Path) -> None:
    trackers = open_trackers(config_of(tmp_path), 0, {})
    assert list(trackers.by_name) == [METRICS_FILE]
    trackers.close()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [METRICS_FILE]


class Service:
    """A tracker of the user's own that gives the run an id."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.run_id = run.run_id or f"id-of-{run.name}"

    def log(self, step: int, values: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_tracker_of_the_users_own_gets_settings_name_and_the_id_that_it_gave_before(tmp_path: Path) -> None:
    own = "unit.observability.test_trackers:Service"
    config = config_of(tmp_path / "mine", own)
    first = open_trackers(config, 0, {})
    assert first.state_dict() == {own: "id-of-mine"}
    later = open_trackers(config_of(tmp_path / "moved", own), 7, first.state_dict())
    service: Any = later.by_name[own]
    assert service.run_id == "id-of-mine" and service.run.restored_step == 7 and service.run.config.report.tracker
    for trackers in (first, later):
        trackers.close()


def test_a_tracker_that_cannot_be_found_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tracker=no\.such:Thing: no\.such cannot be imported"):
        open_trackers(config_of(tmp_path, "no.such:Thing"), 0, {})
