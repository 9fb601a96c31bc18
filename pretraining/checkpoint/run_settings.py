"""Settings of a run: those that the user gave, completed from the start point or the data."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from pretraining.checkpoint.manifest import check_same_model, shape_of
from pretraining.checkpoint.own_checkpoints import NO_COPIES, Copies
from pretraining.checkpoint.run_path import TIMESTAMP, existing_run_path
from pretraining.checkpoint.start_point import CheckpointRef, find_start, on_rank_zero
from pretraining.config.rules import check_config
from pretraining.config.training import DataConfig, ModelConfig, TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT, model_settings, resolve_shape

AnyTrainConfig = TypeVar("AnyTrainConfig", bound=TrainConfig)

log = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 128


def resolve_run(config: AnyTrainConfig, copies: Copies = NO_COPIES) -> tuple[AnyTrainConfig, CheckpointRef | None]:
    """Return complete settings, and the start point of a run with them; writes nothing.

    A collective call if torch is imported. A {timestamp} without a folder stays in the path.

    Args:
        copies: as in `find_start`.

    Raises:
        CheckpointError: as in `find_start`, or the start point has a model with other dimensions.
        ConfigError, DataError: as in `adopt_settings`.
    """
    pattern = config.checkpoint.ckpt_save_path
    if pattern is not None and TIMESTAMP in pattern:
        # Settings in a folder are complete, so compare them with the completed settings of a new run.
        new = adopt_settings(config, find_start(replace(config.checkpoint, init_from="auto")))
        ignored = frozenset({"sep_token"} if config.data.sep_token is None else ())
        path = on_rank_zero(lambda: existing_run_path(pattern, new, ignored))
        config = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=path or pattern))
    start = find_start(config.checkpoint, copies=copies)
    config = adopt_settings(config, start)
    if start is not None:
        check_same_model(start.manifest, resolve_shape(config.model), start.path)
    return config, start


def adopt_settings(config: AnyTrainConfig, start: CheckpointRef | None) -> AnyTrainConfig:
    """Complete the settings: the model, its vocabulary size, and the separator of documents.

    Without a variant, the model has the dimensions of the start point; given dimensions stay, and the start refuses
    differences. The vocabulary size is that of the start point, or that of the tokenizer, rounded up. The separator is
    that of the resumed run or, in a new run, that of the prepared data. A collective call if torch is imported.

    Raises:
        ConfigError: the settings do not fit the model, or datasets name different separators.
        DataError: the tokenizer or a prepare.json cannot be read.
    """
    adopted = replace(config, model=_adopt_model(config, start), data=_adopt_separator(config, start))
    check_config(adopted)
    return adopted


def _adopt_model(config: TrainConfig, start: CheckpointRef | None) -> ModelConfig:
    needs_vocabulary = config.model.vocab_size is None and config.data.tokenizer_path is not None
    if config.model.model_variant is not None and not needs_vocabulary:
        return config.model
    shape = None if start is None else shape_of(start.manifest)
    model = config.model
    if model.model_variant is None:
        model = ModelConfig(model_variant=DEFAULT_VARIANT) if shape is None else model_settings(shape)
    if needs_vocabulary:
        rows = _vocabulary_for(config.data.tokenizer_path or "") if shape is None else shape.vocab_size
        model = replace(model, vocab_size=rows)
    given = {name: value for name, value in vars(config.model).items() if value not in (None, ())}
    return replace(model, **given)


def _adopt_separator(config: TrainConfig, start: CheckpointRef | None) -> DataConfig:
    from pretraining.data.storage.dataset_files import prepared_separator  # imports NumPy

    data = config.data
    if data.sep_token is not None or data.use_dummy_dataset:
        return data
    if start is not None and not start.weights_only:
        return replace(data, sep_token=start.manifest.data.get("sep_token"))
    return replace(data, sep_token=on_rank_zero(lambda: prepared_separator(data, config.evaluation.eval_datasets)))


def _vocabulary_for(tokenizer_path: str) -> int:
    """Return an embedding size for a tokenizer: a multiple of 128, which makes matrix products faster."""
    from pretraining.data.tokenizer import load_tokenizer

    entries = on_rank_zero(lambda: load_tokenizer(tokenizer_path).vocab_size)
    rows = -(-entries // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if rows != entries:
        log.info("vocab_size  %s, for the %s entries of %s", f"{rows:,}", f"{entries:,}", tokenizer_path)
    return rows
