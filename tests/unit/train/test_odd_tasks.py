"""Whole runs with tasks whose questions, answers or metrics are odd: what costs a metric, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from task_files import CHOICES, write_task, write_tasks, write_tokenizer
from training_runs import TINY, metrics_of, status_of
from unit.train import whole_runs
from unit.train.whole_runs import error_of

from pretraining.cli import main
from pretraining.data.tokenizer import load_tokenizer
from pretraining.errors import ConfigError, DataError, PretrainError

pytestmark = pytest.mark.thorough

MODEL = [flag for flag in TINY if not flag.startswith("vocab_size=")]
TEXT: dict[str, Any] = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
CHOICE: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
LIKELIHOOD: dict[str, Any] = {
    "output_type": "loglikelihood",
    "doc_to_target": "{{a}}",
    "metric_list": [{"metric": "perplexity"}],
}
MODULE = """
import math

def costs(document, results):
    [(likelihood, _)] = results
    return {"cost": 2 * likelihood, "overflow": math.exp(-1000 * likelihood)}
"""


def metrics(*names: str) -> list[dict[str, str]]:
    return [{"metric": name} for name in names]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers and tasks."""
    root = tmp_path_factory.mktemp("odd_tasks")
    for name, begins in (("begins", True), ("plain", False)):
        write_tokenizer(root / name, begins=begins)
    folder = root / "tasks"
    write_tasks(folder)
    perplexities = metrics("word_perplexity", "byte_perplexity")
    for name, text in (("one_word", "x" * 3000), ("words", "a cat on a mat"), ("empty", "")):
        write_task(folder, name, [{"text": text}], **TEXT, metric_list=perplexities)
    own = [{"metric": name, "aggregation": "mean", "higher_is_better": False} for name in ("cost", "overflow")]
    (folder / "odd.py").write_text(MODULE)
    of_module = "process_results: !function odd.costs"
    write_task(folder, "own", [{"q": "a", "a": " cat"}], of_module, **{**LIKELIHOOD, "metric_list": own})
    shared = {"aggregate_metric_list": perplexities, "metadata": {"version": 1.0}}
    (folder / "both.yaml").write_text(json.dumps({"group": "both", "task": ["one_word", "words"], **shared}))
    for name, context, answer in (("spaces", "   ", "cat"), ("without", "", "   cat"), ("other", "", "cat")):
        write_task(folder, name, [{"q": context, "a": answer}], **LIKELIHOOD)
    choices = {**CHOICE, "metric_list": metrics("acc")}
    write_task(folder, "test_only", CHOICES[:3], **choices, test_split="test", num_fewshot=2)
    for name, context in (("nothing", "the cat"), ("twice_nothing", "")):
        documents = [{"q": "the cat", "choices": [" a"], "gold": 0}, {"q": context, "choices": [""], "gold": 0}]
        write_task(folder, name, documents, **choices, target_delimiter="")
    write_task(folder, "beyond", [{"q": "a", "a": " cat<|added|>"}], **LIKELIHOOD)
    library = load_tokenizer(root / "plain").library
    library.add_special_tokens(["<|added|>"])
    (root / "added").mkdir()
    library.save(str(root / "added/tokenizer.json"))
    return root


def start(run: Path, root: Path, tasks: str, *more: str) -> None:
    """Train 4 steps on dummy data, evaluated on tasks every 2."""
    given = [f"eval_tasks={tasks}", f"eval_tasks_path={root}/tasks", "eval_tasks_interval=2", "sample_tokens=0"]
    if not any(flag.startswith("tokenizer_path=") for flag in more):
        given.append(f"tokenizer_path={root}/plain")
    whole_runs.start(run, *given, *more, model=MODEL)


def values(run: Path) -> list[dict[str, float]]:
    """Return the values of tasks, an object per evaluation."""
    found = [
        {name.removeprefix("evaluation_task/"): value for name, value in line.items() if "_task/" in name}
        for line in metrics_of(run)
    ]
    return [line for line in found if line]


# Metrics


def test_a_metric_that_overflows_is_lost_alone_with_a_line_and_the_run_goes_on(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, root, "both", "best_by=one_word/word_perplexity")
    assert status_of(tmp_path)["status"] == "finished"
    lines = [line for line in caplog.messages if "not a number" in line]
    assert lines == 2 * ["task one_word: word_perplexity: not a number: OverflowError: math range error"]
    words = ["words/word_perplexity"]  # the mean of the group would be that of the other task alone
    names = {f"{name}/byte_perplexity" for name in ("both", "one_word", "words")}
    assert [line.keys() for line in values(tmp_path)] == 2 * [names | {*words}]


def test_what_a_task_of_ones_own_raises_loses_the_metrics_of_this_task(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, root, "own,words")
    assert caplog.text.count("task own: cost, overflow: not a number: OverflowError: math range error") == 2
    assert [line.keys() for line in values(tmp_path)] == 2 * [{"words/word_perplexity", "words/byte_perplexity"}]


def test_what_is_raised_in_the_rehearsal_is_an_error_that_names_the_task(root: Path, tmp_path: Path) -> None:
    error: PretrainError = error_of(lambda: start(tmp_path / "run", root, "words,empty"))
    assert isinstance(error, DataError) and "--eval_tasks: task empty: ZeroDivisionError: " in str(error)


# Requests


@pytest.mark.parametrize("name", ["plain", "begins"])
def test_a_context_of_spaces_is_scored_as_an_empty_one_with_the_spaces_in_the_answer(
    name: str, root: Path, tmp_path: Path
) -> None:
    start(tmp_path, root, "spaces,without,other", f"tokenizer_path={root}/{name}")
    for line in values(tmp_path):
        assert line["spaces/perplexity"] == line["without/perplexity"] != line["other/perplexity"]


@pytest.mark.parametrize(
    ("tasks", "more", "words"),
    [
        (
            "words,nothing",
            [],
            "task nothing: a request asks for 0 tokens, and the model takes 1 to 2048: '' after 'the cat'",
        ),
        (
            "words,twice_nothing",
            [],
            "task twice_nothing: a request asks for 0 tokens, and the model takes 1 to 2048: '' after ''",
        ),
        (
            "beyond",
            ["tokenizer_path=ROOT/added", "vocab_size=295"],
            "gives token '<|added|>' (296), and the model has 295 rows",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_at_the_start(
    tasks: str, more: list[str], words: str, root: Path, tmp_path: Path
) -> None:
    given = [flag.replace("ROOT", str(root)) for flag in more]
    error: PretrainError = error_of(lambda: start(tmp_path / "run", root, tasks, *given))
    assert isinstance(error, ConfigError) and words in str(error)


# What scores mean


@pytest.mark.parametrize("alone", [True, False])
def test_examples_with_the_answer_of_the_question_are_named(
    alone: bool, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for more in (["eval_tasks_shots=2"], ["eval_tasks_shots=0"], ["eval_tasks_shots=2", "eval_tasks_limit=1"]):
        caplog.clear()
        given = ["eval_tasks=test_only,small_choice", f"eval_tasks_path={root}/tasks", "dry_run=true", *more]
        if alone:
            main(["train", "eval_only=true", *given])
        else:
            start(tmp_path / "run", root, "test_only,small_choice", "dry_run=true", *more)
        found.append([line.partition(" the examples")[0] for line in caplog.messages if "the examples include" in line])
    assert found[0] == ["task test_only: in 2 of 3 prompts", "task small_choice: in 1 of 6 prompts"]
    assert found[1] == [] and found[2] == [f"task {name}: in 1 of 1 prompts" for name in ("test_only", "small_choice")]


def test_too_few_examples_are_an_error_that_names_the_task(root: Path, tmp_path: Path) -> None:
    error: PretrainError = error_of(
        lambda: start(tmp_path / "run", root, "small_choice,test_only", "eval_tasks_shots=4")
    )
    assert isinstance(error, DataError) and "--eval_tasks: task test_only: ValueError: Sample larger" in str(error)


def test_documents_and_tasks_that_begin_unlike_are_named(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(tokenizer: str, *more: str) -> list[str]:
        caplog.clear()
        start(tmp_path / "run", root, "words", f"tokenizer_path={root}/{tokenizer}", "dry_run=true", *more)
        return [line for line in caplog.messages if "texts begin with" in line]

    begin, said = load_tokenizer(root / "begins").begin_of_text, "as the tokenizer says, and documents with"
    assert begin is not None and lines("begins", f"bos_token={begin}") == lines("plain") == []
    (line,) = lines("begins")
    assert f"tasks: their texts begin with '<|bos|>' ({begin}), {said} no token, as --bos_token says" in line
    (line,) = lines("plain", "bos_token=5")
    assert f"tasks: their texts begin with no token, {said} '" in line and "' (5), as --bos_token says" in line


def test_eval_only_knows_how_the_documents_of_a_run_begin(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin = load_tokenizer(root / "begins").begin_of_text
    start(tmp_path / "run", root, "words", f"tokenizer_path={root}/begins", f"bos_token={begin}")
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path}/exported"])
    given = ["eval_only=true", "eval_tasks=words", f"eval_tasks_path={root}/tasks", "seq_length=32"]
    for place, tokenizer, count in (("run", "begins", 0), ("run", "plain", 1), ("exported", "plain", 0)):
        caplog.clear()
        more = [f"ckpt_load_path={tmp_path}/{place}", f"tokenizer_path={root}/{tokenizer}", "accept_tokenizer=true"]
        main(["train", *MODEL, *given, *more])
        assert caplog.text.count("their texts begin with") == count, (place, tokenizer)
