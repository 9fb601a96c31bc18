"""Training loop. Each component decides in its own call whether to act after a step."""

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
from pretraining.train.plan import Plan
from pretraining.train.preemption import StopRequests
from pretraining.train.stability import Guards
from pretraining.train.step import StepContext, train_step


@dataclass(frozen=True)
class Run:
    """Components of a run; `build.build_run` creates them.

    Attributes:
        plan: decisions that the run was built from.
        batches: batches of this rank, one per step; endless until closed.
        host_sync: shared clock and stop request of all ranks.
        stop_requests: signals and deadline of this rank.
        guards: checks that stop a diverging or corrupted run (stability.py).
    """

    plan: Plan
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
    """Train until the run or this invocation is done, or a stop is requested; a collective call."""
    state = run.state
    batches = run.stopwatch.watch(run.batches, "data")
    earlier_seconds = state.progress.seconds
    interrupts = run.stop_requests.signals.recording_interrupts()
    with interrupts, run.observer, run.garbage, run.profiler, run.checkpoints, run.host_sync, closing(run.batches):
        run.guards.check_restored(state)
        _finish_pending_evaluation(run)
        while not state.stopping:
            outcome = train_step(run.context, next(batches), state.step)
            agreed = run.host_sync.exchange(run.stopwatch.elapsed, run.stop_requests.pending())
            state.advance(earlier_seconds + agreed.seconds, agreed.stop)
            run.observer.after_step(state, outcome)
            run.guards.after_step(state, outcome)
            is_evaluated = run.evaluator.maybe_run(state)
            run.checkpoints.maybe_save(state, is_evaluated=is_evaluated)
            run.garbage.after_step(state)
            run.profiler.after_step(state)
        run.checkpoints.finish(state)


def _finish_pending_evaluation(run: Run) -> None:
    """Run the evaluations that the previous start stopped before."""
    if run.evaluator.run_pending(run.state):
        run.checkpoints.maybe_save(run.state, is_evaluated=True)
