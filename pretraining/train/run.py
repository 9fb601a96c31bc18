"""Run from its settings to its end: join the processes, plan, build, train, report the result.

The command line and `pretraining.Trainer` start here. After a damaged checkpoint or a divergence, a run is planned and
built again. A run that diverges goes back to the newest checkpoint before the divergence, and skips the samples since.
PaLM got past its loss spikes this way (Chowdhery et al., 2022, section 5.1): a spike came from certain batches meeting
certain weights, and did not come back with other batches.

    divergence -> restore an older checkpoint -> give it a manifest with the skipped samples -> set others aside

A run that is killed before it has the new manifest diverges again at its next start. If its newest checkpoint was saved
after the last skipped update, the count in this checkpoint raises the divergence at once. From the new manifest, later
starts and `pretrain inspect` know the skipped samples.
"""

from __future__ import annotations

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from pretraining.checkpoint.copies import TRIES_OF_START
from pretraining.checkpoint.lease import hold_lease
from pretraining.checkpoint.mirror import list_copies
from pretraining.checkpoint.run_folder import find_run_folder, make_run_path
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.fields import settings_of, values_of
from pretraining.config.rules import ineffective_settings
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.data.sampling.mixture import Range
from pretraining.distributed.processes import (
    Processes,
    gather_from_every_rank,
    join_processes,
    on_every_rank,
    on_rank_zero,
)
from pretraining.distributed.rendezvous import Deadline, list_ranks
from pretraining.distributed.torch_private import keep_store_of_job
from pretraining.distributed.watchdog import Watchdog, collective_timeout
from pretraining.errors import ConfigError, DamagedError, DivergenceError, Interrupted, OutdatedError, Preempted
from pretraining.evaluation.evaluators import UserEvaluator, open_evaluators
from pretraining.evaluation.generation import TextSampler, open_sampler
from pretraining.evaluation.tasks import open_tasks
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.machine import name_user
from pretraining.launch.shared_cores import leaving_cores_to_others
from pretraining.observability.environment import record_environment
from pretraining.observability.events import Events
from pretraining.observability.metrics import MetricsHook
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.optim.state import evaluation_mode
from pretraining.text import list_some
from pretraining.train.build import build_run
from pretraining.train.loop import Run, train_loop
from pretraining.train.memory_check import explain_out_of_memory
from pretraining.train.messages import describe_end, describe_speed
from pretraining.train.open_data import open_data
from pretraining.train.plan import Rollback, check_and_build_dims, plan_run
from pretraining.train.preemption import StopRequests, preemption_error, stop_reason
from pretraining.train.resolve import resolve
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)

_MAX_NAMED = 8
TERMINATED = 143
"""Exit code that shells report for a process that SIGTERM ended."""
Build = Callable[[CheckpointRef | None, Rollback | None], Run]
"""Function that builds a job's run from a start point, with what a rollback keeps; a collective call."""


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
        config: the same in every process.
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
    ):
        path = on_rank_zero(lambda: make_run_path(find_run_folder(config)))
        saves = replace(config.checkpoint, ckpt_save_path=path)
        with nullcontext() if path is None else hold_lease(Path(path), processes) as lease:
            config, start = resolve(
                replace(config, checkpoint=saves), lambda: find_start(saves, copies=list_copies(saves))
            )
            sampler = open_sampler(config, processes)  # before training, so that a bad path fails early
            dims = check_and_build_dims(config, processes)
            tasks = open_tasks(config, processes, dims, config.data.seq_length)
            own = open_evaluators(config, evaluators)
            on_every_rank(requests.raise_if_signalled)
            begin(status, config, start)
            on_every_rank(requests.raise_if_pending)
            with explain_out_of_memory(config, dims, processes):
                data = open_data(config, processes)
                if path is not None:
                    record_environment(Path(path), 0 if start is None else start.step, layout.launcher, processes)

                def build(start: CheckpointRef | None, rollback: Rollback | None) -> Run:
                    plan = plan_run(config, processes, dims, data, start, rollback, threads, tasks, own)
                    return build_run(plan, requests, status, lease, hook, sampler)

                run = train_with_rollbacks(build, config, status, start)
        return _finish(run, sampler)


def train_with_rollbacks(
    build: Build, config: TrainConfig, status: RunStatusWriter, start: CheckpointRef | None
) -> Run:
    """Train to the end, with at most `max_rollbacks` rollbacks without progress in between; a collective call.

    Args:
        config: complete settings.

    Returns:
        The run that trained to the end.

    Raises:
        DivergenceError: no rollback is left.
        CheckpointError: no checkpoint is good, or one cannot be written or moved.
    """
    furthest, rollbacks = 0, 0
    run = _build_undamaged(build, config, status, start)
    while (divergence := _train_until_divergence(run)) is not None:
        rollbacks = 1 if divergence.first_step > furthest else rollbacks + 1
        if rollbacks > config.guard.max_rollbacks:
            raise divergence
        furthest = max(furthest, divergence.last_step)
        rollback = _rollback_from(run, divergence)
        del run
        _free_memory()
        run = _build_undamaged(build, config, status, _find_start(config, rollback), rollback)
        others = _go_back(run)
        _log_rollback(run, divergence, rollbacks, others)
    return run


def _train_until_divergence(run: Run) -> DivergenceError | None:
    """Train, and return the divergence, if any; a raised exception would keep the run's memory alive."""
    try:
        train_loop(run)
    except DivergenceError as divergence:
        return divergence.with_traceback(None)
    return None


def _build_undamaged(
    build: Build,
    config: TrainConfig,
    status: RunStatusWriter,
    start: CheckpointRef | None,
    rollback: Rollback | None = None,
) -> Run:
    """Build the run from a start point or, if that is damaged or no longer the newest, another; a collective call."""
    damaged: dict[str, str] = {}
    while True:
        try:
            return build(start, rollback)
        except OutdatedError as error:
            log.info("%s", error)
        except DamagedError as error:
            assert start is not None
            named = str(start.path) in str(error)
            damaged[start.source] = str(error) if named else f"{start.path}: {error}"
        _free_memory()
        start = _find_start(config, rollback, damaged)
        begin(status, config, start)


def _find_start(
    config: TrainConfig, rollback: Rollback | None, damaged: Mapping[str, str] = MappingProxyType({})
) -> CheckpointRef | None:
    """Find the start point of another run, here or in the mirror; a collective call that raises as `find_start`."""
    before, checkpoint = None if rollback is None else rollback.before_step, config.checkpoint
    return on_rank_zero(lambda: find_start(checkpoint, damaged, before, list_copies(checkpoint, TRIES_OF_START)))


def begin(status: RunStatusWriter, config: TrainConfig, start: CheckpointRef | None) -> None:
    """Count the start of a run that saves; a collective call that raises as `RunStatusWriter.begin`."""
    if config.checkpoint.ckpt_save_path is not None:
        on_rank_zero(lambda: status.begin(config.checkpoint.folder, start))


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


def _rollback_from(run: Run, divergence: DivergenceError) -> Rollback:
    """Return what a rollback keeps of a run: global samples may get other global numbers, back before a phase."""
    loader, before = run.plan.loader, run.plan.rollback
    skipped = dict[str, Sequence[Range]](before.skipped if before is not None else {})
    for name, ranges in loader.reader.mixture.numbers([divergence.samples]).items():
        skipped[name] = [*skipped.get(name, ()), *ranges]
    return Rollback(divergence.first_step, skipped, run.state.stop_step, loader.order_version)


def _go_back(run: Run) -> list[Path]:
    """Make the target of a rollback the newest checkpoint, and return those that are set aside; a collective call.

    They hold weights after the divergence, or a data position before the skipped samples.
    """
    return run.checkpoints.take_over(run.plan.start, run.state, rolls_back=True)


def _log_rollback(run: Run, divergence: DivergenceError, number: int, newer: Sequence[Path]) -> None:
    first, last, (begin, end) = divergence.first_step, divergence.last_step, divergence.samples
    text = f"rollback {number} to before step {first}, skipping samples {begin}-{end - 1}"
    log.info("step %d  %s", last, text)
    dropped, samples = [str(path) for path in newer], [begin, end - 1]
    run.observer.events.add(
        "rollback", last, number=number, first_step=first, samples=samples, checkpoints_dropped=dropped
    )


@contextmanager
def _preemption_exits_as_terminated() -> Iterator[None]:
    """Exit with the code of SIGTERM when a run that saves nothing is preempted, so that nobody restarts it."""
    try:
        yield
    except Preempted as error:
        if not isinstance(error, Interrupted):
            error.exit_code = TERMINATED
        raise


@contextmanager
def join_job(
    config: TrainConfig, layout: ProcessLayout, requests: StopRequests, is_embedded: bool
) -> Iterator[Processes]:
    """Join the processes of a job for a `with` block, with a watchdog; a collective call."""
    for line in ineffective_settings(config):
        log.info(line)
    waiting = config.guard.first_step_timeout.amount or collective_timeout(config.guard).total_seconds()
    with (
        join_processes(
            layout,
            timeout=collective_timeout(config.guard),
            deadline=Deadline(timedelta(seconds=waiting), requests.raise_if_signalled),
            parallel=config.parallel,
        ) as processes,
        nullcontext() if is_embedded and layout.world_size == 1 else Watchdog(config.guard, processes),
        leaving_cores_to_others(torch.get_num_threads()) if processes.device.type == "cpu" else nullcontext(),
    ):
        if is_embedded and layout.world_size > 1:
            keep_store_of_job()
        _check_same_settings(config)
        yield processes


def _check_same_settings(config: TrainConfig) -> None:
    """Refuse settings that differ between ranks, unless they are `per_node`: ranks would hang; a collective call."""
    settings = settings_of(TrainConfig)
    texts = {
        name: format_value(value) if value is None or not settings[name].per_node else "given"
        for name, value in values_of(config).items()
    }
    everyone = gather_from_every_rank(lambda: texts)
    different = []
    for name in sorted(set().union(*everyone)):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, given in enumerate(everyone):
            ranks[given.get(name, "unknown")].append(rank)
        if len(ranks) > 1:
            values = (f"{text or 'empty'} on ranks {list_ranks(on)}" for text, on in ranks.items())
            different.append(f"{name} is {' and '.join(values)}")
    if different:
        raise ConfigError(
            f"the processes of this job have different settings: {list_some(different, _MAX_NAMED, '; ')}.\n"
            "Give all nodes the same recipe and flags; the recipe on a node's own disk may be outdated"
        )


def _finish(run: Run, sampler: TextSampler | None) -> TrainResult:
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
    if sampler is not None:
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
        evaluation_loss=checkpoints.evaluation_loss,
        best_evaluation_loss=checkpoints.best_evaluation_loss,
        metrics=dict(run.observer.newest),
        run_path=None if run_path is None else Path(run_path),
        checkpoint=checkpoints.newest,
        metrics_file=None if run_path is None else Path(run_path) / LOGS / METRICS_FILE,
    )
