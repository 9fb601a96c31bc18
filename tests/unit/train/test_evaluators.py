"""User-defined evaluators in whole runs of this process: when they are called, and what happens to their numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_files import write_tokenizer
from training_runs import TINY, losses_of, metrics_of, status_of
from unit.train import whole_runs
from unit.train.whole_runs import checkpoint, equal, error_of

from pretraining import Trainer
from pretraining.cli import main
from pretraining.config.read import load_train_config
from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import ConfigError

pytestmark = pytest.mark.thorough

MODULE = """
import random
import numpy as np
import torch

class Steps:
    larger_is_better = True

    def __call__(self, model, tokenizer, step):
        random.random(), np.random.rand(), torch.rand(1)
        logits = model(torch.zeros(2, 5, dtype=torch.int64))
        return {"steps": -abs(step - 4), "width": torch.tensor(logits.size(-1)), "tokenizer": tokenizer is not None}

class Lower(Steps):
    larger_is_better = False

    def __call__(self, model, tokenizer, step):
        return {"lower": 1.0}

class Silent:
    def __call__(self, model, tokenizer, step):
        return {"silent": float("nan")}

class Broken:
    def __call__(self, model, tokenizer, step):
        raise ValueError("a bug")

class Unmade:
    def __init__(self):
        raise KeyError("not made")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of evaluators in the working directory."""
    (tmp_path / "my_probes.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def start(run: Path, *flags: str) -> None:
    whole_runs.start(run, "eval_interval=2", "evaluators=my_probes:Steps", *flags)


def test_they_are_called_at_evaluations_without_sets_and_change_nothing_in_training(tmp_path: Path) -> None:
    start(tmp_path / "run", "num_steps=5")
    whole_runs.start(tmp_path / "alone", "num_steps=5")
    found = [
        (line["step"], line["evaluation_custom/steps"])
        for line in metrics_of(tmp_path / "run", "evaluation_custom/steps")
    ]
    assert found == [(2, -2), (4, 0), (5, -1)]
    assert {line["evaluation_custom/width"] for line in metrics_of(tmp_path / "run", "evaluation_custom/width")} == {64}
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "alone")
    assert equal(checkpoint(tmp_path / "run", 5), checkpoint(tmp_path / "alone", 5))


def test_a_number_decides_which_checkpoint_is_best_and_when_a_run_stops(tmp_path: Path) -> None:
    start(tmp_path / "run", "best_by=steps", "early_stopping_evaluations=1", "num_steps=20", "checkpoint_interval=2")
    assert status_of(tmp_path / "run")["step"] == 6
    assert (tmp_path / "run/checkpoints/best").readlink() == Path("step_4_ckp")


def test_eval_only_calls_them_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "run")
    write_tokenizer(tmp_path / "tokenizer")
    given = [*TINY, "eval_only=true", "evaluators=my_probes:Steps,my_probes:Silent", f"ckpt_load_path={tmp_path}/run"]
    capsys.readouterr()
    main(["train", *given])
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line == "evaluation_custom  steps 0  width 64  tokenizer 0  silent nan"
    assert json.loads(last) == {
        **{"checkpoint": f"{tmp_path}/run/checkpoints/step_4_ckp", "step": 4, "sets": {}},
        **{"evaluation_custom/steps": 0.0, "evaluation_custom/width": 64.0, "evaluation_custom/tokenizer": 0.0},
        "evaluation_custom/silent": None,
    }


def test_a_trainer_takes_evaluators_as_objects(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    class Probe:
        def __call__(self, model: torch.nn.Module, tokenizer: Tokenizer | None, step: int) -> Mapping[str, float]:
            random.seed(0)
            np.random.seed(0)
            seen.append((step, torch.is_grad_enabled()))
            return {"probe": 2.5}

    flags = [*TINY, "use_dummy_dataset=true", "num_steps=3", "eval_interval=2", f"ckpt_save_path={tmp_path}/run"]
    before: list[Any] = [random.getstate(), str(np.random.get_state())]
    trainer = Trainer(load_train_config(flags), evaluators=[Probe()])
    assert trainer.train().metrics["evaluation_custom/probe"] == 2.5 and seen == [(2, False), (3, False)]
    assert trainer.evaluate()["evaluation_custom/probe"] == 2.5
    assert [random.getstate(), str(np.random.get_state())] == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["evaluators=my_probes:Broken"], "--evaluators=my_probes:Broken fails: ValueError: a bug ("),
        (["evaluators=my_probes:Unmade"], "--evaluators=my_probes:Unmade fails: KeyError: 'not made'"),
        (["evaluators=my_probes:Nothing"], "my_probes has no Nothing"),
        (["best_by=other"], "--best_by=other: the evaluators return steps, width, tokenizer"),
        (["best_by=silent", "evaluators=my_probes:Silent"], "its attribute larger_is_better"),
        (["best_by=steps", "evaluators=my_probes:Steps,my_probes:Lower"], "its attribute larger_is_better"),
        (["evaluators=my_probes:Steps,my_probes.Steps:Steps"], "cannot be imported"),
        (["early_stopping_evaluations=1"], "give --best_by=<task>/<metric> or a number of evaluators"),
    ],
)
def test_what_fails_or_cannot_decide_is_named(tmp_path: Path, more: list[str], words: str) -> None:
    error = error_of(lambda: start(tmp_path / "run", *more))
    assert isinstance(error, ConfigError) and words in str(error)


def test_two_evaluators_with_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text("from my_probes import Steps\n")
    error = error_of(lambda: start(tmp_path / "run", "evaluators=my_probes:Steps,others:Steps"))
    assert "--evaluators=others:Steps: another one returns evaluation_custom/steps, " in str(error)
