"""Plan of the evaluations of a run: the held-out documents of all datasets, and each folder of `--eval_datasets`.

    what is open, record of the first start -> `plan_evaluation` -> sources with their definitions, record, lines to log

The sequences of a set are the first of its order, so data, sequence length, document mask and number of sequences
determine them: they are the definition of the set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pretraining.best import Measure
from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.dataset import build_evaluation_loader
from pretraining.data.evaluation_sets import EvaluationFolder
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets, Samples
from pretraining.errors import ConfigError
from pretraining.evaluation.held_out import EvaluationRecord, EvaluationSource, definition_of
from pretraining.evaluation.tasks import Tasks
from pretraining.train.open_data import batch_opener
from pretraining.train.opening import Opened

LoaderOpener = Callable[..., tuple[Loader, dict[str, int], dict[str, int]]]
"""`build_evaluation_loader` with what all sets share."""


class PlannedSource(NamedTuple):
    """A source of evaluation sets, and the sequences of each set by name."""

    source: EvaluationSource
    counts: dict[str, int]


@dataclass(frozen=True)
class EvaluationPlan:
    """Evaluation sets of a run.

    Attributes:
        loss: loss on the set that `--best_by` names, else the mean over all sets.
        metric: metric of a task or number of an evaluator that decides which checkpoint is best; None = the loss does.
        record: for the run's checkpoints.
        notes: lines to log.
    """

    sources: list[EvaluationSource]
    loss: Measure
    metric: Measure | None
    record: EvaluationRecord
    notes: tuple[str, ...] = ()


def plan_evaluation(opened: Opened, batch: BatchSizes, first: EvaluationRecord) -> EvaluationPlan:
    """Plan the evaluation sets; they are planned at the start, so that a set with too few documents fails early.

    Args:
        first: record of the first start of the run; empty in a new run, and in a run that recorded no sets.

    Raises:
        DataError: a set has too few tokens for one sample.
        ConfigError: `--best_by` names no set, task or evaluator, or a set that gets no sequence of `eval_batches`.
    """
    config, dims = opened.config, opened.dims
    asked = config.evaluation.eval_batches * batch.global_batch_size
    sequences = asked if first.sequences is None else first.sequences
    open_loader = partial(
        build_evaluation_loader,
        plan=batch,
        rank=dims.data_rank,
        seed=config.run.seed,
        vocab_size=resolve_shape(config.model).vocab_size,
        sequences=sequences,
        group=dims.context_group,
    )
    planned, weights = [], first.weights
    if config.data.held_out_fraction > 0:
        held_out, weights = _held_out_source(opened, open_loader, first)
        planned.append(held_out)
    planned += [_folder_source(opened, folder, datasets, open_loader) for folder, datasets in opened.data.folders]
    counts = {name: count for part in planned for name, count in part.counts.items()}
    sources = [part.source for part in planned]
    metric = _deciding_metric(opened, counts)
    loss = _loss_measure(sources, opened.config.evaluation.best_by if metric is None else None)
    if not planned:
        return EvaluationPlan(sources, loss, metric, first)
    notes = [
        f"evaluation set {name} gets none of the {sequences} sequences of an evaluation, so it has no scores"
        for name, count in counts.items()
        if count == 0
    ]
    if sequences != asked:
        notes.append(f"evaluations read {sequences} sequences, as since the first start, not {asked} (--eval_batches)")
    return EvaluationPlan(sources, loss, metric, EvaluationRecord(sequences, weights), tuple(notes))


def _held_out_source(
    opened: Opened, open_loader: LoaderOpener, first: EvaluationRecord
) -> tuple[PlannedSource, dict[str, int]]:
    """Return the source of the held-out documents, a set per dataset, and their weights since the first start."""
    config = opened.config.data
    loader, counts, weights_now = open_loader(opened.data.training, config, split="held_out")
    weights = first.weights if first.weights.keys() == weights_now.keys() else weights_now
    sets = {samples.name: samples for samples in loader.reader.sources}
    definitions = tuple(_definition(config, samples, counts[name]) for name, samples in sets.items())
    shares, batches = tuple(weights[name] for name in sets), batch_opener(loader, opened.processes)
    return PlannedSource(EvaluationSource(tuple(sets), batches, shares, definitions), counts), weights


def _folder_source(
    opened: Opened, folder: EvaluationFolder, datasets: OpenedDatasets, open_loader: LoaderOpener
) -> PlannedSource:
    """Return the source of a folder of `--eval_datasets`, which is one set."""
    loader, counts, _ = open_loader(datasets, folder.config, split="train")
    [samples] = loader.reader.sources
    definition = _definition(folder.config, samples, counts[samples.name])
    source = EvaluationSource((folder.name,), batch_opener(loader, opened.processes), (1,), (definition,))
    return PlannedSource(source, {folder.name: counts[samples.name]})


def _definition(config: DataConfig, samples: Samples, sequences: int) -> dict[str, Any]:
    """Return everything that the loss on a set depends on besides the model, as JSON values."""
    return {
        "seq_length": config.seq_length,
        "document_mask": config.document_mask,
        "data": samples.fingerprint,
        "sequences": sequences,
    }


def _loss_measure(sources: Sequence[EvaluationSource], best_by: str | None) -> Measure:
    """Return the loss on an evaluation set; None = the mean over all sets."""
    key = "evaluation_loss" if best_by is None else f"evaluation_loss/{best_by}"
    return Measure("loss", key, definition_of(sources, best_by))


def _deciding_metric(opened: Opened, counts: dict[str, int]) -> Measure | None:
    """Return the number of a task or an evaluator that `--best_by` names; None = the loss decides.

    Raises:
        ConfigError: it names neither a set with sequences nor a number.
    """
    evaluation = opened.config.evaluation
    best_by = evaluation.best_by
    deciders = [decider for decider in (opened.tasks, opened.evaluators) if decider is not None]
    if best_by is None or counts.get(best_by):
        return None
    if best_by in counts:
        raise ConfigError(
            f"--best_by={best_by} gets no sequence of --eval_batches={evaluation.eval_batches} batches; the "
            f"evaluation sets are {', '.join(counts)}"
        )
    for decider in deciders:
        if (metric := decider.best_by(best_by)) is not None:
            return metric
        names = {*decider.rehearsal.definitions, *evaluation.eval_tasks} if isinstance(decider, Tasks) else ()
        if best_by.rpartition("/")[0] in names:
            break  # a task has no such metric, so it is no number of an evaluator
    there = [*counts, *(name for decider in deciders for name in decider.names())]
    raise ConfigError(f"--best_by={best_by} is none of what evaluations find: {', '.join(there)}")
