"""Trains a run to its end: plans it, builds it, and does so again if its checkpoint is damaged or if it diverges.

A run that diverges goes back to the newest checkpoint before, without the samples since. This is how PaLM got past its
loss spikes (Chowdhery et al., 2022, section 5.1): they came from certain batches meeting certain weights, and with
other batches from there on they did not come back.

    diverged -> an older checkpoint is restored -> saved again, without the samples -> newer ones are set aside

A kill before the save leaves all as it was: the next start diverges again. After it, later starts and
`pretrain inspect` know of the samples.
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
from pretraining.train.loop import Run, train_loop
from pretraining.train.plan import Plan
from pretraining.train.run_status import StatusKeeper

log = logging.getLogger(__name__)


def train_to_the_end(
    make_plan: Callable[[CheckpointRef | None, Sequence[tuple[int, int]], int | None], Plan],
    build: Callable[[Plan], Run],
    status: StatusKeeper,
    start: CheckpointRef | None,
) -> Run:
    """Train, going back at most `max_rollbacks` times without progress in between; a collective call.

    Args:
        make_plan: `plan_run` of this job.
        build: `build_run` of this job.
        status: counts the start again if its checkpoint is damaged, and keeps what happens.
        start: as `begin_start` returns it.

    Returns:
        The run that came to its end.

    Raises:
        DivergenceError: the run must not go back again.
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
            run = None
        if run is None:
            _free_memory(plan.processes.device)
            if config.checkpoint.ckpt_mirror_path is not None and fetched is None:  # once: a bad disk damages it again
                fetched = on_rank_zero(partial(fetch_start, config.checkpoint, damaged))
                damaged = {path: fault for path, fault in damaged.items() if path != fetched}
            start = begin_start(config.checkpoint, status, damaged, divergence)
            continue
        damaged = {}  # from here on its names may be those of new checkpoints
        if divergence is not None:
            run.checkpoints.save_now(
                run.state, start.manifest.kind if start is not None and start.is_own else "interval"
            )
            newer = on_rank_zero(
                partial(_set_aside_from, config.checkpoint.folder, run.state.step, run.checkpoints.newest)
            )
            _report(divergence, rollbacks, newer, status.events)
        divergence = _train(run)
        if divergence is None:
            return run
        if divergence.first_step > furthest:
            rollbacks = 0
        if rollbacks == config.guard.max_rollbacks:
            raise _without_hope(divergence, rollbacks)
        rollbacks += 1
        furthest = max(furthest, divergence.last_step)
        stop_step = run.state.stop_step  # going back does not move it
        del run
        _free_memory(plan.processes.device)
        skipped.append(divergence.samples)
        start = find_start(config.checkpoint, before_step=divergence.first_step)


def begin_start(
    config: CheckpointConfig,
    status: StatusKeeper,
    damaged: Mapping[Path, str] = MappingProxyType({}),
    divergence: DivergenceError | None = None,
) -> CheckpointRef | None:
    """Find what a run starts from, make its folder and count the start; a collective call.

    Args:
        damaged: as `find_start`.
        divergence: what the run goes back for.

    Raises:
        CheckpointError: as `find_start`; or the run has crashed there too often.
    """
    start = find_start(config, damaged, None if divergence is None else divergence.first_step)
    if config.ckpt_save_path is not None:
        run, step = config.folder, start.step if start is not None else 0
        on_rank_zero(lambda: make_run_folder(run))
        on_rank_zero(lambda: status.begin(run, step, goes_back=start is not None and start.goes_back))
    return start


def _free_memory(device: torch.device) -> None:
    """Give back the memory of a run that is gone: the next one needs it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _train(run: Run) -> DivergenceError | None:
    """Return how the run diverged, if it did; not raised, since an exception would keep the run's memory alive."""
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


def _set_aside_from(run: Path, step: int, saved: Path | None) -> list[Path]:
    """Move the checkpoints that a rollback to a step gives up; return where they were.

    They hold weights that the run goes back from, or a place in the data before what was left out.

    Args:
        saved: what the rollback has saved.
    """
    given_up = [each.path for each in committed_checkpoints(run) if each.step >= step and each.path != saved]
    set_aside(run, given_up)
    return given_up


def _report(divergence: DivergenceError, number: int, newer: Sequence[Path], events: Events) -> None:
    first_step, last_step, (begin, end) = divergence.first_step, divergence.last_step, divergence.samples
    back = f"rollback {number} to before step {first_step}, from here on without samples {begin}-{end - 1}"
    log.info("step %d  %s", last_step, back)
    dropped = [str(path) for path in newer]
    samples = [begin, end - 1]
    events.add(
        "rollback", last_step, number=number, first_step=first_step, samples=samples, checkpoints_dropped=dropped
    )
