"""A run from its configuration to its end: join the processes, build, train, say what came of it.

The command line and `pretraining.Trainer` begin here.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from pretraining.checkpoint.lease import hold_lease
from pretraining.checkpoint.mirror import fetch_start
from pretraining.checkpoint.run_path import with_run_path
from pretraining.checkpoint.run_settings import resolve_run
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.fields import settings_of, values_of
from pretraining.config.rules import ineffective_settings
from pretraining.config.training import CheckpointConfig, TrainConfig
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
from pretraining.errors import ConfigError, Interrupted, Preempted
from pretraining.evaluation.generation import TextSampler, open_sampler
from pretraining.files import is_address
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.shared_cores import leaving_cores_to_others
from pretraining.observability.custom_metrics import MetricsHook
from pretraining.observability.environment import record_environment
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.text import list_some
from pretraining.train.build import build_run
from pretraining.train.evaluate_only import Evaluated, evaluate_only, print_evaluation
from pretraining.train.loop import Run
from pretraining.train.memory_check import explain_out_of_memory
from pretraining.train.messages import conclude, describe_speed
from pretraining.train.open_data import open_data
from pretraining.train.plan import Plan, keep_threads, lay_out, plan_run
from pretraining.train.preemption import StopRequests, ending, reason_of
from pretraining.train.rollback import begin_start, train_to_the_end
from pretraining.train.run_status import StatusKeeper

log = logging.getLogger(__name__)

_MOST_NAMED = 8
TERMINATED = 143
"""What shells report for a process that SIGTERM ended."""


@dataclass(frozen=True)
class TrainResult:
    """What a run has come to.

    Attributes:
        status: finished: this invocation has done what it was to do; preempted: it was told to end before, is saved,
            and the next start goes on.
        step: updates done, of `total_steps`.
        loss: the last one reported, mean over the tokens of its interval; None where none was.
        evaluation_loss: of the newest evaluation; None without one.
        best_evaluation_loss: the lowest one of the run so far.
        metrics: the newest number of each name in metrics.jsonl, of this invocation; None is unknown. Rates are those
            of this process, all else is the same in each.
        run_path: the run's folder; None if the run keeps nothing.
        checkpoint: the newest one; None where nothing was saved.
        metrics_file: a JSON object a report; None without a folder.
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
    is_guest: bool = False,
) -> TrainResult | None:
    """Train as configured, in every process of a job; with `eval_only` evaluate, print, and return None.

    Args:
        config: the same in every process.
        stop_requests: what asks this process to end early; None = nothing.
        threads: how many were chosen for this process; None = it keeps those that it has.
        hook: makes the user's own metrics; None = there are none.
        is_guest: whether the process goes on with something else: one that is alone is not ended where it hangs.

    Raises:
        Preempted: the run was told to end before it was done, and is saved; `Interrupted` if it was Ctrl-C.
        PretrainError: any mistake of the user; the message says what to change.
    """
    if config.evaluation.eval_only:
        evaluated = evaluate(config, layout, stop_requests, hook=hook, is_guest=is_guest)
        if layout.rank == 0:
            print_evaluation(evaluated)
        return None
    requests = StopRequests() if stop_requests is None else stop_requests
    # Whether the time limit leaves room for a start is asked once the start is counted.
    end_at_signal = replace(requests, deadline=None).end_before_training
    # The status is written last, when an error has been put into words.
    with (
        nullcontext() if config.checkpoint.ckpt_save_path is not None else _ending_for_good(),
        StatusKeeper(config.run.max_starts_without_progress, layout.rank == 0) as status,
        working_together(config, layout, end_at_signal, is_guest) as processes,
    ):
        _fetch_start(config.checkpoint, processes)
        config, _ = resolve_run(config)
        sampler = open_sampler(config, processes)  # before training: a bad path should not cost a run
        mesh = lay_out(config, processes)
        on_every_rank(end_at_signal)
        config = on_rank_zero(lambda: with_run_path(config))
        path = config.checkpoint.ckpt_save_path
        with (
            nullcontext() if path is None else hold_lease(Path(path), processes) as lease,
            explain_out_of_memory(config, mesh["shard"].size(), processes),
        ):
            start = begin_start(config.checkpoint, status)
            on_every_rank(requests.end_before_training)
            data = open_data(config, processes)

            def make_plan(
                start: CheckpointRef | None, skipped: Sequence[tuple[int, int]], stop_step: int | None
            ) -> Plan:
                keep_threads(start, config, processes, threads)
                return plan_run(config, processes, mesh, data, start, skipped, stop_step)

            build = partial(build_run, stop_requests=requests, status=status, lease=lease, hook=hook, sampler=sampler)
            if path is not None:
                record_environment(Path(path), start.step if start is not None else 0, layout.launcher, processes)
            run = train_to_the_end(make_plan, build, status, start)
        return _conclude(config, processes, run, sampler)


def evaluate(
    config: TrainConfig,
    layout: ProcessLayout,
    stop_requests: StopRequests | None = None,
    *,
    hook: MetricsHook | None = None,
    is_guest: bool = False,
) -> Evaluated:
    """Evaluate a checkpoint, in every process of a job, and write nothing; arguments and errors are as in `train`.

    Args:
        config: with `eval_only`.
    """
    requests = StopRequests() if stop_requests is None else stop_requests
    end_at_signal = replace(requests, deadline=None).end_before_training
    with working_together(config, layout, end_at_signal, is_guest) as processes:
        return evaluate_only(config, processes, requests, hook)


def _fetch_start(config: CheckpointConfig, processes: Processes) -> None:
    """Fetch what the run starts from if that is in an object store alone; a collective call."""
    if config.ckpt_save_path is not None and (is_address(config.ckpt_load_path) or config.ckpt_mirror_path is not None):
        with hold_lease(config.folder, processes):
            on_rank_zero(lambda: fetch_start(config))


@contextmanager
def _ending_for_good() -> Iterator[None]:
    """Give a run that keeps nothing, and is told to end, the exit code of a process that SIGTERM ended."""
    try:
        yield
    except Interrupted:
        raise
    except Preempted as ending:
        ending.exit_code = TERMINATED
        raise


@contextmanager
def working_together(
    config: TrainConfig, layout: ProcessLayout, end_at_signal: Callable[[], None], is_guest: bool
) -> Iterator[Processes]:
    """Join the processes of a job for the time of a `with` block, and have threads look after them."""
    for line in ineffective_settings(config):
        log.info(line)
    waiting = config.guard.first_step_timeout.amount or collective_timeout(config.guard).total_seconds()
    with (
        join_processes(
            layout,
            timeout=collective_timeout(config.guard),
            deadline=Deadline(timedelta(seconds=waiting), end_at_signal),
            parallel=config.parallel,
        ) as processes,
        nullcontext() if is_guest and layout.world_size == 1 else Watchdog(config.guard, processes),
        leaving_cores_to_others(torch.get_num_threads()) if processes.device.type == "cpu" else nullcontext(),
    ):
        if is_guest and layout.world_size > 1:
            keep_store_of_job()
        _check_same_settings(config)
        yield processes


def _check_same_settings(config: TrainConfig) -> None:
    """Compare the settings of all ranks, before ranks that differ would wait for each other; a collective call.

    Raises:
        ConfigError: they differ in a setting that is not declared as `per_node`.
    """
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
        f"the processes of this job were given different settings: {list_some(different, _MOST_NAMED, '; ')}.\n"
        "Give all nodes the same recipe and flags; a recipe on a node's own disk may be an old copy"
    )


def _conclude(config: TrainConfig, processes: Processes, run: Run, sampler: TextSampler | None) -> TrainResult:
    """Log what a run has come to, and return it; a collective call.

    Raises:
        Preempted: the run was told to end before it was done.
    """
    if config.data.use_dummy_dataset and run.observer.step_seconds:
        log.info(describe_speed(run.observer, processes))
    if run.state.preempted and not (run.state.finished and not run.evaluator.pending):
        state, is_saved = run.state, config.checkpoint.ckpt_save_path is not None
        saved = "saved; the same command goes on from there" if is_saved else "nothing was kept"
        text = f"at step {state.step} of {state.total_steps} ({reason_of(state.stop)}): {saved}."
        preempted = ending(state.stop, text)
        preempted.result = _result(config, run, "preempted")
        raise preempted
    sample = None
    if sampler is not None:
        sample = sampler.sample(run.context.model.module, processes.device)
    log.info(conclude(config, run))
    if sample is not None:
        if run.observer.newest:
            run.observer.events.add("sample", run.state.step, prompt=sample.prompt, text=sample.text)
        log.info("  a sample of its text:\n%s", sample.indented())
    return _result(config, run, "finished")


def _result(config: TrainConfig, run: Run, status: Literal["finished", "preempted"]) -> TrainResult:
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
