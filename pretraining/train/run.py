"""Run from its settings to its end: join the processes, plan, build, train, report the result.

The command line and `pretraining.Trainer` start here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from pretraining.checkpoint.lease import hold_lease
from pretraining.checkpoint.mirror import list_copies
from pretraining.checkpoint.run_path import make_run_path
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.fields import build, settings_of, values_of
from pretraining.config.recipes import RUN_CONFIG_FILE
from pretraining.config.rules import ineffective_settings
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
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
from pretraining.errors import ConfigError, DataError, Interrupted, Preempted
from pretraining.evaluation.generation import TextSampler, open_sampler
from pretraining.files import exists
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
from pretraining.train.loop import Run
from pretraining.train.memory_check import explain_out_of_memory
from pretraining.train.messages import describe_end, describe_speed
from pretraining.train.open_data import open_data
from pretraining.train.plan import check_and_build_dims
from pretraining.train.preemption import StopRequests, preemption_error, stop_reason
from pretraining.train.resolve import Resolved, find_run_folder, resolve
from pretraining.train.rollback import RunBuilder, count_start, train_with_rollbacks
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)

_MAX_NAMED = 8
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
    is_embedded: bool = False,
    returns: bool = True,
) -> TrainResult:
    """Train in every process of a job.

    Args:
        config: the same in every process.
        stop_requests: None = no signals and no deadline.
        threads: CPU threads chosen for this process; None = keep the current number.
        hook: user-defined metrics.
        is_embedded: whether the process belongs to a script; then a single process that hangs is not killed.
        returns: as in `find_start`.

    Raises:
        Preempted: the run was asked to stop early and is saved; `Interrupted` after Ctrl-C.
        PretrainError: any mistake of the user; the message says what to change.
    """
    name_user()
    requests = StopRequests() if stop_requests is None else stop_requests
    made: list[Path] = []

    def make_folder() -> str | None:
        found = find_run_folder(config)
        path = make_run_path(found)
        made.extend([Path(path)] if path is not None and path != found else [])
        return path

    # The status is written last: by then the error has its final text.
    with (
        _without_refused(made),
        nullcontext() if config.checkpoint.ckpt_save_path is not None else _preemption_exits_as_terminated(),
        RunStatusWriter(config.run.max_starts_without_progress, layout.rank == 0) as status,
        join_job(config, layout, requests, is_embedded) as processes,
    ):
        path = on_rank_zero(make_folder)
        config = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=path))
        with nullcontext() if path is None else hold_lease(Path(path), processes) as lease:
            config, start = resolve_in_job(
                config, lambda given: resolve(given, list_copies(given.checkpoint), returns=returns)
            )
            sampler = open_sampler(config, processes)  # before training, so that a bad path fails early
            dims = check_and_build_dims(config, processes)
            on_every_rank(requests.raise_if_signalled)
            count_start(config.checkpoint, status, start)
            on_every_rank(requests.raise_if_pending)
            with explain_out_of_memory(config, dims, processes):
                data = open_data(config, processes)
                if path is not None:
                    record_environment(Path(path), 0 if start is None else start.step, layout.launcher, processes)
                builder = RunBuilder(config, processes, dims, data, threads, requests, status, lease, hook, sampler)
                run = train_with_rollbacks(builder, start)
        return _finish(config, processes, run, sampler)


@contextmanager
def _without_refused(made: list[Path]) -> Iterator[None]:
    """Remove the folders that this start has made, if its settings or data are refused before it has any steps."""
    try:
        yield
    except (ConfigError, DataError):
        for folder in made:
            if not exists(folder / RUN_CONFIG_FILE):
                shutil.rmtree(folder, ignore_errors=True)
        raise


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


def resolve_in_job(config: TrainConfig, resolve: Callable[[TrainConfig], Resolved]) -> Resolved:
    """Resolve on rank 0 for all processes; a collective call that raises as `resolve`.

    Each process keeps the values that its user gave (`per_node`), and takes those that rank 0 has found.
    """

    def resolve_here() -> tuple[dict[str, Any], CheckpointRef | None]:
        resolved, given = resolve(config), values_of(config)
        found = {name: value for name, value in values_of(resolved.config).items() if value != given[name]}
        return found, resolved.start

    found, start = on_rank_zero(resolve_here)
    return Resolved(build(type(config), values_of(config) | found), start)


def _check_same_settings(config: TrainConfig) -> None:
    """Refuse settings that differ between ranks, unless they are `per_node`: ranks would hang; a collective call."""
    settings = settings_of(TrainConfig)
    texts = {
        name: format_value(value) if value is None or not settings[name].per_node else "given"
        for name, value in values_of(config).items()
    }
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    if len(set(gather_from_every_rank(lambda: digest))) == 1:
        return
    everyone = gather_from_every_rank(lambda: texts)
    different = []
    for name in sorted(set().union(*everyone)):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, given in enumerate(everyone):
            ranks[given.get(name, "unknown")].append(rank)
        if len(ranks) > 1:
            values = (f"{text or 'empty'} on ranks {list_ranks(on)}" for text, on in ranks.items())
            different.append(f"{name} is {' and '.join(values)}")
    raise ConfigError(
        f"the processes of this job have different settings: {list_some(different, _MAX_NAMED, '; ')}.\n"
        "Give all nodes the same recipe and flags; the recipe on a node's own disk may be outdated"
    )


def _finish(config: TrainConfig, processes: Processes, run: Run, sampler: TextSampler | None) -> TrainResult:
    """Log how a run ended, and return its result, or raise `Preempted`; a collective call."""
    if config.data.use_dummy_dataset and run.observer.step_seconds:
        log.info(describe_speed(run.observer, processes))
    if run.state.preempted and not (run.state.finished and not run.evaluator.pending):
        state, is_saved = run.state, config.checkpoint.ckpt_save_path is not None
        saved = "saved; the same command resumes from there" if is_saved else "nothing was saved"
        text = f"at step {state.step} of {state.total_steps} ({stop_reason(state.stop)}): {saved}."
        preempted = preemption_error(state.stop, text)
        preempted.result = _make_result(config, run, "preempted")
        raise preempted
    log.info(describe_end(config, run))
    if sampler is not None:
        with evaluation_mode(run.context.optimizer, run.context.model.masters_changed):
            events = run.observer.events if run.observer.newest else Events()  # a start without a step has none
            sampler.show(run.context.model.module, processes.device, run.state.step, events)
    return _make_result(config, run, "finished")


def _make_result(config: TrainConfig, run: Run, status: Literal["finished", "preempted"]) -> TrainResult:
    state, checkpoints, run_path = run.state, run.checkpoints, config.checkpoint.ckpt_save_path
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
