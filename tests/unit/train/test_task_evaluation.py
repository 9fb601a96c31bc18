"""Whole runs in this process with benchmark tasks: in training, after a stop, as what decides, and alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from task_files import write_tasks, write_tokenizer
from training_runs import TINY, events_of, losses_of, metrics_of, status_of, write_two_datasets
from unit.train import whole_runs
from unit.train.whole_runs import checkpoint, equal, error_of

from pretraining import Trainer
from pretraining.checkpoint.own_checkpoints import best_of
from pretraining.checkpoint.run_folder import committed_checkpoints, read_manifest
from pretraining.checkpoint.start_point import find_newest
from pretraining.cli import main
from pretraining.config.read import load_train_config
from pretraining.errors import ConfigError, Preempted, PretrainError
from pretraining.evaluation.held_out import Evaluator
from pretraining.evaluation.tasks import Results, Tasks
from pretraining.tools.command_settings import PageConfig
from pretraining.tools.report import report
from pretraining.train.plan_evaluation import _deciding_metric

pytestmark = pytest.mark.thorough

MODEL = [flag for flag in TINY if not flag.startswith("vocab_size=")]
ACCURACY = "evaluation_task/small_choice/acc"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, tasks and a tokenizer."""
    root = tmp_path_factory.mktemp("task_runs")
    write_tasks(root / "tasks")
    write_tokenizer(root / "tokenizer")
    write_two_datasets(root / "data")
    return root


def flags(root: Path, *more: str) -> list[str]:
    return ["eval_tasks=small_choice,small_text", f"eval_tasks_path={root}/tasks", "sample_tokens=0", *more]


def start(run: Path, root: Path, *more: str) -> None:
    """Train 4 steps on dummy data, evaluated on tasks every 2."""
    whole_runs.start(run, *flags(root, f"tokenizer_path={root}/tokenizer", "eval_tasks_interval=2", *more), model=MODEL)


def with_sets(root: Path) -> list[str]:
    return [f"data_path={root}/data", "sep_token=0", "held_out_fraction=0.2", "eval_batches=1", "eval_interval=2"]


def task_lines(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line[ACCURACY]) for line in metrics_of(run, ACCURACY)]


def evaluated(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    """Return the JSON that `--eval_only` prints."""
    capsys.readouterr()
    main(["train", *MODEL, "eval_only=true", *given])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    """A run of 4 steps with evaluations of tasks after steps 2 and 4."""
    start(root / "trained", root, "checkpoint_interval=2")
    return root / "trained"


def test_evaluations_of_tasks_change_nothing_in_training(root: Path, trained: Path) -> None:
    whole_runs.start(root / "alone", f"tokenizer_path={root}/tokenizer", "sample_tokens=0", model=MODEL)
    assert losses_of(trained) == losses_of(root / "alone")
    assert find_newest(trained).manifest.data == find_newest(root / "alone").manifest.data
    assert equal(checkpoint(trained, 4), checkpoint(root / "alone", 4))
    assert [step for step, _ in task_lines(trained)] == [2, 4]


def test_values_are_flat_numbers_everywhere(trained: Path, tmp_path: Path) -> None:
    last = metrics_of(trained, ACCURACY)[-1]
    names = {name for name in last if name.startswith("evaluation_task/")}
    text = {f"evaluation_task/small_text/{name}" for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")}
    choice = {f"evaluation_task/small_choice/{name}" for name in ("acc", "acc_norm")}
    assert names == text | choice | {f"{name}_stderr" for name in choice}
    event = [each for each in events_of(trained) if each["event"] == "evaluation"][-1]
    assert {name: event[name] for name in names} == {name: last[name] for name in names}
    report(PageConfig(run_path=(str(trained),), output_path=str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text()
    assert "small_choice/acc_norm</text>" in page and "small_text/bits_per_byte</text>" in page
    assert "_stderr</text>" not in page


def test_eval_only_needs_neither_data_nor_sets_and_has_the_numbers_of_the_run(
    root: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*flags(root), f"ckpt_load_path={trained}"]
    for given in ([], ["use_dummy_dataset=true"], ["dry_run=false"]):
        found = evaluated(capsys, *more, *given)
        assert found.pop("checkpoint") == str(checkpoint(trained, 4)) and found.pop("step") == 4
        assert found.pop("sets") == {} and "evaluation_loss" not in found
        last = metrics_of(trained, ACCURACY)[-1]
        assert found == pytest.approx({name: last[name] for name in last if name.startswith("evaluation_task/")})
    main(["export", str(trained), f"--output_path={root}/exported", "--dtype=float32"])
    capsys.readouterr()
    assert evaluated(capsys, *flags(root), f"ckpt_load_path={root}/exported")[ACCURACY] == last[ACCURACY]
    config = load_train_config([*MODEL, "eval_only=true", *more])
    assert Trainer(config).evaluate(trained)[ACCURACY] == last[ACCURACY]


def test_sets_and_tasks_are_evaluated_together(root: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(capsys, *flags(root), *with_sets(root), f"ckpt_load_path={trained}")
    assert found["evaluation_loss"] > 0 and ACCURACY in found and set(found["sets"]) == {"first", "second"}


def test_a_dry_run_names_the_tasks_and_evaluates_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "eval_only=true", "dry_run=true", *flags(root, "eval_tasks_limit=4", "eval_tasks_shots=2")])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "small_choice: 4 of 6 questions, 2 examples before each",
        "small_text: 3 of 3 questions, 2 examples before each",
    ]
    start(tmp_path / "run", root, "dry_run=true")
    out = capsys.readouterr().out
    assert "tasks       small_choice: 6 of 6 questions, 0 examples before each" in out
    assert not (tmp_path / "run").exists()


def interrupted_before_tasks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Request a stop before the first evaluation of tasks; return a function that undoes this."""
    evaluate = Evaluator._evaluate_tasks

    def interrupt(evaluator: Evaluator, state: Any) -> bool:
        if evaluator.tasks_pending:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(evaluator, state)

    monkeypatch.setattr(Evaluator, "_evaluate_tasks", interrupt)
    return lambda: monkeypatch.setattr(Evaluator, "_evaluate_tasks", evaluate)


def test_a_stop_between_sets_and_tasks_leaves_the_tasks_pending_and_each_is_in_the_metrics_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given = tmp_path / "run", with_sets(root)
    undo = interrupted_before_tasks(monkeypatch)
    assert isinstance(error_of(lambda: start(run, root, *given)), Preempted)
    assert [line["step"] for line in metrics_of(run, "evaluation_loss")] == [2] and task_lines(run) == []
    manifest = find_newest(run).manifest
    assert manifest.pending and manifest.state["evaluation"] == {"owed": False, "owed_tasks": True}
    assert isinstance(error_of(lambda: start(run, root, *given)), Preempted)  # killed again, just before them
    undo()
    start(run, root, *given)
    assert [step for step, _ in task_lines(run)] == [2, 4]
    assert [line["step"] for line in metrics_of(run, "evaluation_loss")] == [2, 4]
    start(tmp_path / "whole", root, *given)
    assert task_lines(run) == task_lines(tmp_path / "whole") and losses_of(run) == losses_of(tmp_path / "whole")


# What decides


def script(monkeypatch: pytest.MonkeyPatch, name: str, values: list[float]) -> None:
    """Give a metric these values, evaluation after evaluation."""
    left = iter(values)
    monkeypatch.setattr(Tasks, "evaluate", lambda *_: Results({name: next(left)}, [], {}, {}))


def test_a_task_decides_which_checkpoint_is_best_and_manifests_list_and_retention_agree(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, ACCURACY, [0.5, 0.75, 0.25, 0.75])
    run, given = tmp_path / "run", [*with_sets(root), "best_by=small_choice/acc", "eval_interval=1", "keep_last=1"]
    start(run, root, *given, "num_steps=6", "checkpoint_interval=0", "run_steps=5")
    saved = committed_checkpoints(run)
    assert [(each.step, each.cost, each.kind) for each in saved] == [(4, -0.75, "best"), (5, None, "interval")]
    assert (run / "checkpoints/best").readlink() == Path("step_4_ckp") and best_of(saved) == saved[0]
    decided, later = (read_manifest(each.path) for each in saved)
    assert decided.decided_by[0] == "small_choice/acc" and decided.metric_of_step == 0.75
    assert later.metric_of_step is None and later.evaluation_loss is not None
    main(["list", str(run)])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "complete, best" in line] == ["4"]
    start(run, root, *given, "num_steps=6", "checkpoint_interval=0")  # worse: the best one stays
    assert (run / "checkpoints/best").readlink() == Path("step_4_ckp")
    start(run, root, *given, "num_steps=8", "checkpoint_interval=0")  # equal: the first one stays
    assert (run / "checkpoints/best").readlink() == Path("step_4_ckp")
    main(["export", f"{run}/checkpoints/best", f"--output_path={tmp_path}/exported"])
    assert "- chosen by: small_choice/acc 0.7500\n" in (tmp_path / "exported/README.md").read_text()


def test_other_questions_begin_the_search_for_the_best_again_with_a_line(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, ACCURACY, [0.9, 0.8, 0.7])
    caplog.set_level("INFO")
    run, given = tmp_path / "run", ["best_by=small_choice/acc", "checkpoint_interval=2"]
    start(run, root, *given)
    assert (run / "checkpoints/best").readlink() == Path("step_2_ckp")
    start(run, root, *given, "num_steps=6", "eval_tasks_limit=3")
    assert "the best small_choice/acc so far, 0.9000, is of other evaluation data: the next evaluation" in caplog.text
    assert (run / "checkpoints/best").readlink() == Path("step_6_ckp")


def test_a_lower_value_is_better_where_the_harness_says_so_and_patience_counts_evaluations_of_tasks(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, "evaluation_task/small_text/bits_per_byte", [5.0, 4.0, 4.5, 4.25, 1.0])
    given = [*with_sets(root), "best_by=small_text/bits_per_byte", "early_stopping_evaluations=2", "eval_interval=1"]
    start(tmp_path, root, *given, "num_steps=20", "checkpoint_interval=2")
    assert status_of(tmp_path)["step"] == 8
    text = "no better small_text/bits_per_byte than 4.0000 in 2 evaluations in a row, --early_stopping_evaluations=2"
    assert text in status_of(tmp_path)["reason"]
    assert (tmp_path / "checkpoints/best").readlink() == Path("step_4_ckp")


def test_a_run_that_stops_early_is_evaluated_on_tasks_at_its_end(root: Path, tmp_path: Path) -> None:
    given = [*with_sets(root), "early_stopping_evaluations=1", "learning_rate=0", "num_steps=9"]
    start(tmp_path, root, *given, "eval_tasks_interval=0")
    assert status_of(tmp_path)["step"] == 4 and [step for step, _ in task_lines(tmp_path)] == [4]


def test_a_run_that_a_task_stops_is_evaluated_on_its_sets_at_its_end(root: Path, tmp_path: Path) -> None:
    given = [*with_sets(root), "best_by=small_choice/acc", "early_stopping_evaluations=1", "learning_rate=0"]
    start(tmp_path, root, *given, "num_steps=9", "eval_interval=0")
    assert status_of(tmp_path)["step"] == 4 and [step for step, _ in task_lines(tmp_path)] == [2, 4]
    assert [line["step"] for line in metrics_of(tmp_path, "evaluation_loss")] == [4]
    assert find_newest(tmp_path).manifest.evaluation_of_step is not None


def test_a_stop_before_the_sets_of_the_end_leaves_them_pending_and_each_is_in_the_metrics_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*with_sets(root), "best_by=small_choice/acc", "early_stopping_evaluations=1", "learning_rate=0"]
    given += ["num_steps=9", "eval_interval=0"]
    evaluate = Evaluator._evaluate_sets

    def interrupt(evaluator: Evaluator, state: Any) -> bool:
        if evaluator.pending:
            state.request_stop(signal.SIGTERM)  # agreed between the tasks and the sets
        return evaluate(evaluator, state)

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "_evaluate_sets", interrupt)
        error_of(lambda: start(tmp_path, root, *given))
    assert find_newest(tmp_path).manifest.pending == ("owed",) and metrics_of(tmp_path, "evaluation_loss") == []
    start(tmp_path, root, *given)
    assert [line["step"] for line in metrics_of(tmp_path, "evaluation_loss")] == [4]
    assert [step for step, _ in task_lines(tmp_path)] == [2, 4] and status_of(tmp_path)["status"] == "finished"


EVALUATOR = """
class Steps:
    larger_is_better = True

    def __call__(self, model, tokenizer, step):
        return {"steps": step}
"""


@pytest.mark.parametrize("best_by", ["small_choice/acc_nrom", "small_tag/acc", "small_group/f1"])
def test_a_metric_that_a_task_does_not_have_is_refused_beside_evaluators_too(
    best_by: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe_of_steps.py").write_text(EVALUATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = "small_tag" if best_by.startswith("small_tag") else "small_group"
    more = [f"best_by={best_by}", "evaluators=probe_of_steps:Steps", f"eval_tasks={tasks}"]
    error: PretrainError = error_of(lambda: start(tmp_path / "run", root, *more))
    assert f"--best_by={best_by} is none of what evaluations find: small_choice/acc, small_choice/acc_norm, " in str(
        error
    )
    assert committed_checkpoints(tmp_path / "run") == []


def test_a_set_named_like_a_metric_decides_in_its_place() -> None:
    evaluation = SimpleNamespace(best_by="a/acc")
    opened: Any = SimpleNamespace(config=SimpleNamespace(evaluation=evaluation), tasks=Mock(), evaluators=None)
    assert _deciding_metric(opened, {"a/acc": 8}) is None
    assert _deciding_metric(opened, {}) == opened.tasks.best_by("a/acc")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["best_by=small_choice/nothing"], "is none of what evaluations find: small_choice/acc, "),
        (["tokenizer_path=none"], "needs a tokenizer, and neither data nor weights have one: give --tokenizer_path"),
        (["early_stopping_evaluations=2"], "give --best_by=<task>/<metric> or a number of evaluators, or documents"),
        (["eval_tasks="], "give tasks, with the last one"),
    ],
)
def test_what_cannot_decide_or_be_evaluated_is_refused(root: Path, tmp_path: Path, more: list[str], words: str) -> None:
    error: PretrainError = error_of(lambda: start(tmp_path / "run", root, *more))
    assert isinstance(error, ConfigError) and words in str(error)
