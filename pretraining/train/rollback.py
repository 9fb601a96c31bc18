"""Training with rollbacks: plan, build and train a run again after a damaged checkpoint or a divergence.

A run that diverges goes back to the newest checkpoint before the divergence, and skips the samples since. PaLM got past
its loss spikes this way (Chowdhery et al., 2022, section 5.1): a spike came from certain batches meeting certain
weights, and did not come back with other batches.

    divergence -> restore an older checkpoint -> save it again with the skipped samples -> set newer checkpoints aside

A run that is killed before newer checkpoints are set aside diverges again at its next start. If its newest checkpoint
was saved after the last skipped update, the count in this checkpoint raises the divergence at once. After the save,
later starts and `pretrain inspect` know the skipped samples.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from pretraining.checkpoint.mirror import NewerCopyError, list_copies
from pretraining.checkpoint.object_store import TRIES_OF_START
from pretraining.checkpoint.retention import set_aside_newer
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import TrainConfig
from pretraining.data.sampling.mixture import Range
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import DamagedError, DivergenceError
from pretraining.train.loop import Run, train_loop
from pretraining.train.plan import Rollback
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)

Build = Callable[[CheckpointRef | None, Rollback | None], Run]
"""Function that builds a job's run from a start point, with what a rollback keeps; a collective call."""


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
        _log_rollback(run, divergence, rollbacks, _replace_newer(run))
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
    """Build the run from a start point or, if that is damaged, from the next good one; a collective call."""
    damaged: dict[str, str] = {}
    while True:
        try:
            return build(start, rollback)
        except NewerCopyError as error:
            log.info("%s: the start point is chosen again", error)
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


def _replace_newer(run: Run) -> list[Path]:
    """Save a run that goes back, set aside the checkpoints that it replaces, and return them; a collective call.

    They hold weights after the divergence, or a data position before the skipped samples.
    """
    start, folder = run.plan.start, run.plan.config.checkpoint.folder
    run.checkpoints.save_now(run.state, start.manifest.kind if start is not None and start.is_own else "interval")
    saved = run.checkpoints.newest
    return on_rank_zero(lambda: set_aside_newer(folder, run.state.step, saved))


def _log_rollback(run: Run, divergence: DivergenceError, number: int, newer: Sequence[Path]) -> None:
    first, last, (begin, end) = divergence.first_step, divergence.last_step, divergence.samples
    text = f"rollback {number} to before step {first}, skipping samples {begin}-{end - 1}"
    log.info("step %d  %s", last, text)
    dropped, samples = [str(path) for path in newer], [begin, end - 1]
    run.observer.events.add(
        "rollback", last, number=number, first_step=first, samples=samples, checkpoints_dropped=dropped
    )
