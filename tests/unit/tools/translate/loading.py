"""Settings of a run from words and flags, of this project or another system, as `pretrain train` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pretraining.config.assignments import Assignment, Reader
from pretraining.config.command_line import assign, read_words
from pretraining.config.read import read, read_values
from pretraining.config.training import TrainConfig
from pretraining.tools.translate.systems import translate_all
from pretraining.tools.translate.translate import translate

Flags = Mapping[str, Any]


def given(words: Sequence[str], flags: Flags | None = None) -> list[Assignment]:
    return [*read_words(TrainConfig, words), *assign(flags or {})]


def load(words: Sequence[str], flags: Flags | None = None) -> TrainConfig:
    return read(TrainConfig, translate(TrainConfig, given(words, flags))).config


def read_unchecked(*words: str) -> Reader[TrainConfig]:
    """Return the given settings, without checks."""
    return read_values(TrainConfig, translate_all(given(words)).assignments)
