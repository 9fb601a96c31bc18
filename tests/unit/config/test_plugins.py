from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.config.fields import settings_of, values_of
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TRACKERS, load_plugin, parse_options
from pretraining.config.read import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError

COMMON = ["use_dummy_dataset=true", "ckpt_save_path=runs/a"]


def test_paths_in_the_tables_exist_and_options_are_settings() -> None:
    settings = settings_of(TrainConfig)
    for entry in (*OPTIMIZERS.values(), *SCHEDULES.values(), *TRACKERS.values()):
        assert callable(load_plugin("table", entry.path)) and set(entry.options) <= settings.keys()


@pytest.mark.parametrize("name", ["optimizer", "schedule", "tracker", "file_type"])
def test_a_user_defined_plugin_is_accepted_and_a_misspelt_name_is_refused(name: str) -> None:
    config = load_train_config([*COMMON, f"{name}=my_package.module:Name"], {})
    assert values_of(config)[name] in ("my_package.module:Name", ("my_package.module:Name",))
    with pytest.raises(ConfigError, match=r"not known.*or a user-defined package.module:Name"):
        load_train_config([*COMMON, f"{name}=adamv"], {})


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_mine.py").write_text("class Outer:\n    value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert load_plugin("flag", "module_of_mine:Outer.value") == 7


def test_options_are_values() -> None:
    texts = ("a=1", "b=0.5", "c=true", "d=None", "e=text=with=more", "f=1e-3", "g=", "h=(0.9,(1,2))", "i=['a', 3]")
    numbers = {"a": 1, "b": 0.5, "c": True, "d": None, "f": 1e-3, "h": (0.9, (1, 2))}
    assert parse_options("flag", texts) == {**numbers, "e": "text=with=more", "g": "", "i": ["a", 3]}


@pytest.mark.parametrize(("text", "said"), [("a", "write key=value"), ("1=2", "write key=value"), ("a=1,a=2", "twice")])
def test_options_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_train_config([*COMMON, "optimizer=mine:Own", f"optimizer_options={text}"], {})


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"--tracker=failing_module:X fails: ZeroDivisionError.*\.py, line 1"):
        load_plugin("tracker", "failing_module:X")
