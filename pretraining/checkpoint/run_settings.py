"""With which settings a run starts: what was given, and what is adopted from its start point or its data."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from pretraining.checkpoint.manifest import check_same_model, shape_of
from pretraining.checkpoint.run_path import TIMESTAMP, existing_run_path
from pretraining.checkpoint.start_point import CheckpointRef, find_start, on_rank_zero
from pretraining.config.rules import check_config
from pretraining.config.training import DataConfig, ModelConfig, TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT, model_settings, resolve_shape

AnyTrainConfig = TypeVar("AnyTrainConfig", bound=TrainConfig)

log = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 128


def resolve_run(config: AnyTrainConfig) -> tuple[AnyTrainConfig, CheckpointRef | None]:
    """Return settings that leave nothing open, and what a run with them starts from; writes nothing.

    A collective call, or one of a process alone. A {timestamp} that has made no folder yet stays.

    Raises:
        CheckpointError: as `find_start`, or it is of a model with other dimensions.
        ConfigError, DataError: as `adopt_settings`.
    """
    pattern = config.checkpoint.ckpt_save_path
    if pattern is not None and TIMESTAMP in pattern:
        # A folder's settings leave nothing open: compare them with what a new run would adopt.
        new = adopt_settings(config, find_start(replace(config.checkpoint, init_from="auto")))
        ignored = frozenset({"sep_token"} if config.data.sep_token is None else ())
        path = on_rank_zero(lambda: existing_run_path(pattern, new, ignored))
        config = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=path or pattern))
    start = find_start(config.checkpoint)
    config = adopt_settings(config, start)
    if start is not None:
        check_same_model(start.manifest, resolve_shape(config.model), start.path)
    return config, start


def adopt_settings(config: AnyTrainConfig, start: CheckpointRef | None) -> AnyTrainConfig:
    """Fill in what settings leave open: the model, its vocabulary, and the separator of documents.

    A model without a variant has the dimensions of what the run starts from; dimensions that were given stay, and the
    start refuses them if they differ. A vocabulary is that of the start, or big enough for the tokenizer. A separator
    is that of the run that is resumed or, in a new run, of the prepared data. A collective call, or one of a process
    alone.

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
    """Return the size of an embedding for a tokenizer: of a multiple of 128 rows, matrix products are faster."""
    from pretraining.data.tokenizer import load_tokenizer

    entries = on_rank_zero(lambda: load_tokenizer(tokenizer_path).vocab_size)
    rows = -(-entries // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if rows != entries:
        log.info("vocab_size  %s, for the %s entries of %s", f"{rows:,}", f"{entries:,}", tokenizer_path)
    return rows
