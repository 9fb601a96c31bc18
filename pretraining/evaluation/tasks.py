"""Benchmark tasks of a run (`--eval_tasks`): lm-eval on rank 0 (harness.py), the model on all ranks (scoring.py)."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from pretraining.best import Measure
from pretraining.config.training import DataConfig, EvaluationConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.tokenizer import load_tokenizer
from pretraining.distributed.dims import Dims
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.errors import ConfigError
from pretraining.evaluation.scoring import Score, Scorer
from pretraining.observability.display import TASK

if TYPE_CHECKING:
    from pretraining.evaluation.harness import Harness

log = logging.getLogger(__name__)

NAME = f"evaluation_{TASK}"
"""Beginning of the names of values."""


class Results(NamedTuple):
    """Results of tasks and groups.

    Attributes:
        values: by name, `evaluation_task/<task>/<metric>`.
        lines: log lines; those of a group's parts are left out.
        directions: whether a larger value is better, by `<task>/<metric>`; None = the harness does not say.
        definitions: by task or group, what its values depend on besides the model, as JSON values per task.
    """

    values: dict[str, float]
    lines: list[str]
    directions: dict[str, bool | None]
    definitions: dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run.

    Attributes:
        harness: None on ranks other than 0.
        rehearsal: results of a model that knows nothing: names, directions, definitions.
    """

    harness: Harness | None
    rehearsal: Results
    scorer: Scorer

    def evaluate(self, model: nn.Module, should_stop: Callable[[], bool]) -> Results | None:
        """Evaluate a model on all tasks, as `Scorer.serve`; random states stay as they are."""

        def ask(score: Score) -> Results:
            assert self.harness is not None
            return results_of(self.harness.evaluate(score))

        return self.scorer.serve(model, ask, should_stop)

    def best_by(self, name: str) -> Measure | None:
        """Return the choice of a `<task>/<metric>`; None if no task has it.

        Raises:
            ConfigError: the harness does not say whether larger values are better.
        """
        if name not in self.rehearsal.directions:
            return None
        larger_is_better = self.rehearsal.directions[name]
        if larger_is_better is None:
            raise ConfigError(f"--best_by={name}: lm-eval does not say whether larger values are better: take another")
        facts = self.rehearsal.definitions[name.rpartition("/")[0]]
        digest = hashlib.sha256(json.dumps([name, facts], sort_keys=True).encode()).hexdigest()[:16]
        return Measure(name, NAME + name, digest, larger_is_better)

    def names(self) -> list[str]:
        """Return the names that `best_by` takes."""
        return list(self.rehearsal.directions)


def load_harness(config: EvaluationConfig) -> Harness:
    """Load the tasks of the settings; raises as `Harness`."""
    try:
        from pretraining.evaluation.harness import Harness
    except ImportError as error:
        raise ConfigError(
            f"--eval_tasks needs the `lm-eval` package: pip install 'pretraining[tasks]' ({error})"
        ) from None
    return Harness(config)


def open_tasks(config: TrainConfig, processes: Processes, dims: Dims, trained: DataConfig | None) -> Tasks | None:
    """Open the tasks of the settings, if there are any. A collective call that raises as `Harness` and its rehearsal.

    Args:
        trained: settings of the data that the model is trained on; None = unknown.
    """
    if not config.evaluation.eval_tasks:
        return None
    path, shape = config.data.tokenizer_path, resolve_shape(config.model)
    assert path is not None  # of the settings, the data or the weights (train/complete.py)
    harness = on_every_rank(lambda: load_harness(config.evaluation) if processes.is_main else None)

    def rehearse() -> Results:
        assert harness is not None
        tokenizer, rows = load_tokenizer(path), shape.vocab_size
        context = max(0 if trained is None else trained.seq_length, shape.max_position_embeddings)  # as in an export
        if trained is not None and trained.bos != tokenizer.begin_of_text:
            begins = (tokenizer.begin_of_text, trained.bos)
            log.warning(
                "tasks: their texts begin with %s, as the tokenizer says, and documents with %s, as --bos_token says. "
                "Unless the token files contain the former, scores may be too low",
                *("no token" if begin is None else tokenizer.named(begin) for begin in begins),
            )
        return results_of(harness.rehearse(tokenizer, rows, context, shape.sliding_window))

    rehearsal = on_rank_zero(rehearse)
    tokens = config.batch.batch_size * config.data.seq_length // config.parallel.context_parallel_size
    return Tasks(harness, rehearsal, Scorer(processes, dims, tokens))


def results_of(found: Mapping[str, Any]) -> Results:
    """Return the numbers among what lm-eval has found (`lm_eval.result_schema.EvalResults`)."""
    values: dict[str, float] = {}
    directions: dict[str, bool | None] = {}
    lines: dict[str, str] = {}
    for task, row in found["results"].items():
        scores = []
        for key in (key for key, value in row.items() if "," in key and _is_number(value)):
            metric, _, kind = key.partition(",")  # kind: the filter of the answers
            suffix = "" if kind == "none" else f".{kind}"
            values[f"{NAME}{task}/{metric}{suffix}"] = float(row[key])
            if metric.endswith("_stderr"):
                continue
            directions[f"{task}/{metric}{suffix}"] = found["higher_is_better"].get(task, {}).get(metric)
            error = row.get(f"{metric}_stderr,{kind}")
            scores.append(f"{metric}{suffix} {row[key]:.4f}" + (f" ± {error:.4f}" if _is_number(error) else ""))
        if scores:
            lines[task] = f"{NAME}{task}  {'  '.join(scores)}"
    parts: dict[str, list[str]] = found["group_subtasks"]
    facts = {
        task: {"version": found["versions"][task], "shots": found["n-shot"].get(task), "questions": count["effective"]}
        for task, count in found["n-samples"].items()
    }
    definitions = {task: {leaf: facts[leaf] for leaf in _leaves(task, parts)} for task in found["results"]}
    within = {part for group in parts if group in lines for part in parts[group]}
    return Results(values, [line for task, line in lines.items() if task not in within], directions, definitions)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _leaves(task: str, parts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the tasks of a group and of the groups in it, or the task itself."""
    for part in parts.get(task, ()):
        yield from _leaves(part, parts)
    if task not in parts:
        yield task
