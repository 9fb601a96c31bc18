"""User-defined evaluators (`--evaluators`): code that is called with the model at each evaluation."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import nn

from pretraining.best import Measure
from pretraining.config.plugins import load_plugin, plugin_errors
from pretraining.config.training import TrainConfig
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.distributed.compile import without_compiling
from pretraining.distributed.fsdp import reshard_model
from pretraining.distributed.processes import on_every_rank, on_rank_zero
from pretraining.errors import ConfigError
from pretraining.observability.display import CUSTOM

VALUES = f"evaluation_{CUSTOM}"
"""Beginning of the names of values."""


class UserEvaluator(Protocol):
    """Code that is called on all ranks, in the same order.

    With an attribute `larger_is_better`, a bool, `--best_by` takes one of its numbers.
    """

    def __call__(self, model: nn.Module, tokenizer: Tokenizer | None, step: int) -> Mapping[str, float]:
        """Return numbers by name; those of rank 0 count.

        Args:
            model: `model(tokens)`, with int64 [B, S] on its device, returns logits [B, S, V]; a collective call.
            tokenizer: of the data or the weights; None = unknown.
        """


@dataclass(frozen=True)
class Evaluators:
    """The user-defined evaluators of a run, by their names in messages."""

    evaluators: Mapping[str, UserEvaluator]
    tokenizer: Tokenizer | None

    @torch.no_grad()
    def run(self, model: nn.Module, step: int, taken: Collection[str] = ()) -> dict[str, float]:
        """Return the numbers of all evaluators, as `evaluation_custom/<name>`; a collective call.

        Random states stay as they are.

        Args:
            taken: names that scores have.

        Raises:
            ConfigError: an evaluator fails, or two return the same name; on all ranks.
        """
        found: dict[str, float] = {}
        for path, evaluator in self.evaluators.items():
            with keeping_random_states(), without_compiling():
                numbers = on_every_rank(partial(_call, path, evaluator, model, self.tokenizer, step))
            reshard_model(model)
            numbers = on_rank_zero(lambda own=numbers: own)  # type: ignore[misc]
            if twice := sorted(numbers.keys() & {*found, *taken}):
                raise ConfigError(f"--evaluators={path}: another one returns {', '.join(twice)}, too: rename it")
            found |= numbers
        return found

    def best_by(self, name: str) -> Measure | None:
        """Return the choice of a number; None if no evaluator says on which side its numbers are better."""
        sides = {
            evaluator.larger_is_better
            for evaluator in self.evaluators.values()
            if hasattr(evaluator, "larger_is_better")
        }
        if len(sides) != 1:
            return None
        return Measure(name, VALUES + name, ",".join(self.evaluators), bool(*sides))

    def names(self) -> list[str]:
        """Return the names that `best_by` takes, as far as they are known."""
        return [f"a number of {path} with its attribute larger_is_better" for path in self.evaluators]


def line_of(values: Mapping[str, float]) -> list[str]:
    """Return the log line of the values of evaluators; none without values."""
    parts = [f"{name.removeprefix(VALUES)} {value:.4g}" for name, value in values.items()]
    return ["  ".join(("evaluation_custom", *parts))] if parts else []


def _call(
    path: str, evaluator: UserEvaluator, model: nn.Module, tokenizer: Tokenizer | None, step: int
) -> dict[str, float]:
    with plugin_errors("evaluators", path):
        return {VALUES + name: float(value) for name, value in evaluator(model, tokenizer, step).items()}


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def open_evaluators(
    config: TrainConfig, given: Mapping[str, UserEvaluator] = MappingProxyType({})
) -> Evaluators | None:
    """Make the evaluators of the settings, on every rank; None if there are none. A collective call.

    Args:
        given: evaluators of a Trainer, by their names in the settings.

    Raises:
        ConfigError: one cannot be imported or made.
    """
    paths, tokenizer_path = config.evaluation.evaluators, config.data.tokenizer_path
    if not paths:
        return None

    def make() -> dict[str, UserEvaluator]:
        found = {}
        for path in paths:
            with plugin_errors("evaluators", path):
                found[path] = given[path] if path in given else load_plugin("evaluators", path)()
        return found

    def read() -> Tokenizer | None:
        return None if tokenizer_path is None else load_tokenizer(tokenizer_path)

    return Evaluators(on_every_rank(make), on_rank_zero(read))
