from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT, run_command
from training_runs import TINY

from pretraining.config.training import CheckpointConfig, ReportConfig, TrainConfig
from pretraining.errors import ConfigError
from pretraining.observability import mlflow_tracker
from pretraining.observability.trackers import TrackedRun, Trackers, open_trackers


class FakeError(Exception):
    """As MLflow raises it."""

    def __init__(self, text: str, error_code: str = "TEMPORARILY_UNAVAILABLE") -> None:
        super().__init__(text)
        self.error_code = error_code


@dataclass
class FakeStore:
    """A store, and the client for it.

    Attributes:
        away: whether it answers nothing.
        runs: status by id.
    """

    away: bool = False
    uris: list[str] = field(default_factory=list)
    experiments: list[tuple[str, str | None]] = field(default_factory=list)
    runs: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)

    def __call__(self, tracking_uri: str) -> FakeStore:
        self.uris.append(tracking_uri)
        return self

    def check(self) -> None:
        if self.away:
            raise FakeError("no route to host\nand where it was tried")

    def get_experiment_by_name(self, name: str) -> Any:
        self.check()
        known = [number for number, (other, _) in enumerate(self.experiments) if other == name]
        return SimpleNamespace(experiment_id=known[0]) if known else None

    def create_experiment(self, name: str, artifact_location: str | None) -> int:
        self.experiments.append((name, artifact_location))
        return len(self.experiments) - 1

    def create_run(self, experiment_id: int, run_name: str) -> Any:
        self.names.append(run_name)
        self.runs[run_id := f"run-{len(self.runs)}"] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.check()
        if run_id not in self.runs:
            raise FakeError("there is none", "RESOURCE_DOES_NOT_EXIST")
        self.runs[run_id] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.check()
        assert run_id in self.runs and len(params) <= 100
        self.parameters.update({each.name: each.value for each in params})
        if metrics:
            self.metrics.append((metrics[0].step, {each.name: each.value for each in metrics}))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.check()
        self.runs[run_id] = status


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    module: Any = ModuleType("mlflow")
    module.MlflowClient = store
    module.exceptions = SimpleNamespace(MlflowException=FakeError)
    module.entities = SimpleNamespace(
        Metric=lambda name, value, time, step: SimpleNamespace(name=name, value=value, step=step),
        Param=lambda name, value: SimpleNamespace(name=name, value=value),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in mlflow_tracker.VARIABLES:
        monkeypatch.setenv(name, "as the test says")
    return store


MLFLOW = ReportConfig(tracker=("mlflow",))


def opened(
    run: Path, restored_step: int = 0, report: ReportConfig = MLFLOW, ids: Mapping[str, str] | None = None
) -> Trackers:
    config = TrainConfig(checkpoint=CheckpointConfig(ckpt_save_path=str(run)), report=report)
    return open_trackers(config, restored_step, ids or {})


def test_all_starts_of_a_run_are_one_run_in_a_file_of_its_folder(tmp_path: Path, store: FakeStore) -> None:
    ids: dict[str, str] = {}
    for step in (0, 2):
        trackers = opened(tmp_path / "mine", step, ids=ids)
        for later in (1, 2):
            trackers.log(step + later, {"loss": 2.0, "mfu": None})
        trackers.close()
        ids = trackers.state_dict()
    assert store.uris == [f"sqlite:///{tmp_path}/mine/logs/mlflow.db"] * 2
    assert store.experiments == [("pretraining", (tmp_path / "mine" / "logs" / "mlflow_artifacts").as_uri())]
    assert (store.runs, store.names) == ({"run-0": "FINISHED"}, ["mine"])
    assert store.metrics == [(step, {"loss": 2.0}) for step in (1, 2, 3, 4)]
    assert store.parameters["seq_length"] == str(TrainConfig().data.seq_length)


def test_a_server_is_found_by_mlflows_own_variable_and_keeps_artifacts_itself(
    tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    opened(tmp_path, report=ReportConfig(tracker=("mlflow",), tracker_project_name="llamas")).close()
    assert store.uris == ["http://server"] and store.experiments == [("llamas", None)]


@pytest.mark.parametrize("uri", ["file:///runs", "./mlruns"])
def test_a_folder_that_mlflow_does_not_take_is_refused_at_the_start(
    uri: str, tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tracking_uri: str) -> None:
        raise FakeError("the file store is in maintenance mode")

    monkeypatch.setattr(sys.modules["mlflow"], "MlflowClient", refuse)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError) as error:
        opened(tmp_path)
    assert error.value.settings == ("tracker",)


def test_a_run_that_the_store_does_not_know_begins_again_and_an_error_fails_it(
    tmp_path: Path, store: FakeStore
) -> None:
    trackers = opened(tmp_path, report=ReportConfig(tracker=("mlflow",), tracker_run_id="gone"))
    assert trackers.state_dict() == {"mlflow": "run-0"}
    with pytest.raises(ValueError):
        try:
            raise ValueError("of the training")
        finally:
            trackers.close()
    assert store.runs == {"run-0": "FAILED"}


@pytest.mark.parametrize(("most", "arrived"), [(100, [1, 2, 3]), (2, [2, 3])])
def test_reports_wait_while_the_store_is_away_the_newest_of_them_and_those_that_are_lost_are_counted(
    most: int, arrived: list[int], tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "MOST_WAITING", most)
    store.away = True
    tracker = mlflow_tracker.MLflow(TrackedRun(TrainConfig(), "run", tmp_path, 0))
    for step in (1, 2, 3):
        with pytest.raises(FakeError):
            tracker.log(step, {"loss": float(step)})
    assert tracker.run_id is None and tracker.lacks == 3
    store.away = False
    tracker.close()
    assert [step for step, _ in store.metrics] == arrived and tracker.lacks == 3 - len(arrived)


# The real one


def train(run: Path, *flags: str, **environment: str) -> str:
    """Trains with the real package, in a process of its own; returns what it says on stderr."""
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    common = [*(flag for flag in TINY if not flag.startswith("tracker")), "use_dummy_dataset=true"]
    command = [sys.executable, str(ROOT / "main_training.py"), *common, "tracker=mlflow,jsonl", *flags]
    return run_command([*command, f"ckpt_save_path={run}"], environment).stderr


@pytest.mark.slow
def test_mlflow_itself_keeps_a_run_over_two_starts(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    said = [train(run, "num_steps=4", "tracker_project_name=llamas", stop) for stop in ("run_steps=3", "run_steps=1")]
    assert not any("cannot be written" in each for each in said), said
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run}/logs/mlflow.db")
    experiment = client.get_experiment_by_name("llamas")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params["num_hidden_layers"] == "3"
    for name in ("loss", "param_norm", "learning_rate_group_1"):
        assert [point.step for point in client.get_metric_history(found.info.run_id, name)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_training_goes_on_where_mlflows_server_is_away(tmp_path: Path) -> None:
    said = train(tmp_path / "run", "num_steps=3", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    warnings = [line for line in said.splitlines() if "--tracker=mlflow" in line]
    assert len(warnings) == 2 and "cannot be written since step 1 (" in warnings[0] and "it lacks 3" in warnings[1]
