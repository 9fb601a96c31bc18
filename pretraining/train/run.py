"""Run from its settings to its end, step by step.

    join_job                 the processes of the job meet
    _holding_run_folder      the run's folder, its lease
    find_and_complete        start point, complete settings
    open_run                 checks; dimensions, data, tasks
    plan_run                 Plan
    build_run                Run
    train_loop               steps

The command line and `pretraining.Trainer` start here. After a damaged checkpoint or a divergence, another start point
is found, and the run is completed, planned and built from it. A run that diverges goes back to the newest checkpoint
before the divergence, and skips the samples since. PaLM got past its loss spikes this way (Chowdhery et al., 2022,
section 5.1): a spike came from certain batches meeting certain weights, and did not come back with other batches.

    divergence -> restore an older checkpoint -> give it a manifest with the skipped samples -> set others aside

A run that is killed before it has the new manifest diverges again at its next start. If its newest checkpoint was saved
after the last skipped update, the count in this checkpoint raises the divergence at once. From the new manifest, later
starts and `pretrain inspect` know the skipped samples.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from pretraining.checkpoint.copies import TRIES_OF_START
from pretraining.checkpoint.lease import Lease, hold_lease
from pretraining.checkpoint.mirror import list_copies
from pretraining.checkpoint.run_folder import find_run_folder, make_run_path
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import TrainConfig
from pretraining.data.sampling.mixture import Range
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.errors import DamagedError, DivergenceError, Interrupted, OutdatedError, Preempted
from pretraining.evaluation.evaluators import UserEvaluator
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.machine import name_user
from pretraining.observability.events import Events
from pretraining.observability.metrics import MetricsHook
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.optim.state import evaluation_mode
from pretraining.train.build import build_run
from pretraining.train.complete import find_and_complete
from pretraining.train.job import Job, join_job
from pretraining.train.loop import Run, train_loop
from pretraining.train.memory_check import explain_out_of_memory
from pretraining.train.messages import describe_end, describe_speed
from pretraining.train.opening import open_run
from pretraining.train.plan import Rollback, plan_run
from pretraining.train.preemption import StopRequests, preemption_error, stop_reason
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)

TERMINATED = 143
"""Exit code that shells report for a process that SIGTERM ended."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Attributes:
        status: finished: this invocation did all its steps, or early stopping ended the run; preempted: a request
            stopped it early, and the next start resumes it if it was saved.
        step: updates done, of `total_steps`.
        loss: last reported loss, mean over the tokens of its interval; None before the first report.
        evaluation_loss: loss of the newest evaluation; None without one.
        best_evaluation_loss: lowest evaluation loss of the run so far.
        metrics: newest value per name in metrics.jsonl, of this invocation; None = unknown. Rates are those of this
            process; all other values are the same in each process.
        run_path: the run's folder; None if the run saves nothing.
        checkpoint: newest checkpoint; None if nothing was saved.
        metrics_file: one JSON object per report; None if the run saves nothing.
    """

    status: Literal["finished", "preempted"]
    step: int
    total_steps: int
    tokens_seen: int
    loss: float | None
    evaluation_loss: float | None
    best_evaluation_loss: float | None
    metrics: dict[str, Any] = field(repr=False)
    run_path: Path | None
    checkpoint: Path | None
    metrics_file: Path | None


def train(
    config: TrainConfig,
    layout: ProcessLayout,
    stop_requests: StopRequests | None = None,
    threads: CpuThreads | None = None,
    *,
    hook: MetricsHook | None = None,
    evaluators: Mapping[str, UserEvaluator] = MappingProxyType({}),
    is_embedded: bool = False,
) -> TrainResult:
    """Train in every process of a job.

    Args:
        config: settings as given, the same in every process.
        stop_requests: None = no signals and no deadline.
        threads: CPU threads chosen for this process; None = keep the current number.
        hook: user-defined metrics.
        evaluators: user-defined evaluators, by their names in the settings; the settings name the others' classes.
        is_embedded: whether the process belongs to a script; then a single process that hangs is not killed.

    Raises:
        Preempted: the run was asked to stop early and is saved; `Interrupted` after Ctrl-C.
        PretrainError: any mistake of the user; the message says what to change.
    """
    name_user()
    requests = StopRequests() if stop_requests is None else stop_requests
    # The status is written last: by then the error has its final text.
    with (
        nullcontext() if config.checkpoint.ckpt_save_path is not None else _preemption_exits_as_terminated(),
        RunStatusWriter(config.run.max_starts_without_progress, layout.rank == 0) as status,
        join_job(config, layout, requests, is_embedded) as processes,
        _holding_run_folder(config, processes) as (given, lease),
    ):
        job = Job(processes, requests, status, lease, threads, hook, evaluators, layout.launcher)
        return _finish(train_with_rollbacks(given, job))


@contextmanager
def _holding_run_folder(config: TrainConfig, processes: Processes) -> Iterator[tuple[TrainConfig, Lease | None]]:
    """Make the folder of a run that saves, and hold its lease; yield the settings with its path, and the lease."""
    path = on_rank_zero(lambda: make_run_path(find_run_folder(config)))
    given = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=path))
    with nullcontext() if path is None else hold_lease(Path(path), processes) as lease:
        yield given, lease


def train_with_rollbacks(given: TrainConfig, job: Job) -> Run:
    """Train to the end, with at most `max_rollbacks` rollbacks without progress in between; a collective call.

    A damaged start point and a divergence lead to another start point, from which the settings are completed and the
    run is planned again.

    Args:
        given: settings as given, with the path of the run's folder.

    Returns:
        The run that trained to the end.

    Raises:
        DivergenceError: no rollback is left.
        CheckpointError: no checkpoint is good, or one cannot be written or moved.
    """
    damaged, rollback, opened = dict[str, str](), None, None
    while True:
        if opened is not None:
            _free_memory()  # of the run that was damaged, outdated or has diverged
        config, start = find_and_complete(given, partial(_find_start, given, damaged, rollback))
        opened = open_run(config, start, job, opened)
        with explain_out_of_memory(config, opened.dims, job.processes):
            try:
                plan = on_every_rank(partial(plan_run, start, opened, rollback))
                run = build_run(plan, job)
            except OutdatedError as error:
                log.info("%s", error)
                continue
            except DamagedError as error:
                assert start is not None
                is_named = str(start.path) in str(error)
                damaged[start.source] = str(error) if is_named else f"{start.path}: {error}"
                continue
            divergence = _train_until_divergence(run)
        if divergence is None:
            return run
        rollback = _rollback_from(run, divergence)
        del run, plan


def _find_start(given: TrainConfig, damaged: Mapping[str, str], rollback: Rollback | None) -> CheckpointRef | None:
    """Find the start point, here or in the mirror; raises as `find_start`."""
    tries = TRIES_OF_START if damaged or rollback is not None else 1
    before = None if rollback is None else rollback.before_step
    return find_start(given.checkpoint, damaged, before, list_copies(given.checkpoint, tries))


def _train_until_divergence(run: Run) -> DivergenceError | None:
    """Train, and return the divergence, if any; a raised exception would keep the run's memory alive."""
    try:
        train_loop(run)
    except DivergenceError as divergence:
        return divergence.with_traceback(None)
    return None


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


def _rollback_from(run: Run, divergence: DivergenceError) -> Rollback:
    """Return what a rollback keeps of a run; raise the divergence if no rollback is left.

    Samples are kept by their numbers within datasets: global samples may get other global numbers before a phase.
    """
    before, first, last = run.plan.rollback, divergence.first_step, divergence.last_step
    number = 1 if before is None or first > before.furthest else before.number + 1
    if number > run.plan.config.guard.max_rollbacks:
        raise divergence
    furthest = last if before is None else max(before.furthest, last)
    skipped = dict[str, Sequence[Range]]({} if before is None else before.skipped)
    for name, ranges in run.plan.loader.reader.mixture.numbers([divergence.samples]).items():
        skipped[name] = [*skipped.get(name, ()), *ranges]
    return Rollback(number, first, last, furthest, divergence.samples, skipped, run.state.stop_step)


@contextmanager
def _preemption_exits_as_terminated() -> Iterator[None]:
    """Exit with the code of SIGTERM when a run that saves nothing is preempted, so that nobody restarts it."""
    try:
        yield
    except Preempted as error:
        if not isinstance(error, Interrupted):
            error.exit_code = TERMINATED
        raise


def _finish(run: Run) -> TrainResult:
    """Log how a run ended, and return its result, or raise `Preempted`; a collective call."""
    config, processes = run.plan.config, run.plan.processes
    if config.data.use_dummy_dataset and run.observer.step_seconds:
        log.info(describe_speed(run.observer, processes))
    if run.state.preempted and not (run.state.finished and not run.evaluator.pending):
        state, is_saved = run.state, config.checkpoint.ckpt_save_path is not None
        saved = "saved; the same command resumes from there" if is_saved else "nothing was saved"
        text = f"at step {state.step} of {state.total_steps} ({stop_reason(state.stop)}): {saved}."
        preempted = preemption_error(state.stop, text)
        preempted.result = _make_result(run, "preempted")
        raise preempted
    log.info(describe_end(run))
    if (sampler := run.plan.opened.sampler) is not None:
        with evaluation_mode(run.context.optimizer, run.context.model.masters_changed):
            events = run.observer.events if run.observer.newest else Events()  # a start without a step has none
            sampler.show(run.context.model.module, processes.device, run.state.step, events)
    return _make_result(run, "finished")


def _make_result(run: Run, status: Literal["finished", "preempted"]) -> TrainResult:
    state, checkpoints, run_path = run.state, run.checkpoints, run.plan.config.checkpoint.ckpt_save_path
    return TrainResult(
        status=status,
        step=state.step,
        total_steps=state.total_steps,
        tokens_seen=state.progress.tokens,
        loss=run.observer.last_loss,
        evaluation_loss=run.evaluator.loss.value,
        best_evaluation_loss=run.evaluator.loss.best,
        metrics=dict(run.observer.newest),
        run_path=None if run_path is None else Path(run_path),
        checkpoint=checkpoints.newest,
        metrics_file=None if run_path is None else Path(run_path) / LOGS / METRICS_FILE,
    )
