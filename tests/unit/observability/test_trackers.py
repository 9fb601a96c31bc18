from __future__ import annotations

import json
import logging
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from helpers import PATIENCE_SECONDS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pretraining.config.plugins import load_plugin
from pretraining.config.read import load_train_config
from pretraining.config.training import CheckpointConfig, ReportConfig, TrainConfig
from pretraining.errors import ConfigError
from pretraining.observability import report_file
from pretraining.observability import trackers as trackers_module
from pretraining.observability.report_file import Sink
from pretraining.observability.tensorboard import TensorBoard
from pretraining.observability.trackers import (
    METRICS_FILE,
    QueuedSink,
    TrackedRun,
    Trackers,
    open_metrics,
    open_trackers,
)
from pretraining.progress import PENDING_EVALUATION, PENDING_TASKS


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def metrics_in(folder: Path, restored_step: int) -> Sink:
    return open_metrics(folder / METRICS_FILE, restored_step)


def test_a_resume_drops_lines_that_it_repeats_and_a_new_run_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1e9)
    first = metrics_in(tmp_path / "logs", 0)
    for step in (10, 20, 30):
        first.log(step, {"loss": float(step), "mfu": None})
    line = {"step": 10, "time": "2001-09-09T01:46:40Z", "loss": 10.0, "mfu": None}
    assert lines_of(tmp_path / "logs")[0] == line  # readable immediately
    first.close()
    with (tmp_path / "logs" / METRICS_FILE).open("a") as file:
        file.write('{"step": "4"}\n' + "[" * 100_000 + '\n{"step": 40, "lo')  # damage, a partial line
    resumed = metrics_in(tmp_path / "logs", 20)
    resumed.log(30, {"loss": 0.5})
    resumed.close()
    kept = [(line["step"], line["loss"]) for line in lines_of(tmp_path / "logs")]
    assert kept == [(10, 10.0), (20, 20.0), (30, 0.5)]
    metrics_in(tmp_path / "logs", 0).close()
    assert lines_of(tmp_path / "logs") == []


@pytest.mark.parametrize(("is_pending", "kept"), [(True, [10, 10, 20]), (False, [10, 10, 20, 20])])
def test_a_repeated_evaluation_drops_its_earlier_line(is_pending: bool, kept: list[int], tmp_path: Path) -> None:
    first = metrics_in(tmp_path, 0)
    for step in (10, 20):
        first.log(step, {"loss": 1.0})
        first.log(step, {"evaluation_loss": 2.0})
    first.close()
    open_metrics(tmp_path / METRICS_FILE, 20, [PENDING_EVALUATION] if is_pending else []).close()
    assert [line["step"] for line in lines_of(tmp_path)] == kept


@pytest.mark.parametrize("pending", [[], [PENDING_EVALUATION], [PENDING_TASKS], [PENDING_EVALUATION, PENDING_TASKS]])
def test_sets_may_be_pending_after_the_tasks_of_a_step_and_the_reverse(pending: list[str], tmp_path: Path) -> None:
    first = metrics_in(tmp_path, 0)
    for name in ("loss", "evaluation_task/a/acc", "evaluation_loss"):
        first.log(20, {name: 1.0})
    first.close()
    open_metrics(tmp_path / METRICS_FILE, 20, pending).close()
    kept = {name for line in lines_of(tmp_path) for name in line}
    assert "loss" in kept
    assert ("evaluation_loss" in kept) == (PENDING_EVALUATION not in pending)
    assert ("evaluation_task/a/acc" in kept) == (PENDING_TASKS not in pending)


def config_of(run: Path, *trackers: str, tracker_dir: Path | None = None) -> TrainConfig:
    return TrainConfig(
        checkpoint=CheckpointConfig(ckpt_save_path=str(run)),
        report=ReportConfig(tracker=trackers, tracker_dir=None if tracker_dir is None else str(tracker_dir)),
    )


OWN = "unit.observability.test_trackers:Service"


class Service:
    """A user-defined tracker that gives the run an id."""

    told: TrackedRun

    def __init__(self, run: TrackedRun) -> None:
        type(self).told = run
        self.run_id = run.run_id or f"id-of-{run.name}"

    def log(self, step: int, values: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_user_defined_tracker_gets_settings_name_and_the_id_of_the_checkpoint(tmp_path: Path) -> None:
    first = open_trackers(config_of(tmp_path / "mine", OWN), 0, {})
    assert first.state_dict() == {OWN: "id-of-mine"}
    without = open_trackers(config_of(tmp_path / "mine", "tensorboard"), 7, first.state_dict() | {"damaged": 3})
    assert without.state_dict() == first.state_dict()  # a start without it keeps its id
    later = open_trackers(config_of(tmp_path / "moved", OWN), 7, without.state_dict())
    told = load_plugin("tracker", OWN).told  # the module as user code imports it
    assert (told.run_id, told.restored_step, told.name) == ("id-of-mine", 7, "moved") and told.config.report.tracker
    for trackers in (first, without, later):
        trackers.close()


def test_the_tracker_of_an_earlier_version_is_refused_with_the_file_that_holds_the_same() -> None:
    with pytest.raises(ConfigError, match=r"tracker=jsonl: not known \(logs/metrics.jsonl in the run's folder"):
        load_train_config(["tracker=jsonl", "use_dummy_dataset=true"])


@pytest.mark.parametrize("name", ["no.such:Thing", "wandb", "mlflow"])
def test_a_tracker_that_cannot_be_found_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, path = threading.active_count(), tmp_path / "packages"
    for package in ("wandb", "mlflow"):
        (path / package).mkdir(parents=True)  # an empty folder of its name is no package
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [str(path), *(each for each in sys.path if "site-packages" not in each)])
    words = f"needs the `{name}` package: pip install" if "." not in name else ""
    with pytest.raises(ConfigError, match=words or None) as error:
        open_trackers(config_of(tmp_path, name), 0, {})
    assert error.value.settings == ("tracker",) and threading.active_count() <= before


# Full disks and missing services


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """A full disk: a write is cut at the free space, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def scalars_of(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.parametrize(("most", "kept"), [(100, [1, 2, 3, 4, 5]), (2, [1, 4, 5])])
def test_reports_that_find_no_room_wait_up_to_a_number_and_are_written_once_there_is_some(
    most: int, kept: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    monkeypatch.setattr(report_file, "MAX_PENDING", most)
    run = TrackedRun(config_of(tmp_path), "run", tmp_path / "logs", 0)
    curves = TensorBoard(run)
    tensorboard = Sink("tensorboard", lambda *report: curves.log(*report[:2]), curves.close)
    trackers = Trackers({METRICS_FILE: metrics_in(run.folder, 0), "tensorboard": tensorboard})
    metrics = tmp_path / "logs" / METRICS_FILE
    trackers.log(1, {"loss": 1.0})
    with no_file_longer_than(metrics.stat().st_size + 10):
        for step in (2, 3, 4):
            trackers.log(step, {"loss": float(step)})
        assert [line["step"] for line in lines_of(tmp_path / "logs")] == [1]  # no half line
    assert len(caplog.messages) == 2 and str(metrics) in caplog.messages[0]  # one of each file
    trackers.log(5, {"loss": 5.0})
    trackers.close()
    assert len(caplog.messages) == (4 if most == 100 else 6)  # lost reports at the end
    assert [line["step"] for line in lines_of(tmp_path / "logs")] == kept
    assert scalars_of(tmp_path / "logs", "loss") == [(step, float(step)) for step in kept]


def queued(tracker: Any) -> QueuedSink:
    return QueuedSink("--tracker=mine", lambda: tracker)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("the service has hung up"), KeyError("a mistake of mine"), SystemExit("it has left")]
)
def test_a_failing_tracker_is_one_warning(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Service):
        def log(self, step: int, values: dict[str, Any]) -> None:
            raise error

        def close(self) -> None:
            raise OSError("still")

    run = TrackedRun(config_of(tmp_path), "run", tmp_path, 0)
    trackers = Trackers({"mine": queued(Failing(run)), METRICS_FILE: metrics_in(tmp_path, 0)})
    for step in (1, 2):
        trackers.log(step, {})
    trackers.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]
    assert [str(error.args[0]) in message for message in caplog.messages] == [True, False]
    assert "2 reports" in caplog.messages[1]


class Slow(Service):
    """A service that only answers once released; it records steps and the run's end."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.threads: set[int] = set()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.threads.add(threading.get_ident())
        self.is_asked.set()
        self.may_answer.wait(PATIENCE_SECONDS)
        self.calls.append(step)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(type(sys.exception()))


def test_only_its_thread_waits_for_a_slow_tracker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers_module, "MAX_PENDING", 3)
    slow = Slow()
    sink = queued(slow)
    sink.await_start()
    sink.log(0, {})
    assert slow.is_asked.wait(PATIENCE_SECONDS)
    for step in range(1, 7):
        sink.log(step, {})
    slow.may_answer.set()
    sink.close()
    assert slow.calls == [0, 1, 2, 3, type(None)] and "3 reports" in caplog.text
    assert len(slow.threads) == 1 and threading.get_ident() not in slow.threads


def test_a_hanging_tracker_delays_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trackers_module, "START_SECONDS", 0.01)
    monkeypatch.setattr(trackers_module, "FINISH_SECONDS", 0.01)
    may_answer = threading.Event()

    def start() -> Any:
        may_answer.wait(PATIENCE_SECONDS)
        raise ValueError("no answer\nat all")

    sink = QueuedSink("--tracker=mine", start)
    sink.await_start()
    sink.log(1, {})
    sink.close()
    assert len(caplog.messages) == 2
    may_answer.set()
    sink._thread.join()
    sink.log(2, {})
    sink.close()
    assert len(caplog.messages) == 3 and caplog.messages[2].count("\n") == 0


@pytest.mark.parametrize("error", [ConnectionError(), TimeoutError(), KeyError()])
def test_a_service_that_is_away_at_the_start_refuses_no_run_and_a_mistake_does(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Service, run: TrackedRun) -> None:
        raise error

    monkeypatch.setattr(load_plugin("tracker", OWN), "__init__", refuse)
    if isinstance(error, KeyError):
        with pytest.raises(ConfigError) as refused:
            open_trackers(config_of(tmp_path, OWN), 0, {})
        assert refused.value.settings == ("tracker",)
        return
    trackers = open_trackers(config_of(tmp_path, OWN), 0, {OWN: "earlier"})
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    assert len(caplog.messages) == 1 and trackers.state_dict() == {OWN: "earlier"}


# Damage


def test_a_flipped_bit_of_metrics_costs_one_line_and_no_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / METRICS_FILE
    first = metrics_in(tmp_path, 0)
    for step in (10, 20, 30, 40):
        first.log(step, {"loss": 2.5, "mfu": None})
    first.close()
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        caplog.clear()
        metrics_in(tmp_path, 30).close()
        kept = path.read_bytes().splitlines()
        assert len([line for line in kept if line in content.splitlines()]) >= 1
        assert all(json.loads(line)["step"] <= 30 for line in kept)
        assert all(message == f"{path}: 1 damaged line left out." for message in caplog.messages)


def test_tensorboard_gets_numbers_and_settings_and_shows_a_repeated_step_once(tmp_path: Path) -> None:
    for restored_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        trackers = open_trackers(config_of(tmp_path, "tensorboard"), restored_step, {})
        for step in steps:
            trackers.log(step, {"loss": float(step + 10 * restored_step), "mfu": None})
        trackers.close()
    assert scalars_of(tmp_path / "logs", "loss") == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert "mfu" not in events.Tags()["scalars"]
    assert b"    report:\n" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["seq_length"].number_value == TrainConfig().data.seq_length
    assert hparams["use_dummy_dataset"].string_value == "false" and hparams["tracker_dir"].string_value == "none"


def curves_in(folder: Path, name: str, run: Path, identity: str, **report: str) -> None:
    """Report once from a start of a run whose trackers write into a folder."""
    config = config_of(run, "tensorboard", tracker_dir=folder)
    config = replace(config, report=replace(config.report, tracker_run_name=name or None))
    trackers = open_trackers(config, 0, {}, identity=identity)
    trackers.log(1, {"loss": 1.0})
    trackers.close()


def test_each_run_has_its_own_curves_in_a_shared_folder(tmp_path: Path) -> None:
    shared = tmp_path / "curves"
    starts = [("", "x/a", "1"), ("", "x/b", "2"), ("", "y/a", "3"), ("", "x/a", "1"), ("", "y/a", "3")]
    for name, run, identity in [*starts, ("..", "x/c", "4"), ("lr/3e-4", "x/d", "5")]:
        curves_in(shared, name, tmp_path / run, identity)
    files = {folder.name: len(list(folder.iterdir())) for folder in shared.iterdir()}
    assert files == {"a": 2, "a-3": 2, "b": 1, "_": 1, "lr_3e-4": 1}
    assert scalars_of(shared / "b", "loss") == [(1, 1.0)]


# Settings


@pytest.mark.parametrize(
    ("run_id", "kept"),
    [(UUID(int=7), "00000000-0000-0000-0000-000000000007"), (7, "7"), (b"x", "b'x'"), (KeyError("no id"), None)],
)
def test_a_run_id_that_is_no_text_is_kept_as_text_and_one_that_fails_is_left_out(
    run_id: object, kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Identified(Service):
        def __init__(self, run: TrackedRun) -> None:
            pass

        @property
        def run_id(self) -> Any:  # type: ignore[override]
            if isinstance(run_id, Exception):
                raise run_id
            return run_id

    monkeypatch.setattr("unit.observability.test_trackers.Service", Identified)
    trackers = open_trackers(config_of(tmp_path, OWN), 0, {})
    assert json.loads(json.dumps(trackers.state_dict())) == ({} if kept is None else {OWN: kept})
    trackers.close()
    assert len(caplog.messages) == (kept is None)
