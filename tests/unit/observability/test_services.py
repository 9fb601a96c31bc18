"""Weights & Biases and MLflow: stand-ins for both, then the real packages if they are installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers import ROOT, run_command
from training_runs import TINY

from pretraining.config.training import CheckpointConfig, ReportConfig, TrainConfig
from pretraining.errors import ConfigError
from pretraining.observability import mlflow_tracker
from pretraining.observability.trackers import Trackers, open_trackers


class FakeError(Exception):
    """MLflow's error."""

    def __init__(self, text: str, error_code: str = "TEMPORARILY_UNAVAILABLE") -> None:
        super().__init__(text)
        self.error_code = error_code


@dataclass
class FakeStore:
    """A stand-in for MLflow's store and client.

    Attributes:
        away: number of next calls that fail, with this code.
        refused: names of metrics that the store does not take.
        full: number of next batches of metrics for which it has no space.
        runs: status by id.
    """

    away: int = 0
    code: str = "TEMPORARILY_UNAVAILABLE"
    deleted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    full: int = 0
    experiment_of: dict[str, str] = field(default_factory=dict)
    uris: list[str] = field(default_factory=list)
    experiments: dict[str, str | None] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)

    def __call__(self, tracking_uri: str) -> FakeStore:
        if tracking_uri == "file:///runs":
            raise FakeError("the file store is in maintenance mode")
        self.uris.append(tracking_uri)
        return self

    def check(self) -> None:
        if self.away:
            self.away -= 1
            raise FakeError("no route to host\nand where it was tried", self.code)

    def get_experiment_by_name(self, name: str) -> Any:
        self.check()
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.experiments[name] = artifact_location
        return name

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        if experiment_id in self.deleted:
            raise FakeError("the experiment must be active", "INVALID_PARAMETER_VALUE")
        self.runs[run_name], self.experiment_of[run_name] = "RUNNING", experiment_id
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def update_run(self, run_id: str, status: str) -> None:
        self.check()
        if run_id not in self.runs:
            raise FakeError("there is none", "RESOURCE_DOES_NOT_EXIST")
        self.runs[run_id] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.check()
        assert run_id in self.runs
        if any(each.value == 1e300 for each in metrics):
            raise FakeError("a value that is too large", "INVALID_PARAMETER_VALUE")
        if metrics and self.full:
            self.full -= 1
            raise FakeError("No space left on device", "INTERNAL_ERROR")
        if any(each.name in self.refused for each in metrics):
            raise FakeError("Not a directory", "INTERNAL_ERROR")
        self.parameters.update({each.name: each.value for each in params})
        if metrics:
            self.metrics.append((metrics[0].step, {each.name: each.value for each in metrics}))

    def get_run(self, run_id: str) -> None:
        self.check()

    def set_terminated(self, run_id: str, status: str) -> None:
        self.check()
        self.runs[run_id] = status


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stand-in for the package wandb that records its calls."""
    fake = MagicMock(__spec__=ModuleSpec("wandb", None, origin="a stand-in"))
    fake.errors.UsageError = KeyError
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_CONSOLE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)

    def setup() -> SimpleNamespace:
        variables = {"project": "WANDB_PROJECT", "run_name": "WANDB_NAME", "run_id": "WANDB_RUN_ID"}
        own = {name: os.environ.get(variable) for name, variable in variables.items()}
        return SimpleNamespace(settings=SimpleNamespace(**own))

    fake.setup.side_effect = setup  # as the package reads them
    return fake


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    module: Any = ModuleType("mlflow")
    module.__spec__ = ModuleSpec("mlflow", None, origin="a stand-in")
    module.MlflowClient = store
    module.exceptions = SimpleNamespace(MlflowException=FakeError)
    module.entities = SimpleNamespace(
        Metric=lambda name, value, time, step: SimpleNamespace(name=name, key=name, value=value, step=step),
        Param=lambda name, value: SimpleNamespace(name=name, value=value),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for name in ("TRACKING_URI", "EXPERIMENT_NAME", "EXPERIMENT_ID", "RUN_ID"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    for name in mlflow_tracker.VARIABLES:
        monkeypatch.setenv(name, "as the test says")
    return store


def opened(
    service: str, run: Path, restored_step: int = 0, ids: Mapping[str, str] | None = None, **names: str
) -> Trackers:
    report = ReportConfig(tracker=(service,), **{f"tracker_{name}": value for name, value in names.items()})  # type: ignore[arg-type]
    config = TrainConfig(checkpoint=CheckpointConfig(ckpt_save_path=str(run)), report=report)
    return open_trackers(config, restored_step, ids or {})


def start_twice_and_report(service: str, run: Path) -> None:
    """Start a run and resume it from step 2; each start passes its ids to the next."""
    ids: dict[str, Any] = {}
    for step in (0, 2):
        trackers = opened(service, run, step, ids)
        for later in (1, 2):
            trackers.log(step + later, {"loss": 2.0, "mfu": None})
        trackers.close()
        ids = trackers.state_dict()


def test_all_starts_of_a_run_are_one_run_of_wandb_and_steps_are_values_there(tmp_path: Path, wandb: MagicMock) -> None:
    start_twice_and_report("wandb", tmp_path / "mine")
    first, second = (made.kwargs for made in wandb.init.call_args_list)
    run = wandb.init.return_value
    assert first["id"] == second["id"] and len(first["id"]) == 16 and first["resume"] == "allow"
    assert (first["project"], first["name"], first["dir"]) == ("pretraining", "mine", f"{tmp_path}/mine/logs")
    assert first["config"]["seq_length"] == TrainConfig().data.seq_length and first["allow_val_change"]
    assert run.define_metric.call_args_list == [call("step"), call("*", step_metric="step")] * 2
    assert run.log.call_args_list == [call({"step": step, "loss": 2.0}) for step in (1, 2, 3, 4)]
    assert run.finish.call_args_list == [call(exit_code=0)] * 2


def names_of(init: Any) -> dict[str, str]:
    """What was passed to wandb's `init` of the run's names."""
    return {name: init.kwargs[name] for name in ("project", "name", "id", "resume", "entity") if name in init.kwargs}


def test_flags_come_before_wandbs_own_names(tmp_path: Path, wandb: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"WANDB_PROJECT": "theirs", "WANDB_NAME": "their-name", "WANDB_RUN_ID": "their-id", "WANDB_CONSOLE": "wrap"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    run = wandb.init.return_value
    run.project, run.entity = "theirs", "team"
    first = opened("wandb", tmp_path)
    first.close()
    assert names_of(wandb.init.call_args) == {"resume": "allow"}  # wandb reads the others itself
    assert "console" not in wandb.Settings.call_args.kwargs
    assert first.state_dict() == {"wandb": "their-id", "wandb.project": "theirs", "wandb.entity": "team"}
    for name in own:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_RUN_ID", "of-another-job")
    opened("wandb", tmp_path, 1, first.state_dict()).close()
    earlier = {"project": "theirs", "id": "their-id", "resume": "allow", "entity": "team"}
    assert names_of(wandb.init.call_args) == earlier  # and the name stays what it is there
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    opened("wandb", tmp_path, 1, first.state_dict(), project_name="mine", run_name="n", run_id="i").close()
    assert names_of(wandb.init.call_args) == {**earlier, "project": "mine", "name": "n", "id": "i"}


def test_a_settings_file_of_wandb_comes_before_our_defaults(tmp_path: Path, wandb: MagicMock) -> None:
    own = SimpleNamespace(project="from-file", run_name=None, run_id=None)
    wandb.setup.side_effect = lambda: SimpleNamespace(settings=own)
    opened("wandb", tmp_path / "mine").close()
    assert "project" not in wandb.init.call_args.kwargs and wandb.init.call_args.kwargs["name"] == "mine"
    wandb.setup.side_effect = ValueError("a setting that wandb does not accept")
    opened("wandb", tmp_path / "mine").close()
    assert wandb.init.call_args.kwargs["project"] == "pretraining"


@pytest.mark.parametrize(
    ("variables", "experiment"),
    [
        ({"MLFLOW_EXPERIMENT_NAME": "theirs", "MLFLOW_EXPERIMENT_ID": "7"}, "theirs"),
        ({"MLFLOW_EXPERIMENT_ID": "7"}, "7"),
        ({}, "pretraining"),
    ],
)
def test_mlflows_own_environment_comes_before_our_default_and_after_flags(
    variables: dict[str, str],
    experiment: str,
    tmp_path: Path,
    store: FakeStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    opened("mlflow", tmp_path / "first").close()
    opened("mlflow", tmp_path / "second", project_name="mine").close()
    assert store.experiment_of == {"first": experiment, "second": "mine"}
    monkeypatch.setenv("MLFLOW_RUN_ID", "second")
    opened("mlflow", tmp_path / "third", ids={"mlflow": "first"}).close()
    assert set(store.runs) == {"first", "second"} and store.runs["first"] == "FINISHED"
    assert opened("mlflow", tmp_path / "third").state_dict() == {"mlflow": "second"}
    assert set(store.runs) == {"first", "second"}


def test_a_tracker_that_cannot_work_is_an_error_at_the_start_with_the_remedy(
    tmp_path: Path, store: FakeStore, wandb: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.experiments, store.deleted = {"pretraining": None}, ("pretraining",)
    with pytest.raises(ConfigError, match=r"mlflow\.db: .*must be active.*--tracker_project_name"):
        opened("mlflow", tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    store.deleted = ()
    for code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        store.away, store.code = 1, code
        with pytest.raises(ConfigError, match=r"cannot write to http://server: FakeError: no route.*Give its user"):
            opened("mlflow", tmp_path)
    wandb.init.side_effect = RuntimeError("returned error 403: permission denied")
    with pytest.raises(ConfigError, match=r"refuses this user .*wandb login"):
        opened("wandb", tmp_path)
    assert wandb.init.call_count == 1 and wandb.teardown.call_count == 1


@pytest.mark.parametrize(("code", "works"), [("INTERNAL_ERROR", False), ("locked", True)])
def test_a_damaged_file_of_mlflow_is_an_error_and_one_in_use_is_tried_again(
    code: str, works: bool, tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise FakeError("the database is locked" if works else "it is no database", "INTERNAL_ERROR")

    monkeypatch.setattr(store, "get_experiment_by_name", fail)
    with nullcontext() if works else pytest.raises(ConfigError, match=r"mlflow\.db: FakeError: it is no database"):
        opened("mlflow", tmp_path).close()


def test_all_starts_of_a_run_are_one_run_of_mlflow_in_a_file_of_its_folder(tmp_path: Path, store: FakeStore) -> None:
    start_twice_and_report("mlflow", tmp_path / "mine")
    assert store.uris == [f"sqlite:///{tmp_path}/mine/logs/mlflow.db"] * 2
    assert store.experiments == {"pretraining": (tmp_path / "mine" / "logs" / "mlflow_artifacts").as_uri()}
    assert store.runs == {"mine": "FINISHED"}
    assert store.metrics == [(step, {"loss": 2.0}) for step in (1, 2, 3, 4)]
    assert store.parameters["seq_length"] == str(TrainConfig().data.seq_length)


def test_mlflow_gets_names_that_it_takes_and_no_two_metrics_the_same() -> None:
    given = ["loss", "loss/lang=en", "loss/lang+en", "loss/c++", "loss/../x", "loss//y", "/z", "..", "loss/a b:c", "é"]
    assert mlflow_tracker.allowed_names(given) == [
        *("loss", "loss/lang_en", "loss/lang_en_2", "loss/c__", "loss_.._x", "loss__y", "_z", "_", "loss/a b:c", "é")
    ]
    long = mlflow_tracker.allowed_names(["x" * 300, "x" * 301])
    assert [len(name) for name in long] == [242, 244] and len(set(long)) == 2


def test_a_report_that_mlflow_refuses_is_lost(
    tmp_path: Path, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = opened("mlflow", tmp_path)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 2.0, "custom/huge": 1.0 if step == 3 else 1e300})
    trackers.close()
    sent = {name for at, batch in store.metrics if at == 3 for name in batch}
    assert sent == {"loss", "custom/huge"}
    assert caplog.messages[0].startswith("--tracker=mlflow cannot be written") and "lacks 2" in caplog.messages[-1]


def test_a_metric_that_mlflow_never_takes_is_left_out_with_a_line_and_holds_back_nothing(
    tmp_path: Path, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.refused = ("loss/web",)
    trackers = opened("mlflow", tmp_path)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 2.0, "loss/web": 3.0, "learning_rate": 1.0})
    trackers.close()
    sent = {(step, name) for step, batch in store.metrics for name in batch}
    assert sent == {(step, name) for step in (1, 2, 3) for name in ("loss", "learning_rate")}
    assert caplog.messages == ["--tracker=mlflow leaves out loss/web: FakeError: Not a directory"]


def test_no_metric_is_left_out_while_mlflow_takes_none(
    tmp_path: Path, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = opened("mlflow", tmp_path)
    store.full = 3  # for one report, and its two metrics
    for step in (1, 2):
        trackers.log(step, {"loss": 2.0, "mfu": 0.5})
    trackers.close()
    assert [step for step, _ in store.metrics] == [1, 2] and "leaves out" not in caplog.text


def test_wandb_dir_decides_where_no_flag_does(
    tmp_path: Path, wandb: MagicMock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "theirs"))
    wandb.init.side_effect = [TimeoutError("away"), MagicMock()]
    opened("wandb", tmp_path / "run").close()
    assert wandb.init.call_args.kwargs["dir"] == f"{tmp_path}/theirs" and f"{tmp_path}/theirs/wandb" in caplog.text
    wandb.init.side_effect = None
    opened("wandb", tmp_path / "run", dir=str(tmp_path / "flag")).close()
    assert wandb.init.call_args.kwargs["dir"] == f"{tmp_path}/flag"


def test_an_error_in_training_fails_the_run_of_a_service(tmp_path: Path, store: FakeStore, wandb: MagicMock) -> None:
    services = [opened("wandb", tmp_path), opened("mlflow", tmp_path, run_id="gone")]
    for trackers in services:
        with pytest.raises(ValueError) as failed:
            try:
                raise ValueError("of the training")
            finally:
                trackers.close()
        assert len(failed.traceback) == 1  # unchanged
    wandb.init.return_value.finish.assert_called_once_with(exit_code=1)
    assert store.runs == {tmp_path.name: "FAILED"}


@pytest.mark.parametrize("works_offline", [True, False])
def test_a_wandb_server_that_is_away_is_one_warning_and_the_run_is_kept_offline_or_goes_on_without_it(
    works_offline: bool, tmp_path: Path, wandb: MagicMock, caplog: pytest.LogCaptureFixture
) -> None:
    away = TimeoutError("no answer\nfor a long time")
    run = MagicMock()
    wandb.init.side_effect = [away, run if works_offline else away]
    trackers = opened("wandb", tmp_path)
    trackers.log(1, {"loss": 2.0})
    trackers.close()
    (message,) = caplog.messages
    assert "\n" not in message and run.log.called is works_offline
    assert wandb.init.call_args.kwargs["mode"] == "offline" and wandb.teardown.call_count == 1


def test_reports_wait_for_a_server_of_mlflow(tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    store.away = 3  # at the start and at two reports
    trackers = opened("mlflow", tmp_path, project_name="llamas")
    assert trackers.state_dict() == {}
    for step in (1, 2, 3):
        trackers.log(step, {"loss": float(step)})
    trackers.close()
    assert [step for step, _ in store.metrics] == [1, 2, 3] and store.runs == {tmp_path.name: "FINISHED"}
    assert store.uris == ["http://server"] and store.experiments == {"llamas": None}  # the server stores artifacts


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_name_or_a_place_that_a_service_refuses_is_an_error_at_the_start(
    service: str, tmp_path: Path, wandb: MagicMock, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.init.side_effect = KeyError("no slash in a name")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///runs")
    with pytest.raises(ConfigError) as error:
        opened(service, tmp_path)
    assert error.value.settings == ("tracker",)


# The real packages, which read their environment once per process


def train(service: str, run: Path, *flags: str, **environment: str) -> str:
    """Train with the real package in a new process; return its stderr."""
    pytest.importorskip(service, reason=f"needs the extra {service}")
    common = [*(flag for flag in TINY if not flag.startswith("tracker")), "use_dummy_dataset=true"]
    command = [sys.executable, str(ROOT / "main_training.py"), *common, f"tracker={service},tensorboard", *flags]
    return run_command([*command, f"ckpt_save_path={run}"], environment).stderr


@pytest.mark.slow
@pytest.mark.parametrize("service", ["mlflow", "wandb"])
def test_the_packages_themselves_keep_a_run_over_two_starts(service: str, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    for stop in ("run_steps=3", "run_steps=1"):
        said = train(service, run, "num_steps=4", "tracker_project_name=llamas", stop, WANDB_MODE="offline")
        assert f"--tracker={service}" not in said
    if service == "wandb":
        first, second = (run / "logs" / "wandb").glob("offline-run-*")
        assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]  # the id of the run
        return
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run}/logs/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("llamas").experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params["num_hidden_layers"] == "3"
    for name in ("loss", "param_norm", "learning_rate_group_1"):
        assert [point.step for point in client.get_metric_history(found.info.run_id, name)] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "environment", "said"),
    [
        ("wandb", {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}, "`wandb sync`"),
        ("wandb", {"WANDB_API_KEY": ""}, "`wandb sync`"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}, "lacks 2 reports"),
    ],
    ids=["wandb's server away", "nobody logged in", "mlflow's server away"],
)
def test_training_continues_without_a_service(
    service: str, environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    assert train(service, tmp_path / "run", "num_steps=2", **home, **environment).count(said) == 1
    assert service == "mlflow" or list((tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/run-*.wandb"))
