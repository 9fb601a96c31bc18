"""The training loop. Every collaborator decides for itself when to act."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from pretraining.checkpoint.manager import CheckpointManager
from pretraining.data.batch import StepBatch
from pretraining.evaluation.held_out import Evaluator
from pretraining.observability.observer import Observer
from pretraining.observability.throughput import Stopwatch
from pretraining.parallel.agreement import Agreement
from pretraining.train.guards import Guards
from pretraining.train.state import TrainState
from pretraining.train.step import StepContext, train_step


@dataclass(frozen=True)
class Run:
    """Everything that a loop needs; `build.build_run` puts it together.

    Attributes:
        state: how far the run is.
        restored_from: the checkpoint it was restored from, if any.
        context: what a step works with.
        batches: of this rank, a step's at a time, without end until closed.
        observer: reports.
        evaluator: held-out loss.
        checkpoints: saves.
        agreement: the clock that all ranks share.
        stopwatch: where the time goes.
        guards: end a run that goes wrong.
        mesh: that the model is sharded over.
    """

    state: TrainState
    restored_from: Path | None
    context: StepContext
    batches: Generator[StepBatch, None, None]
    observer: Observer
    evaluator: Evaluator
    checkpoints: CheckpointManager
    agreement: Agreement
    stopwatch: Stopwatch
    guards: Guards
    mesh: DeviceMesh


def train_loop(run: Run) -> None:
    """Train until the run is finished, or this invocation's share of it; a collective call."""
    state = run.state
    batches = run.stopwatch.watch(run.batches, "data")
    earlier_seconds = state.progress.seconds
    with run.observer, run.checkpoints, run.agreement, closing(run.batches):
        while not state.stopping:
            outcome = train_step(run.context, next(batches), state.step)
            state.advance(earlier_seconds + run.agreement.seconds(run.stopwatch.elapsed))
            run.observer.after_step(state, outcome)
            run.guards.after_step(state, outcome)
            evaluation_loss = run.evaluator.maybe_run(state)
            run.checkpoints.maybe_save(state, evaluation_loss)
