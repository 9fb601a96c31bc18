"""Benchmark tasks by the lm-eval harness (extra `tasks`), on rank 0 alone: this module alone imports it.

    names --TaskManager--> tasks --> requests --`_Model`--> rows of tokens --score--> log-likelihoods --> metrics

The same weights have the same numbers as with the harness's adapter of Hugging Face models (models/huggingface.py). So
tokens around texts, the token before a text without context, the longest request and the seeds are as there. The
standard errors are those with a closed form: the harness would bootstrap others in a pool of processes.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import evaluator, evaluator_utils
from lm_eval.api import task as task_module
from lm_eval.api.metrics import acc_all, acc_all_stderr, mean, mean_stderr
from lm_eval.api.model import LM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pretraining.config.training import EvaluationConfig
from pretraining.config.values import format_value
from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.evaluation.evaluators import keeping_random_states
from pretraining.evaluation.generation import check_prompt
from pretraining.evaluation.scoring import Score, ScoredRow
from pretraining.files import is_folder
from pretraining.text import count_of

log = logging.getLogger(__name__)

_SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
_CLOSED_FORMS = {mean: mean_stderr, acc_all: acc_all_stderr}
_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (evaluator_utils, "stderr_for_metric", lambda metric, bootstrap_iters: _CLOSED_FORMS.get(inspect.unwrap(metric))),
    (task_module, "tqdm", lambda items, **_: items),
)
"""Functions of the harness that it has no option for, by module and name: bootstrapped errors, progress bars."""


class Harness:
    """The tasks of a run, with their documents in memory.

    Raises:
        ConfigError: an unknown task, or one that generates text.
        DataError: the data of a task cannot be loaded, or have too few examples.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._limit = config.eval_tasks_limit
        self._model: _Model | None = None
        self._lost: dict[str, Exception] | None = None  # what was raised, by task and metrics; None in the rehearsal
        with _as_alone():
            random.seed(DEFAULT_RANDOM_SEED)
            np.random.seed(DEFAULT_OTHER_SEED)
            self._loaded = _load(config)
            self._random = random.getstate(), np.random.get_state()
            for name, task in self._loaded["tasks"].items():
                _set_shots(name, task, config.eval_tasks_shots)
                _warn_of_known_answers(name, task, config.eval_tasks_limit)
                self._guard(name, task)

    def _guard(self, name: str, task: Any) -> None:
        """Make what the harness raises while it computes a metric the loss of this metric, except in the rehearsal."""

        def guarded(metrics: str, lost: Any, function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def compute(*given: Any) -> Any:
                try:
                    return function(*given)
                except Exception as error:
                    if self._lost is None:
                        raise _task_error(name, error) from error
                    self._lost[f"{name}: {metrics}"] = error
                    return lost

            return compute

        metrics = {metric: guarded(metric, math.nan, function) for metric, function in task.aggregation().items()}
        task.aggregation = lambda: metrics
        task.process_results = guarded(", ".join(metrics), dict.fromkeys(metrics, math.nan), task.process_results)

    def describe(self) -> list[str]:
        """Return a line per task: its questions, and the examples before each."""
        lines = []
        for name, task in self._loaded["tasks"].items():
            count, shots = len(task.eval_docs), task.get_config("num_fewshot")
            asked = count if self._limit is None else min(count, self._limit)
            lines.append(
                f"{name}: {asked:,} of {count_of(count, 'question')}, {count_of(shots, 'example')} before each"
            )
        return lines

    def rehearse(self, tokenizer: Tokenizer, rows: int, context: int, window: int | None) -> dict[str, Any]:
        """Set the model, and return the results of one that knows nothing.

        Args:
            rows: rows of the model's embedding.
            context: most tokens of a forward, as an export has it.
            window: the model's sliding window; None = none.

        Raises:
            ConfigError: the model or the tokenizer cannot take a request.
            DataError: a metric cannot be computed.
        """
        model = self._model = _Model(tokenizer, rows, context, window)
        results = self.evaluate(lambda rows: [(0.0, False)] * len(rows))
        self._lost = {}
        if (count := model.truncated) > 0:
            log.info("tasks: %d requests are longer than the context of %d, and lose their beginning", count, context)
        return results

    def evaluate(self, score: Score) -> dict[str, Any]:
        """Return the results of the model that scores rows (`lm_eval.result_schema.EvalResults`)."""
        assert self._model is not None
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        self._model.begin(score)
        with _as_alone():
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
            found: dict[str, Any] = evaluator.evaluate(
                lm=self._model, task_dict=self._loaded, limit=self._limit, bootstrap_iters=1, log_samples=False
            )
        lost, self._lost = self._lost or {}, None if self._lost is None else {}
        for metrics, error in lost.items():
            log.warning("task %s: not a number: %s: %s", metrics, type(error).__name__, error)
        return found


@contextmanager
def _as_alone() -> Iterator[None]:
    """Keep what the harness does to random states and standard output from others; replace `_REPLACED`."""
    own = [(module, name, getattr(module, name)) for module, name, _ in _REPLACED]
    for each in _REPLACED:
        setattr(*each)
    try:
        with keeping_random_states(), redirect_stdout(sys.stderr):
            yield
    finally:
        for each in own:
            setattr(*each)


def _load(config: EvaluationConfig) -> dict[str, Any]:
    names, folder = list(config.eval_tasks), config.eval_tasks_path
    if folder is not None and not is_folder(Path(folder)):
        raise ConfigError(f"--eval_tasks_path={folder} is no folder: name the one with the YAML files of tasks")
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    if not set(names) <= {*manager.all_subtasks, *manager.all_tags}:  # listing the harness's own takes seconds
        manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        near = get_close_matches(unknown[0], manager.all_tasks, 5)
        remedy = f"near it are {', '.join(near)}" if near else "`lm-eval ls tasks` lists them"
        raise ConfigError(f"--eval_tasks: lm-eval has no task, group or tag {unknown[0]}: {remedy}")
    try:
        loaded: dict[str, Any] = manager.load(names)
    except Exception as error:  # whatever the library of a task's data, or a task's own code, raises
        given = f"--eval_tasks={format_value(config.eval_tasks)}"
        fetch = f". `pretrain train --eval_only=true {given} --dry_run=true` fetches data on a machine with a network"
        advice = fetch if isinstance(error, OSError) else ""
        raise DataError(f"{given} cannot be loaded: {type(error).__name__}: {error}{advice}") from error
    generating = [name for name, task in loaded["tasks"].items() if task.OUTPUT_TYPE not in _SCORED]
    if generating:
        raise ConfigError(
            f"--eval_tasks: {', '.join(generating)} generate text, which is too slow here: export the checkpoint "
            f"(pretrain export) and run `lm_eval --model hf --tasks {','.join(generating)}`"
        )
    return loaded


def _set_shots(name: str, task: Any, shots: int | None) -> None:
    """Set the examples before each question, unless the task fixes none, as the harness does."""
    own = task.get_config("num_fewshot")
    if shots is not None and own == 0:
        log.info("task %s has no examples before its questions, whatever --eval_tasks_shots says", name)
    elif shots is not None or own is None:
        task.set_config(key="num_fewshot", value=shots or 0)


def _warn_of_known_answers(name: str, task: Any, limit: int | None) -> None:
    """Warn if examples include the question that they stand before, with its answer.

    The harness leaves the question out only if the examples are those of `test_split`, by name.

    Raises:
        DataError: there are too few examples.
    """
    shots = task.get_config("num_fewshot")
    if not shots or not hasattr(task, "sampler"):
        return
    sample, drawn = task.sampler.sample, list[Sequence[Any]]()

    def draw(*given: Any, **named: Any) -> Sequence[Any]:
        drawn.append(sample(*given, **named))
        return drawn[-1]

    task.sampler.sample = draw
    questions = [question for _, question in task.doc_iterator(limit=limit)]
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    try:
        for question in questions:
            task.fewshot_context(question, shots)
    except Exception as error:
        raise _task_error(name, error) from error
    del task.sampler.sample
    if count := sum(question in examples for question, examples in zip(questions, drawn, strict=True)):
        log.warning(
            "task %s: in %d of %d prompts the examples include the question with its answer, so scores are too high: "
            "give the task a fewshot_split with other questions",
            *(name, count, len(questions)),
        )


def _task_error(name: str, error: Exception) -> DataError:
    return DataError(f"--eval_tasks: task {name}: {type(error).__name__}: {error}. Correct the task or leave it out")


class _Model(LM):  # type: ignore[misc]  # lm-eval has no types for others
    """Model of the harness, whose log-likelihoods `begin` says where to get."""

    def __init__(self, tokenizer: Tokenizer, rows: int, context: int, window: int | None) -> None:
        super().__init__()
        self._tokenizer, self._rows, self._context, self._window = tokenizer, rows, context, window
        begin = tokenizer.library.token_to_id(tokenizer.special_tokens.get("bos_token", ""))
        self._prefix = tokenizer.end_of_text if begin is None else begin
        self._begin = None if self._prefix is None else tokenizer.decode([self._prefix])

    def begin(self, score: Score) -> None:
        """Begin an evaluation."""
        self._score, self.truncated, self._stdout = score, 0, sys.stdout

    @property
    def _prefix_token(self) -> int:
        """Token before a text without context."""
        if self._prefix is None:
            raise ConfigError("--eval_tasks: the tokenizer has no token that begins or ends a text, and tasks need it")
        return self._prefix

    def _encode(self, text: str, around: bool = True) -> list[int]:
        """Return the tokens of a text, by default with those around it unless it begins with the first of them."""
        around = around and (self._begin is None or not text.startswith(self._begin))
        return self._tokenizer.encode(text, special_tokens=True, around=around)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihood and hit of each request (context, continuation).

        Spaces at the end of a context belong to the continuation, so a context of spaces is scored as an empty one.
        """
        pairs = []
        for request in requests:
            context, continuation = request.args
            before = self._encode(context.rstrip()) if context else []
            scored = self._encode(context + continuation, around=bool(context))[len(before) :]
            if not before:
                prefix = [self._prefix_token]
                before, scored = prefix, scored[scored[:1] == prefix :]
            pairs.append(((request.task_name, context, continuation), before, scored))
        return self._score_pairs(pairs)

    def _score_pairs(self, pairs: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return log-likelihood and hit of each (task and texts, context, continuation)."""
        rows = []
        for (task, context, continuation), before, scored in pairs:
            if not 0 < len(scored) <= self._context:
                raise ConfigError(
                    f"--eval_tasks: task {task}: a request asks for {len(scored)} tokens, and the model takes 1 to "
                    f"{self._context}: {continuation[:80]!r} after {context[-80:]!r}. Correct the task or leave it out"
                )
            tokens = [*before, *scored]
            self.truncated += len(tokens) > self._context + 1
            rows.append(ScoredRow(tokens[-self._context - 1 :], len(scored)))
        if not rows:
            return []
        longest = max(len(row.tokens) - 1 for row in rows)
        if self._window is not None and longest > self._window:
            raise ConfigError(
                f"--eval_tasks: a request has {longest} tokens, but the model has a sliding window of {self._window}, "
                "and here attention covers all tokens: leave the task out, or give fewer --eval_tasks_shots"
            )
        largest = max(max(row.tokens) for row in rows)  # the last token is scored, so it needs a row, too
        check_prompt("a request of --eval_tasks", [largest], self._tokenizer, self._rows, self._context)
        with redirect_stdout(self._stdout):
            return self._score(rows)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of the context."""
        windows: list[tuple[tuple[str, str, str], list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = self._encode(request.args[0])
            parts = get_rolling_token_windows(tokens, self._prefix_token, self._context, 1)
            windows += [((request.task_name, "", request.args[0]), *make_disjoint_window(part)) for part in parts]
            counts.append(len(windows))
        found = [each for each, _ in self._score_pairs(windows)]
        return [sum(found[begin:end]) for begin, end in pairwise([0, *counts])]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate nothing: tasks that need it are refused."""
        raise NotImplementedError
