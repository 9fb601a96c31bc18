from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT, run_command
from training_runs import TINY

from pretraining.config.training import CheckpointConfig, ReportConfig, TrainConfig
from pretraining.errors import ConfigError
from pretraining.observability.trackers import Trackers, open_trackers

WANDB = ReportConfig(tracker=("wandb",))


@dataclass
class FakeWandb(ModuleType):
    """What `import wandb` finds: it keeps what it is told, and fails as a test says.

    Attributes:
        fails: given the arguments of `init`, raises or returns.
    """

    fails: Callable[[dict[str, Any]], None] = lambda arguments: None
    inits: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    axes: list[tuple[str, str | None]] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    teardowns: int = 0

    def __post_init__(self) -> None:
        super().__init__("wandb")
        self.errors = SimpleNamespace(UsageError=KeyError)

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> FakeWandb:
        self.fails(arguments)
        self.inits.append(arguments)
        return self

    def teardown(self) -> None:
        self.teardowns += 1

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def opened(
    run: Path, restored_step: int = 0, report: ReportConfig = WANDB, ids: Mapping[str, str] | None = None
) -> Trackers:
    config = TrainConfig(checkpoint=CheckpointConfig(ckpt_save_path=str(run)), report=report)
    return open_trackers(config, restored_step, ids or {})


def test_all_starts_of_a_run_are_one_run_there_with_the_settings_of_each(tmp_path: Path, wandb: FakeWandb) -> None:
    names = replace(WANDB, tracker_project_name="llamas", tracker_run_name="first", tracker_run_id="abc")
    ids: dict[str, str] = {}
    for step, report in ((0, WANDB), (7, WANDB), (8, names)):
        trackers = opened(tmp_path / "mine", step, report, ids)
        trackers.close()
        ids = trackers.state_dict()
    first, second, named = wandb.inits
    assert first["id"] == second["id"] and len(first["id"]) == 16 and first["resume"] == "allow"
    assert (first["project"], first["name"], first["dir"]) == ("pretraining", "mine", f"{tmp_path}/mine/logs")
    assert first["config"]["seq_length"] == TrainConfig().data.seq_length and first["allow_val_change"]
    assert (named["project"], named["name"], named["id"]) == ("llamas", "first", "abc")
    assert wandb.exit_codes == [0, 0, 0]


def test_steps_that_come_again_after_a_rollback_are_values_and_not_steps_of_wandb(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    trackers = opened(tmp_path)
    assert wandb.axes == [("step", None), ("*", "step")]
    for step in (1, 2, 3, 2):
        trackers.log(step, {"loss": 1.0 / step, "mfu": None})
    trackers.close()
    assert wandb.rows == [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3, 2)]


@pytest.mark.parametrize("works_offline", [True, False])
def test_a_server_that_is_away_is_one_warning_and_the_run_is_kept_offline_or_goes_on_without_it(
    works_offline: bool, tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    def is_away(arguments: dict[str, Any]) -> None:
        if "mode" not in arguments or not works_offline:
            raise TimeoutError("no answer\nfor a long time")

    wandb.fails = is_away
    trackers = opened(tmp_path)
    trackers.log(1, {"loss": 2.0})
    trackers.close()
    (message,) = caplog.messages
    assert "\n" not in message
    assert bool(wandb.rows) is works_offline
    if works_offline:
        assert wandb.inits[0]["mode"] == "offline" and wandb.teardowns == 1


def test_a_name_that_it_refuses_is_an_error_at_the_start(tmp_path: Path, wandb: FakeWandb) -> None:
    def refuse(arguments: dict[str, Any]) -> None:
        raise KeyError("no slash in a name")

    wandb.fails = refuse
    with pytest.raises(ConfigError) as error:
        opened(tmp_path)
    assert error.value.settings == ("tracker",)


def test_an_error_of_the_training_fails_the_run_there(tmp_path: Path, wandb: FakeWandb) -> None:
    trackers = opened(tmp_path)
    with pytest.raises(ValueError):
        try:
            raise ValueError
        finally:
            trackers.close()
    assert wandb.exit_codes == [1]


# The real one, which reads its environment once a process


def train(run: Path, *flags: str, **environment: str) -> str:
    """Trains with the real package, in a process of its own; returns what it says on stderr."""
    pytest.importorskip("wandb", reason="needs the extra wandb")
    common = [*(flag for flag in TINY if not flag.startswith("tracker")), "use_dummy_dataset=true"]
    command = [sys.executable, str(ROOT / "main_training.py"), *common, "tracker=wandb,tensorboard", *flags]
    return run_command([*command, f"ckpt_save_path={run}"], environment).stderr


@pytest.mark.slow
def test_wandb_itself_keeps_a_run_over_two_starts_offline(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    for stop in ("run_steps=3", "run_steps=1"):
        said = train(run, "num_steps=4", "tracker_project_name=llamas", stop, WANDB_MODE="offline")
        assert "--tracker=wandb" not in said
    folders = (run / "logs" / "wandb").glob("offline-run-*")
    names = sorted(folder.name.rpartition("-")[2] for folder in folders)  # the id of the run
    assert len(names) == 2 and names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}, {"WANDB_API_KEY": ""}],
    ids=["server away", "nobody logged in"],
)
def test_training_goes_on_where_wandb_itself_cannot_send(tmp_path: Path, environment: dict[str, str]) -> None:
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    said = train(tmp_path / "run", "num_steps=2", **home, **environment)
    assert said.count("`wandb sync`") == 1
    assert len(list((tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
