"""Completion of settings: what the user leaves open comes from the start point or from the prepared data.

    settings as given, start point -> `complete` -> complete settings

Only `complete` changes settings after they were read. Afterwards it checks the rules over the values that it sets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pretraining.checkpoint.manifest import TRACKERS_STATE, check_same_model, shape_of
from pretraining.checkpoint.run_folder import last_settings, run_of
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.fields import build, values_of
from pretraining.config.plugins import TRACKERS
from pretraining.config.rules import check_completed
from pretraining.config.training import NO_TOKEN, DataConfig, ModelConfig, TrainConfig
from pretraining.config.variants import (
    DEFAULT_VARIANT,
    LlamaShape,
    format_scaling,
    model_settings,
    resolve_shape,
    rounded_vocabulary,
)
from pretraining.errors import CheckpointError, ConfigError, DataError
from pretraining.files import as_local, exists, is_file, is_folder, is_local
from pretraining.object_store import location, text_of
from pretraining.train.run_status import original_of

if TYPE_CHECKING:
    from pretraining.data.prepared import KnownTokenizer, TokenSetting

AnyTrainConfig = TypeVar("AnyTrainConfig", bound=TrainConfig)

log = logging.getLogger(__name__)

_ENDS: tuple[TokenSetting, ...] = ("sep_token", "bos_token")
_CHANGEABLE = ("vocab_size", "rope_theta", "rope_scaling")
"""Dimensions that a run may change in the weights it starts from."""


def find_and_complete(
    given: TrainConfig, find: Callable[[], CheckpointRef | None]
) -> tuple[TrainConfig, CheckpointRef | None]:
    """Find the start point, and complete the settings from it; a collective call that writes nothing.

    Rank 0 does both for all processes. Each process keeps the values that its user gave (`per_node`), and takes those
    that rank 0 has set.

    Args:
        given: settings as given, with the path of the run's folder.
        find: called on rank 0; returns the start point, None = initial weights.

    Returns:
        The complete settings, and the start point.

    Raises:
        PretrainError: as `find`, `refuse_copy` and `complete`.
    """
    from pretraining.distributed.processes import on_rank_zero  # imports torch, which `inspect` does not need

    def find_here() -> tuple[dict[str, Any], CheckpointRef | None]:
        start, before = find(), values_of(given)
        refuse_copy(given, start)
        completed = values_of(complete(given, start))
        return {name: value for name, value in completed.items() if value != before[name]}, start

    changes, start = on_rank_zero(find_here)
    return build(type(given), values_of(given) | changes), start


def refuse_copy(config: TrainConfig, start: CheckpointRef | None) -> None:
    """Raise a CheckpointError if a run is a copy that would write into the mirror or a tracker's run of its original.

    The run's folder in the record of the last start tells: it is another one, and holds the same run.
    """
    if config.checkpoint.ckpt_save_path is None or config.evaluation.eval_only:
        return
    run = config.checkpoint.folder
    original, before = original_of(run), last_settings(run)
    if original is None or before is None:
        return
    mirror, theirs = ((each.checkpoint.ckpt_mirror_path or "").rstrip("/") for each in (config, before))
    ids = start.manifest.state.get(TRACKERS_STATE, {}) if start is not None and start.is_own else {}
    shared = {"--ckpt_mirror_path=<another address, or none>": mirror.partition("?")[0]} if mirror == theirs else {}
    for name in config.report.tracker:
        recorded = [each for each in (ids.get(name), before.report.tracker_run_id) if each is not None]
        is_service = name not in TRACKERS or bool(TRACKERS[name].options)
        if is_service and recorded and config.report.tracker_run_id in (None, *recorded):
            shared["--tracker_run_id=<a new one>"] = f"run {config.report.tracker_run_id or recorded[0]} of {name}"
    if any(shared.values()):
        flags, places = zip(*((flag, place) for flag, place in shared.items() if place), strict=True)
        raise CheckpointError(
            f"is a copy of the run in {original}, and both would write into {' and '.join(places)}: give "
            f"{' and '.join(flags)}. (If it takes the place of the original, move or remove {original}.)",
            path=run,
        )


def tokenizer_of_weights(start: CheckpointRef) -> KnownTokenizer | None:
    """Return the tokenizer in a Hugging Face folder or of the run that saved a checkpoint; None if unknown."""
    from pretraining.data.prepared import KnownTokenizer, recorded_tokenizer
    from pretraining.data.tokenizer import TOKENIZER_FILE, load_tokenizer

    own = recorded_tokenizer(start.config.data, run_of(start.path.parent))
    path = start.path if is_file(start.path / TOKENIZER_FILE) or own is None else location(own)
    if not is_file(path / TOKENIZER_FILE if is_folder(path) else path):
        return None
    try:
        tokenizer = load_tokenizer(path)
    except DataError as error:  # training needs no tokenizer
        log.warning("which tokenizer the weights expect is unknown: %s", error)
        return None
    remedy = f"Prepare the data with that of the weights (pretrain prepare --tokenizer_path={path})"
    return KnownTokenizer(f"that of the weights in {start.path}", path, tokenizer.sha256, tokenizer, remedy)


def _tokenizer_of_tasks(start: CheckpointRef | None) -> str:
    """Return the path of the tokenizer of the weights; raise a ConfigError if it is unknown."""
    known = None if start is None else tokenizer_of_weights(start)
    if known is None:
        raise ConfigError(
            "--eval_tasks needs a tokenizer, and neither data nor weights have one: give --tokenizer_path"
        )
    return as_local(text_of(known.path))


def _check_and_log_changes(start: CheckpointRef, shape: LlamaShape, tokenizer_path: str | None) -> None:
    """Log what a run changes in the model of the weights it starts from; refuse to drop rows of known tokens."""
    from pretraining.data.tokenizer import load_tokenizer

    before = shape_of(start.manifest)
    for name in _CHANGEABLE:
        was, is_now = getattr(before, name), getattr(shape, name)
        if was != is_now:
            texts = [
                ",".join(format_scaling(each)) or "none" if name == "rope_scaling" else each for each in (is_now, was)
            ]
            log.info("%-11s %s in place of %s, that of the weights in %s", name, *texts, start.path)
    rows = shape.vocab_size
    if rows > before.vocab_size:
        log.info("vocab_size  each new row of embedding and head is the mean of the %d rows", before.vocab_size)
    elif rows < before.vocab_size and (tokenizer_path is None or load_tokenizer(tokenizer_path).vocab_size > rows):
        raise ConfigError(
            f"--vocab_size={rows} drops {before.vocab_size - rows} rows of the weights in {start.path}, which may be "
            f"those of tokens: give at least {before.vocab_size}, or the tokenizer that has at most {rows} tokens "
            "(--tokenizer_path)"
        )


def complete(given: AnyTrainConfig, start: CheckpointRef | None) -> AnyTrainConfig:
    """Complete the settings: the model, its vocabulary size, the tokens at the ends of documents, the tokenizer.

    Without a variant, the model has the dimensions of the start point; given dimensions stay, and the start refuses
    differences. The vocabulary size is that of the start point, or that of the tokenizer, rounded up. The ends of
    documents and the tokenizer are those of the resumed run or, in a new run, those of the prepared data. Call it in
    one process of a job, since nodes may see other files.

    Raises:
        CheckpointError: the start point has a model with other dimensions.
        ConfigError: the settings do not fit the model, or datasets name different tokens.
        DataError: the tokenizer or a prepare.json cannot be read.
    """
    from pretraining.data.prepared import check_rows  # imports NumPy

    data = _adopt_data(given, start)
    if given.evaluation.eval_tasks and data.tokenizer_path is None:
        data = replace(data, tokenizer_path=_tokenizer_of_tasks(start))
    with_data = replace(given, data=data)
    completed = replace(with_data, model=_adopt_model(with_data, start))
    check_completed(completed)
    if completed.data.tokenizer_path is None and completed.evaluation.sample_prompt:
        log.info("--sample_prompt has no effect: the data has no tokenizer; give --tokenizer_path")
    if start is not None:
        shape = resolve_shape(completed.model)
        check_same_model(start.manifest, shape, start.path, _CHANGEABLE if start.weights_only else ())
        if start.weights_only:
            _check_and_log_changes(start, shape, completed.data.tokenizer_path)
    if start is None or start.weights_only or given.evaluation.eval_only:
        check_rows(completed.data, resolve_shape(completed.model).vocab_size)
    return completed


def _adopt_model(config: TrainConfig, start: CheckpointRef | None) -> ModelConfig:
    from pretraining.data.tokenizer import load_tokenizer

    needs_vocabulary = config.model.vocab_size is None and config.data.tokenizer_path is not None
    if config.model.model_variant is not None and not needs_vocabulary:
        return config.model
    shape = None if start is None else shape_of(start.manifest)
    model = config.model
    if model.model_variant is None:
        model = ModelConfig(model_variant=DEFAULT_VARIANT) if shape is None else model_settings(shape)
    if needs_vocabulary and shape is not None:
        model = replace(model, vocab_size=shape.vocab_size)
    elif needs_vocabulary:
        path = config.data.tokenizer_path or ""
        entries = load_tokenizer(path).vocab_size
        model = replace(model, vocab_size=rounded_vocabulary(entries))
        log.info("vocab_size  %s, for the %s entries of %s", f"{model.vocab_size:,}", f"{entries:,}", path)
    given = {name: value for name, value in vars(config.model).items() if value not in (None, ())}
    return replace(model, **given)


def _adopt_data(config: TrainConfig, start: CheckpointRef | None) -> DataConfig:
    """Return the data settings with those of the checkpoint or, in a new run, of the prepared data."""
    from pretraining.data.prepared import choose_tokenizer, prepared_token, recorded_tokenizer  # imports NumPy

    data, sets, is_resumed = config.data, config.evaluation.eval_datasets, start is not None and not start.weights_only
    recorded, own = (start.manifest.data, start.config.data) if start is not None and is_resumed else ({}, DataConfig())
    if data.use_dummy_dataset:
        return data
    adopted: dict[str, Any] = {"accept_tokenizer": data.accept_tokenizer or own.accept_tokenizer}
    for name in _ENDS:
        if getattr(data, name) is None and is_resumed:
            adopted[name] = NO_TOKEN if getattr(own, name) == NO_TOKEN else recorded.get(name)
        elif getattr(data, name) is None:
            adopted[name] = prepared_token(name, data, sets)
    asks, is_lost = not is_resumed or config.evaluation.eval_only, False
    if start is not None and data.tokenizer_path is None and own.tokenizer_path is not None:
        kept = recorded_tokenizer(own, run_of(start.path.parent)) or ""
        is_lost = is_local(kept) and not exists(Path(kept))
        adopted["tokenizer_path"] = None if is_lost else kept
        if is_lost:
            log.warning("%s, the tokenizer of the last start, is gone: this start looks for one in the data", kept)
    data = replace(data, **adopted)
    if not asks and not is_lost:
        return data
    weights = tokenizer_of_weights(start) if start is not None and asks else None
    if start is not None and not is_resumed:
        _warn_of_begin_token(start, data, weights)
    asked = data if asks else replace(data, accept_tokenizer=True)
    return replace(data, tokenizer_path=choose_tokenizer(asked, sets, weights))


def _warn_of_begin_token(start: CheckpointRef, data: DataConfig, weights: KnownTokenizer | None) -> None:
    """Warn if the weights expect a begin-of-text token, and the run has none."""
    begin = start.manifest.data.get("bos_token")
    if not start.manifest.data and weights is not None and weights.tokenizer is not None:
        begin = weights.tokenizer.begin_of_text  # weights of others expect what their tokenizer does
    if begin is not None and data.bos is None:
        log.warning(
            "the weights of %s expect token %d before every text, and this run has no bos_token: unless the token "
            "files contain it, give --bos_token=%d",
            *(start.path, begin, begin),
        )
