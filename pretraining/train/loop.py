"""The training loop. Every collaborator decides for itself when to act."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from pretraining.checkpoint.manager import CheckpointManager
from pretraining.data.batch import StepBatch
from pretraining.distributed.host_sync import HostSync
from pretraining.evaluation.held_out import Evaluator
from pretraining.observability.observer import Observer
from pretraining.observability.profiler import Profiler
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import TrainState
from pretraining.train.garbage import GarbageCollection
from pretraining.train.preemption import StopRequests
from pretraining.train.stability import Guards
from pretraining.train.step import StepContext, train_step


@dataclass(frozen=True)
class Run:
    """Everything that the loop needs; `build.build_run` puts it together.

    Attributes:
        batches: of this rank, one step at a time, endless until closed.
        host_sync: a clock and a request to end that all ranks read alike.
        stop_requests: what asks this rank to end early.
        guards: end a run that goes wrong (stability.py).
    """

    state: TrainState
    context: StepContext
    batches: Generator[StepBatch, None, None]
    observer: Observer
    evaluator: Evaluator
    checkpoints: CheckpointManager
    host_sync: HostSync
    stop_requests: StopRequests
    stopwatch: Stopwatch
    guards: Guards
    garbage: GarbageCollection
    profiler: Profiler


def train_loop(run: Run) -> None:
    """Train until the run or this invocation's part of it is done, or it is asked to stop; a collective call."""
    state = run.state
    batches = run.stopwatch.watch(run.batches, "data")
    earlier_seconds = state.progress.seconds
    interrupts = run.stop_requests.signals.recording_interrupts()
    with interrupts, run.observer, run.garbage, run.profiler, run.checkpoints, run.host_sync, closing(run.batches):
        _finish_pending_evaluation(run)
        while not state.stopping:
            outcome = train_step(run.context, next(batches), state.step)
            agreed = run.host_sync.exchange(run.stopwatch.elapsed, run.stop_requests.pending())
            state.advance(earlier_seconds + agreed.seconds, agreed.stop)
            run.observer.after_step(state, outcome)
            run.guards.after_step(state, outcome)
            evaluation_loss = run.evaluator.maybe_run(state)
            run.checkpoints.maybe_save(state, evaluation_loss)
            run.garbage.after_step(state)
            run.profiler.after_step(state)
        run.checkpoints.finish(state)


def _finish_pending_evaluation(run: Run) -> None:
    """Evaluate first if the last run stopped before its evaluation."""
    if run.evaluator.pending and (evaluation_loss := run.evaluator.maybe_run(run.state)) is not None:
        run.checkpoints.maybe_save(run.state, evaluation_loss)
