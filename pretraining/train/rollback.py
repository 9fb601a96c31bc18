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
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from pretraining.checkpoint.mirror import fetch_start
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.checkpoint.run_path import make_run_folder
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import CheckpointConfig
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import DamagedError, DivergenceError
from pretraining.observability.events import Events
from pretraining.text import count_of
from pretraining.train.loop import Run, train_loop
from pretraining.train.plan import Plan
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)


def train_with_rollbacks(
    make_plan: Callable[[CheckpointRef | None, Sequence[tuple[int, int]], int | None], Plan],
    build: Callable[[Plan], Run],
    status: RunStatusWriter,
    start: CheckpointRef | None,
) -> Run:
    """Train to the end, with at most `max_rollbacks` rollbacks without progress in between; a collective call.

    Args:
        make_plan, build: `plan_run` and `build_run` of this job.
        status: counts the start again if its checkpoint is damaged, and records events.
        start: result of `find_and_count_start`.

    Returns:
        The run that trained to the end.

    Raises:
        DivergenceError: no rollback is left.
        CheckpointError: no checkpoint is good, or one cannot be written or moved.
    """
    skipped, damaged = list[tuple[int, int]](), dict[Path, str]()
    furthest, rollbacks, stop_step = 0, 0, None
    fetched: Path | None = None
    divergence: DivergenceError | None = None
    while True:
        plan = make_plan(start, skipped, stop_step)
        config = plan.config
        try:
            run = build(plan)
        except DamagedError as error:
            assert start is not None
            damaged[start.path] = str(error)
            run = None  # continue outside the handler: the error keeps memory of the failed run alive
        if run is None:
            _free_memory(plan.processes.device)
            if config.checkpoint.ckpt_mirror_path is not None and fetched is None:  # once: a bad disk damages it again
                fetched = on_rank_zero(partial(fetch_start, config.checkpoint, damaged))
                damaged = {path: fault for path, fault in damaged.items() if path != fetched}
            start = find_and_count_start(config.checkpoint, status, damaged, divergence)
            continue
        damaged = {}  # later checkpoints may have the same paths
        if divergence is not None:
            run.checkpoints.save_now(
                run.state, start.manifest.kind if start is not None and start.is_own else "interval"
            )
            newer = on_rank_zero(
                partial(_set_aside_newer, config.checkpoint.folder, run.state.step, run.checkpoints.newest)
            )
            _log_rollback(divergence, rollbacks, newer, status.events)
        divergence = _train_until_divergence(run)
        if divergence is None:
            return run
        if divergence.first_step > furthest:
            rollbacks = 0
        if rollbacks == config.guard.max_rollbacks:
            raise _with_hint(divergence, rollbacks)
        rollbacks += 1
        furthest = max(furthest, divergence.last_step)
        stop_step = run.state.stop_step  # a rollback keeps the last step of this invocation
        del run
        _free_memory(plan.processes.device)
        skipped.append(divergence.samples)
        start = find_start(config.checkpoint, before_step=divergence.first_step)


def find_and_count_start(
    config: CheckpointConfig,
    status: RunStatusWriter,
    damaged: Mapping[Path, str] = MappingProxyType({}),
    divergence: DivergenceError | None = None,
) -> CheckpointRef | None:
    """Find a run's start point, make its folder and count the start; a collective call.

    Args:
        damaged: as in `find_start`.
        divergence: divergence that the run goes back from.

    Raises:
        CheckpointError: as in `find_start`; or the run has crashed too often from this start point.
    """
    start = find_start(config, damaged, None if divergence is None else divergence.first_step)
    if config.ckpt_save_path is not None:
        run, step = config.folder, start.step if start is not None else 0
        on_rank_zero(lambda: make_run_folder(run))
        on_rank_zero(lambda: status.begin(run, step, is_rewind=start is not None and start.is_rewind))
    return start


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _train_until_divergence(run: Run) -> DivergenceError | None:
    """Train, and return the divergence, if any; a raised exception would keep the run's memory alive."""
    try:
        train_loop(run)
    except DivergenceError as divergence:
        return divergence.with_traceback(None)
    return None


def _with_hint(divergence: DivergenceError, rollbacks: int) -> DivergenceError:
    if rollbacks:
        hint = f"{count_of(rollbacks, 'rollback')} (--max_rollbacks) did not help."
    else:
        hint = "With --max_rollbacks=1 a run skips such samples by itself."
    text = f"{divergence} {hint}"
    return DivergenceError(text, divergence.first_step, divergence.last_step, divergence.samples)


def _set_aside_newer(run: Path, step: int, saved: Path | None) -> list[Path]:
    """Set aside the checkpoints that a rollback to a step drops, except the one it saved; return their paths.

    They hold weights after the divergence, or a data position before the skipped samples.
    """
    dropped = [each.path for each in committed_checkpoints(run) if each.step >= step and each.path != saved]
    set_aside(run, dropped)
    return dropped


def _log_rollback(divergence: DivergenceError, number: int, newer: Sequence[Path], events: Events) -> None:
    first_step, last_step, (begin, end) = divergence.first_step, divergence.last_step, divergence.samples
    back = f"rollback {number} to before step {first_step}, skipping samples {begin}-{end - 1}"
    log.info("step %d  %s", last_step, back)
    dropped = [str(path) for path in newer]
    samples = [begin, end - 1]
    events.add(
        "rollback", last_step, number=number, first_step=first_step, samples=samples, checkpoints_dropped=dropped
    )
