"""Trains a run to its end. Where it diverges, it goes back to the newest checkpoint before, without the samples since.

This is how PaLM got past its loss spikes (Chowdhery et al., 2022, section 5.1): they came from certain batches meeting
certain weights, and with other batches from there on they did not come back. The run is built again as for any start,
with the samples of the skipped updates added to `skip_samples`; the data state keeps them from there on, so that later
starts and `pretrain inspect` know of them. Until a checkpoint holds that state, rollback.json does: a start that finds
it does the rest of the rollback.
"""

from __future__ import annotations

import gc
import logging
from functools import partial
from pathlib import Path

import torch

from pretraining.checkpoint.manifest import (
    UNFINISHED_SUFFIX,
    committed_checkpoints,
    has_save_name,
    is_as_saved,
    read_document,
    step_of,
)
from pretraining.checkpoint.retention import best_of, list_records, point_to_best
from pretraining.checkpoint.rollback_file import (
    ROLLBACK_FILE,
    Rollback,
    read_rollback,
    without_pending_samples,
    without_samples,
    write_rollback,
)
from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import CheckpointError, DivergenceError
from pretraining.files import exists
from pretraining.observability.environment import record_environment
from pretraining.train.build import Job, build_run
from pretraining.train.loop import Run, train_loop

log = logging.getLogger(__name__)


def train_to_the_end(config: TrainConfig, job: Job) -> tuple[Run, bool]:
    """Trains, going back at most `max_rollbacks` times without progress in between; a collective call.

    Returns the run that came to its end, and whether there was anything to do. A run that must not go back again raises
    its DivergenceError.
    """
    given, config = config, _after_pending_rollback(config)
    run = build_run(config, job, given=given)  # without the samples: the same command finds its folder by these
    if config.checkpoint.ckpt_save_path is not None:
        record_environment(config.checkpoint.folder, run.state.step, job.launcher, job.processes)
    had_work = not run.state.stopping or run.evaluator.pending
    furthest, rollbacks = 0, 0
    while (divergence := _train(run)) is not None:
        if divergence.first_step > furthest:
            rollbacks = 0
        if rollbacks == config.guard.max_rollbacks:
            raise _without_hope(divergence, rollbacks)
        rollbacks += 1
        furthest = max(furthest, divergence.last_step)
        # Another mesh would make other groups of processes, which take memory; and going back does not move the end.
        mesh, stop_step = run.mesh, run.state.stop_step
        del run  # the next one needs its memory
        gc.collect()
        if job.processes.device.type == "cuda":
            torch.cuda.empty_cache()
        config = without_samples(config, [divergence.samples])
        rollback = Rollback(divergence.first_step, tuple(config.data.skipped_ranges))
        dropped = on_rank_zero(partial(_roll_back, config.checkpoint.folder, rollback))
        _log_rollback(divergence, rollbacks, config.guard.max_rollbacks, dropped)
        begin, end = divergence.samples
        away = {"samples": [begin, end - 1], "checkpoints_dropped": [str(path) for path in dropped]}
        job.events.add("rollback", divergence.last_step, number=rollbacks, first_step=divergence.first_step, **away)
        run = build_run(config, job, mesh=mesh, stop_step=stop_step)
    return run, had_work


def _train(run: Run) -> DivergenceError | None:
    """Returns how the run diverged, if it did; not raised, since an exception would keep the run's memory alive."""
    try:
        train_loop(run)
    except DivergenceError as divergence:
        return divergence.with_traceback(None)
    return None


def _without_hope(divergence: DivergenceError, rollbacks: int) -> DivergenceError:
    if rollbacks:
        hint = f"Going back {rollbacks} times (--max_rollbacks) got the run no further."
    else:
        hint = "With --max_rollbacks=1 a run leaves samples out by itself."
    text = f"{divergence} {hint}"
    return DivergenceError(text, divergence.first_step, divergence.last_step, divergence.samples)


def _after_pending_rollback(config: TrainConfig) -> TrainConfig:
    """Do the rest of a rollback that a kill has interrupted; a collective call that raises as `_drop_checkpoints`."""
    if config.checkpoint.ckpt_save_path is None:
        return config
    run = config.checkpoint.folder

    def finish() -> Rollback | None:
        rollback = read_rollback(run)
        if rollback is not None:
            for path in _drop_checkpoints(run, rollback):
                log.info("%s was saved after an update that the run has gone back for: given up", path)
        elif exists(run / ROLLBACK_FILE):
            (run / ROLLBACK_FILE).replace(run / f"{ROLLBACK_FILE}.damaged")  # said once is enough
        return rollback

    return without_pending_samples(config, on_rank_zero(finish))


def _roll_back(run: Path, rollback: Rollback) -> list[Path]:
    write_rollback(run, rollback)  # first: a kill may come while checkpoints are given up
    return _drop_checkpoints(run, rollback)


def _drop_checkpoints(run: Path, rollback: Rollback) -> list[Path]:
    """Rename the checkpoints that a rollback gives up, so that the next save removes them; return their old paths.

    They hold the weights from before the updates that were left out, and a place in the data behind these.

    Raises:
        CheckpointError: one of them is a copy that a user has made, which a start would go on from.
    """
    step = rollback.first_step
    dropped = [path for path in committed_checkpoints(run) if step_of(path) >= step and not rollback.is_in(path)]
    copies = [str(path) for path in dropped if not _was_saved_here(path)]
    if copies:
        raise CheckpointError(
            f"the run is to go back to before step {step}, but would go on from {', '.join(copies)}, which was copied "
            "or renamed by hand and is not removed. Move it elsewhere, and start again"
        )
    for path in dropped:
        path.rename(path.with_name(path.name + UNFINISHED_SUFFIX))
    point_to_best(run, best_of(list_records(run)))
    return dropped


def _was_saved_here(path: Path) -> bool:
    try:
        return is_as_saved(path, read_document(path))
    except CheckpointError:
        return has_save_name(path)


def _log_rollback(divergence: DivergenceError, rollbacks: int, most: int, dropped: list[Path]) -> None:
    begin, end = divergence.samples
    log.info(
        "step %d  the updates since step %d were left out: rollback %d of %d, from here on without samples %d-%d",
        *(divergence.last_step, divergence.first_step, rollbacks, most, begin, end - 1),
    )
    for path in dropped:
        log.info("            %s was saved after the first of them: given up", path)
