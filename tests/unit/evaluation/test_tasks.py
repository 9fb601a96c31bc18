"""Benchmark tasks by lm-eval: the numbers of its adapter of Hugging Face models, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_files import VOCABULARY, write_tasks, write_tokenizer
from tiny_model import single_dims
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pretraining.checkpoint.restore import load_model
from pretraining.config.training import EvaluationConfig
from pretraining.data.tokenizer import load_tokenizer
from pretraining.distributed.processes import Processes
from pretraining.errors import ConfigError, DataError, PretrainError
from pretraining.evaluation.scoring import ScoredRow, Scorer, cut, pad
from pretraining.evaluation.tasks import Results, Tasks, load_harness, results_of

pytestmark = pytest.mark.usefixtures("single_process")

CONTEXT = 48
ALL = ("small_choice", "small_likelihood", "small_text")
Answers = list[tuple[float, bool]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks, and Hugging Face folders of a tiny model with either tokenizer."""
    root = tmp_path_factory.mktemp("tasks")
    write_tasks(root / "tasks")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, initializer_range=0.3)
    )
    for name, begins in (("begins", True), ("plain", False)):
        model.save_pretrained(root / name)
        write_tokenizer(root / name, begins=begins)
    return root


@pytest.fixture(autouse=True)
def only_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the harness's own tasks, whose listing takes 6 seconds."""
    from lm_eval.tasks import TaskManager

    def listed(include_path: str, include_defaults: bool = True) -> Any:
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("pretraining.evaluation.harness.TaskManager", listed)


def config_of(folder: Path, *tasks: str, **changes: Any) -> EvaluationConfig:
    return EvaluationConfig(eval_tasks=tasks or ALL, eval_tasks_path=str(folder / "tasks"), **changes)


def scorer(tokens: int = 256) -> Scorer:
    return Scorer(Processes(0, 1, 0, 1, torch.device("cpu")), single_dims(), tokens)


def opened(folder: Path, config: EvaluationConfig, tokens: int = 256, name: str = "plain") -> Tasks:
    harness = load_harness(config)
    rehearsal = harness.rehearse(load_tokenizer(folder / name), VOCABULARY, CONTEXT, None)
    return Tasks(harness, results_of(rehearsal), scorer(tokens))


def never() -> bool:
    return False


def evaluated(tasks: Tasks, model: nn.Module) -> Results:
    found = tasks.evaluate(model, never)
    assert found is not None
    return found


def ours(folder: Path, name: str) -> nn.Module:
    return load_model(str(folder / name), torch.device("cpu"), torch.float32)[1]


def recorded(function: Callable[..., Answers], answers: Answers) -> Callable[..., Answers]:
    def record(*given: Any, **named: Any) -> Answers:
        found = function(*given, **named)
        answers.extend(found)
        return found

    return record


@pytest.mark.parametrize("name", ["begins", "plain"])
def test_the_numbers_are_those_of_the_harness_on_the_hugging_face_folder(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs: Answers = []
    mine: Answers = []
    adapter = HFLM(pretrained=str(folder / name), dtype="float32", device="cpu")
    monkeypatch.setattr(adapter, "_loglikelihood_tokens", recorded(adapter._loglikelihood_tokens, theirs))
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    expected = lm_eval.simple_evaluate(adapter, tasks=list(ALL), task_manager=manager, num_fewshot=2, bootstrap_iters=0)
    assert expected is not None

    caplog.set_level("INFO")
    tasks = opened(folder, config_of(folder, eval_tasks_shots=2), name=name)
    assert "task small_likelihood has no examples before its questions" in caplog.text
    assert "requests are longer than the context of 48, and lose their beginning" in caplog.text
    monkeypatch.setattr(Scorer, "_compute", recorded(Scorer._compute, mine))
    found = evaluated(tasks, ours(folder, name))
    assert len(mine) == len(theirs) and any(hit for _, hit in mine) == any(hit for _, hit in theirs)
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert [hit for _, hit in mine] == [hit for _, hit in theirs]
    for task, row in expected["results"].items():
        for key, value in row.items():
            if key.endswith(",none") and "_stderr" not in key:
                own = found.values[f"evaluation_task/{task}/{key.removesuffix(',none')}"]
                assert own == pytest.approx(value, rel=1e-3), key  # perplexities are exponentials
    assert {name for name in found.values if "stderr" in name} == {
        f"evaluation_task/{each}_stderr"
        for each in ("small_choice/acc", "small_choice/acc_norm", "small_likelihood/acc")
    }


def test_forwards_of_other_sizes_and_a_second_evaluation_give_the_same_numbers(folder: Path) -> None:
    model = ours(folder, "plain")
    tasks = opened(folder, config_of(folder, eval_tasks_shots=1))
    first = evaluated(tasks, model)
    assert evaluated(tasks, model) == first
    other = evaluated(opened(folder, config_of(folder, eval_tasks_shots=1), tokens=1), model)
    assert other.values == pytest.approx(first.values, rel=1e-5)


def test_a_group_has_a_line_of_its_own_and_its_parts_stand_in_the_values(folder: Path) -> None:
    tasks = opened(folder, config_of(folder, "small_group", eval_tasks_limit=3))
    found = evaluated(tasks, ours(folder, "plain"))
    assert [line.split()[0] for line in found.lines] == ["evaluation_task/small_group"]
    parts = [
        found.values[f"evaluation_task/{name}/acc"] for name in ("small_choice", "small_likelihood", "small_group")
    ]
    assert parts[2] == pytest.approx((parts[0] + parts[1]) / 2)
    assert found.definitions["small_group"] == {
        "small_choice": {"version": 1.0, "shots": 0, "questions": 3},
        "small_likelihood": {"version": 1.0, "shots": 0, "questions": 3},
    }
    assert tasks.harness is not None
    assert tasks.harness.describe() == [
        f"{name}: 3 of 6 questions, 0 examples before each" for name in ("small_choice", "small_likelihood")
    ]


def test_a_tag_stands_for_its_tasks(folder: Path) -> None:
    found = opened(folder, config_of(folder, "small_tag")).rehearsal
    assert [*found.definitions] == ["small_choice", "small_likelihood"] and len(found.lines) == 2


def test_what_is_no_number_is_left_out_and_a_filter_is_named() -> None:
    row = {"alias": "t", "acc,none": 0.5, "acc_stderr,none": "N/A", "f1,strict": 0.25, "f1_stderr,strict": 0.1}
    row |= {"bad,none": float("nan"), "sample_len": 4}
    found = results_of(
        {
            "results": {"t": row},
            "higher_is_better": {"t": {"acc": True, "f1": None}},
            "group_subtasks": {},
            "n-samples": {"t": {"original": 9, "effective": 4}},
            "versions": {"t": 2},
            "n-shot": {"t": 5},
        }
    )
    assert found.values == {
        "evaluation_task/t/acc": 0.5,
        "evaluation_task/t/f1.strict": 0.25,
        "evaluation_task/t/f1_stderr.strict": 0.1,
    }
    assert found.lines == ["evaluation_task/t  acc 0.5000  f1.strict 0.2500 ± 0.1000"]
    assert found.directions == {"t/acc": True, "t/f1.strict": None}
    tasks = Tasks(None, found, scorer())
    choice = tasks.best_by("t/acc")
    assert choice is not None and choice.larger_is_better and tasks.best_by("t/other") is None
    changed = replace(tasks, rehearsal=found._replace(definitions={"t": {"t": {"shots": 6}}})).best_by("t/acc")
    assert changed is not None and changed.definition != choice.definition
    with pytest.raises(ConfigError, match=r"--best_by=t/f1.strict: lm-eval does not say whether larger values"):
        tasks.best_by("t/f1.strict")


def test_random_states_and_standard_output_stay_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def states() -> list[object]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    before, model = states(), ours(folder, "plain")
    before = states()
    evaluated(opened(folder, config_of(folder)), model)
    assert states() == before
    assert capsys.readouterr().out == ""


# Refusals


@pytest.mark.parametrize(
    ("tasks", "error", "words"),
    [
        (["small_choise"], ConfigError, "no task, group or tag small_choise: near it are small_choice"),
        (["small_choice", "small_answer"], ConfigError, "small_answer generate text, which is too slow here: export"),
        (["broken"], DataError, "=broken cannot be loaded: FileNotFoundError: .*--dry_run=true` fetches data on"),
        (["small_group", "small_choice"], DataError, "cannot be loaded: ValueError: Duplicate task 'small_choice'.*'$"),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused_at_the_start(
    tasks: list[str], error: type[PretrainError], words: str, folder: Path, tmp_path: Path
) -> None:
    write_tasks(tmp_path / "tasks")
    broken = json.loads((tmp_path / "tasks/small_choice.yaml").read_text())
    broken |= {"task": "broken", "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "gone.jsonl")}}}
    (tmp_path / "tasks/broken.yaml").write_text(json.dumps(broken))
    with pytest.raises(error, match=words):
        load_harness(config_of(tmp_path, *tasks))
    with pytest.raises(ConfigError, match=r"--eval_tasks_path=.*/nowhere is no folder"):
        load_harness(replace(config_of(folder), eval_tasks_path=f"{folder}/nowhere"))


def test_requests_that_the_model_cannot_take_are_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    harness, tokenizer = load_harness(config_of(folder)), load_tokenizer(folder / "plain")
    with pytest.raises(ConfigError, match=r"a request has 48 tokens, but the model has a sliding window of 32"):
        harness.rehearse(tokenizer, VOCABULARY, CONTEXT, 32)
    with pytest.raises(ConfigError, match=r"a request of --eval_tasks gives token .*, and the model has 40 rows"):
        harness.rehearse(tokenizer, 40, CONTEXT, None)
    with pytest.raises(
        ConfigError, match=r"a request asks for \d+ tokens, and the model takes 1 to 3: '.+' after '.+'\. Correct"
    ):
        harness.rehearse(tokenizer, VOCABULARY, 3, None)
    nameless = replace(tokenizer, end_of_text=None)
    with pytest.raises(ConfigError, match=r"the tokenizer has no token that begins or ends a text"):
        harness.rehearse(nameless, VOCABULARY, CONTEXT, None)


def test_without_the_package_its_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pretraining.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'pretraining\[tasks\]'"):
        load_harness(config_of(folder))


# The forwards


class Counting(nn.Module):
    """A model that counts its forwards, around another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.shapes = model, list[tuple[int, ...]]()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        self.shapes.append(tuple(tokens.shape))
        return self.inner(tokens, labels)


ROWS = [ScoredRow(list(range(length)), 1) for length in (3, 66, 10, 130, 65, 2)]


def test_batches_have_the_longest_rows_first_and_few_widths() -> None:
    assert cut(ROWS, 256) == [[3], [1, 4, 2], [0, 5]] and cut(ROWS, 1) == [[3], [1], [4], [2], [0], [5]]
    assert cut([], 64) == []
    tokens, labels = pad([ScoredRow([5, 6, 7, 8], 2), ScoredRow([9, 1], 1)])
    assert tokens.shape == (2, 16) and tokens[:, :4].tolist() == [[5, 6, 7, 0], [9, 0, 0, 0]]
    assert labels[:, :4].tolist() == [[-100, 7, 8, -100], [1, -100, -100, -100]] and labels[:, 4:].unique() == -100
    empty, nothing = pad([])
    assert empty.shape == (1, 16) and nothing.unique() == -100


def test_a_stop_ends_the_forwards_and_an_error_of_the_asker_or_of_a_forward_is_raised(folder: Path) -> None:
    model = Counting(ours(folder, "plain"))
    answers = iter([False, True])
    assert scorer(1).serve(model, lambda score: score(ROWS[:3]), lambda: next(answers)) is None
    assert model.shapes == [(1, 80)]

    def ask(score: Any) -> None:
        score(ROWS[:1])
        raise KeyError("a bug of a task")

    with pytest.raises(KeyError, match="a bug of a task"):
        scorer().serve(model, ask, never)

    def swallows(score: Any) -> None:
        try:
            score([ScoredRow([VOCABULARY + 1, 1], 1)])
        except IndexError:
            raise RuntimeError("hidden") from None

    with pytest.raises(IndexError):  # the other ranks wait in the forward, not for the asker
        scorer().serve(model, swallows, never)


def test_long_evaluations_log_progress(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pretraining.evaluation.scoring.SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level("INFO")

    def ask(score: Callable[[Sequence[ScoredRow]], Answers]) -> Answers:
        return score(ROWS)

    found = scorer(256).serve(ours(folder, "plain"), ask, never)
    assert found is not None and len(found) == len(ROWS)
    assert [record.message for record in caplog.records] == [f"tasks: {done} of 6 requests" for done in (1, 4, 6)]
