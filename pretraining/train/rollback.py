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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from pretraining.checkpoint.mirror import list_copies
from pretraining.checkpoint.object_store import TRIES_OF_START
from pretraining.checkpoint.own_checkpoints import NO_COPIES, Copies
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.checkpoint.run_path import make_run_folder
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.data.sampling.mixture import Range
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import DamagedError, DivergenceError
from pretraining.observability.events import Events
from pretraining.text import count_of
from pretraining.train.loop import Run, train_loop
from pretraining.train.plan import Plan
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)


MakePlan = Callable[[CheckpointRef | None, Mapping[str, Sequence[Range]], int | None], Plan]


def train_with_rollbacks(
    config: TrainConfig,
    make_plan: MakePlan,
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
    builder = _Builder(config.checkpoint, make_plan, build, status)
    furthest, rollbacks = 0, 0
    run = builder.build_good(start)
    while (divergence := _train_until_divergence(run)) is not None:
        if divergence.first_step > furthest:
            rollbacks = 0
        if rollbacks == config.guard.max_rollbacks:
            raise _with_hint(divergence, rollbacks)
        rollbacks += 1
        furthest = max(furthest, divergence.last_step)
        builder.stop_step = run.state.stop_step  # a rollback keeps the last step of this invocation
        builder.skip(divergence.samples)
        del run
        _free_memory()
        run = _go_back(divergence, rollbacks, builder)
    return run


def _go_back(divergence: DivergenceError, number: int, builder: _Builder) -> Run:
    """Build the run from before a divergence, save it, and set newer checkpoints aside; a collective call."""
    config = builder.checkpoint
    builder.before_step = divergence.first_step
    start = find_start(config, before_step=builder.before_step, copies=read_mirror(config, TRIES_OF_START))
    run = builder.build_good(start)
    builder.before_step, start = None, builder.plan.start
    run.checkpoints.save_now(run.state, start.manifest.kind if start is not None and start.is_own else "interval")
    saved = run.checkpoints.newest
    newer = on_rank_zero(lambda: _set_aside_newer(config.folder, run.state.step, saved))
    _log_rollback(divergence, number, newer, builder.status.events)
    return run


@dataclass
class _Builder:
    """Builder of a run from the newest good checkpoint.

    Attributes:
        skipped: samples of earlier divergences, by their numbers within datasets.
        stop_step: last step of this invocation; None = as the settings say.
        before_step: only checkpoints before this step count; None = all.
        plan: plan of the last run that was built.
    """

    checkpoint: CheckpointConfig
    make_plan: MakePlan
    build: Callable[[Plan], Run]
    status: RunStatusWriter
    skipped: dict[str, list[Range]] = field(default_factory=dict)
    stop_step: int | None = None
    before_step: int | None = None
    plan: Plan = field(init=False)

    def skip(self, samples: Range) -> None:
        """Skip global samples of the last run: back before a phase, they may get other global numbers."""
        for name, ranges in self.plan.loader.reader.mixture.numbers([samples]).items():
            self.skipped.setdefault(name, []).extend(ranges)

    def build_good(self, start: CheckpointRef | None) -> Run:
        """Build the run from a start point or, if that is damaged, from the next good one; a collective call."""
        damaged: dict[str, str] = {}
        while True:
            result = self._try_to_build(start)
            if not isinstance(result, str):
                return result
            assert start is not None
            damaged[start.source] = result
            _free_memory()
            copies = read_mirror(self.checkpoint, TRIES_OF_START)
            start = find_and_count_start(self.checkpoint, self.status, copies, damaged, self.before_step)

    def _try_to_build(self, start: CheckpointRef | None) -> Run | str:
        """Return the fault of a damaged start point; its error would keep the memory of the failed run alive."""
        try:
            self.plan = self.make_plan(start, self.skipped, self.stop_step)
            return self.build(self.plan)
        except DamagedError as error:
            return str(error)


def read_mirror(config: CheckpointConfig, tries: int = 1) -> Copies:
    """Return the checkpoints in a run's mirror on rank 0, nothing on other ranks; a collective call."""
    found = NO_COPIES

    def read() -> None:
        nonlocal found
        found = list_copies(config, tries)

    on_rank_zero(read)
    return found


def find_and_count_start(
    config: CheckpointConfig,
    status: RunStatusWriter,
    copies: Copies,
    damaged: Mapping[str, str] = MappingProxyType({}),
    before_step: int | None = None,
) -> CheckpointRef | None:
    """Find a run's start point, make its folder and count the start; a collective call.

    Args:
        copies, damaged, before_step: as in `find_start`.

    Raises:
        CheckpointError: as in `find_start`; or the run has crashed too often from this start point.
    """
    start = find_start(config, damaged, before_step, copies)
    if config.ckpt_save_path is not None:
        run, step = config.folder, start.step if start is not None else 0
        on_rank_zero(lambda: make_run_folder(run))
        on_rank_zero(lambda: status.begin(run, step, is_rewind=start is not None and start.is_rewind))
    return start


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


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
