"""Evaluation of a checkpoint or a Hugging Face folder, on sets and tasks (`--eval_only`). Nothing is written.

sharded model, the same batches and tasks as evaluations in training -> CheckpointEvaluation -> lines, a JSON object
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from pretraining.checkpoint.chunks import tensor_state
from pretraining.checkpoint.restore import load_newest
from pretraining.checkpoint.run_folder import newest_run_path
from pretraining.checkpoint.start_point import find_newest
from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.host_sync import HostSync
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.errors import CheckpointError, ConfigError
from pretraining.evaluation.evaluators import UserEvaluator, line_of, open_evaluators
from pretraining.evaluation.held_out import Evaluation, evaluate
from pretraining.evaluation.tasks import Results, load_harness, open_tasks
from pretraining.files import from_hub
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.terminal import print_text
from pretraining.model.hf import MODEL_FILES
from pretraining.observability.metrics import Metrics, MetricsHook
from pretraining.train.build import build_model
from pretraining.train.complete import find_and_complete
from pretraining.train.job import join_job
from pretraining.train.open_data import byte_lengths, open_data
from pretraining.train.opening import Opened, build_run_dims, check_kernels
from pretraining.train.plan import recorded_evaluation
from pretraining.train.plan_evaluation import plan_evaluation
from pretraining.train.preemption import StopRequests, preemption_error, stop_reason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointEvaluation:
    """Scores of a checkpoint on the evaluation sets and tasks (None = there are none), and of evaluators."""

    checkpoint: Path
    step: int
    evaluation: Evaluation | None
    tasks: Results | None
    custom: Mapping[str, float]

    def lines(self) -> list[str]:
        """Return the lines of an evaluation in training."""
        of_sets = [] if self.evaluation is None else self.evaluation.lines()
        return [*of_sets, *line_of(self.custom), *([] if self.tasks is None else self.tasks.lines)]

    def as_json(self) -> dict[str, object]:
        """Return the mean scores and those of tasks, and under `sets` the scores per set, as a JSON object."""
        mean: dict[str, float | None] = {}
        sets: dict[str, object] = {}
        if (found := self.evaluation) is not None:
            for name in found.sets:
                sets[name] = {"tokens": found.tokens(name), **_null_if_not_finite(found.numbers(name))}
            mean = _null_if_not_finite({f"evaluation_{name}": value for name, value in found.numbers().items()})
        others = {**self.custom, **({} if self.tasks is None else self.tasks.values)}
        mean |= _null_if_not_finite(others)
        return {"checkpoint": str(self.checkpoint), "step": self.step, **mean, "sets": sets}


def evaluate_and_print(config: TrainConfig, layout: ProcessLayout, requests: StopRequests) -> None:
    """Evaluate a checkpoint, and print the lines of an evaluation in training, and a JSON object on one line."""
    if config.run.dry_run:
        if layout.rank == 0:
            print_text("\n".join(load_harness(config.evaluation).describe()))
        return
    evaluated = evaluate_checkpoint(config, layout, requests)
    if layout.rank == 0:
        for line in evaluated.lines():
            print_text(line)
        print(json.dumps(evaluated.as_json()), flush=True)


def evaluate_checkpoint(
    config: TrainConfig,
    layout: ProcessLayout,
    requests: StopRequests,
    *,
    hook: MetricsHook | None = None,
    evaluators: Mapping[str, UserEvaluator] = MappingProxyType({}),
    is_embedded: bool = False,
) -> CheckpointEvaluation:
    """Evaluate `ckpt_load_path`, else `ckpt_save_path`, on every set; call it in every process of a job.

    Args:
        hook: user-defined metrics.
        evaluators, is_embedded: as in `train`.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, or holds another model.
        ConfigError, DataError: a set cannot be opened, or the model was trained on held-out documents.
        Preempted: a stop was requested.
    """
    with join_job(config, layout, requests, is_embedded) as processes:
        return _evaluate(config, processes, requests, hook, evaluators)


def _evaluate(
    config: TrainConfig,
    processes: Processes,
    requests: StopRequests,
    hook: MetricsHook | None,
    evaluators: Mapping[str, UserEvaluator],
) -> CheckpointEvaluation:
    source = on_rank_zero(lambda: _evaluated_path(config.checkpoint))
    config, newest = find_and_complete(config, lambda: find_newest(source))
    assert newest is not None
    shape, device, manifest = resolve_shape(config.model), processes.device, newest.manifest
    trained = manifest.facts_of_data
    on_every_rank(lambda: _check_held_out(config, trained.get("held_out_fraction")))
    check_kernels(config, shape, device)
    dims, data = build_run_dims(config, processes), open_data(config, processes, trained.get("datasets", {}))
    batch = resolve_batch_sizes(config.batch, dims.data, manifest.global_batch_size or None)
    record = recorded_evaluation(manifest)
    if config.evaluation.eval_batches != newest.config.evaluation.eval_batches:
        record = replace(record, sequences=None)  # another number of batches is asked for
    tasks = open_tasks(config, processes, dims, newest.config.data if trained else None)
    own = open_evaluators(config, evaluators)
    opened = Opened(config, processes, dims, data, tasks, own)
    planned = on_every_rank(lambda: plan_evaluation(opened, batch, record))
    for line in planned.notes:
        log.info("%s", line)
    sources = planned.sources
    model = build_model(shape, config, dims, device)
    start = load_newest(source, tensor_state(model.parameters, None))
    table_V = byte_lengths(config, processes, shape.vocab_size) if sources else None
    stop = 0

    with HostSync() as host_sync:

        def should_stop() -> bool:
            nonlocal stop
            stop = host_sync.exchange(0.0, requests.pending()).stop
            return stop != 0

        processes.activity.end_step(start.step)  # setup is done: `hang_timeout` applies from here on
        processes.activity.turn_to("evaluation")
        metrics = on_every_rank(lambda: Metrics(config.evaluation.extra_scores, hook, model.module))
        found = evaluate(model.module, sources, device, should_stop, metrics, table_V) if sources else None
        custom = {} if own is None or stop else own.run(model.module, start.step, found.values() if found else ())
        scores = None if tasks is None or stop else tasks.evaluate(model.module, should_stop)
    if stop:
        raise preemption_error(stop, f"in an evaluation ({stop_reason(stop)}): nothing was written.")
    return CheckpointEvaluation(start.path, start.manifest.step, found, scores, custom)


def _evaluated_path(config: CheckpointConfig) -> Path:
    if config.ckpt_load_path is not None:
        return from_hub(config.ckpt_load_path, MODEL_FILES, CheckpointError)
    return Path(newest_run_path(str(config.folder)))


def _check_held_out(config: TrainConfig, trained: float | None) -> None:
    now = config.data.held_out_fraction
    if trained is not None and now > trained:
        raise ConfigError(
            f"--held_out_fraction={now} includes training documents of the run: give --held_out_fraction={trained}"
        )


def _null_if_not_finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
