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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from pretraining.checkpoint.copies import TRIES_OF_START
from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.mirror import list_copies
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.checkpoint.run_path import make_run_folder
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.data.sampling.mixture import Range
from pretraining.distributed.dims import Dims
from pretraining.distributed.processes import Processes, on_rank_zero
from pretraining.errors import DamagedError, DivergenceError
from pretraining.evaluation.generation import TextSampler
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.observability.events import Events
from pretraining.observability.metrics import MetricsHook
from pretraining.text import count_of
from pretraining.train.build import build_run
from pretraining.train.loop import Run, train_loop
from pretraining.train.open_data import OpenedData
from pretraining.train.plan import Plan, Rollback, plan_run, restore_cpu_threads
from pretraining.train.preemption import StopRequests
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)


def train_with_rollbacks(builder: RunBuilder, start: CheckpointRef | None) -> Run:
    """Train to the end, with at most `max_rollbacks` rollbacks without progress in between; a collective call.

    Returns:
        The run that trained to the end.

    Raises:
        DivergenceError: no rollback is left.
        CheckpointError: no checkpoint is good, or one cannot be written or moved.
    """
    furthest, rollbacks = 0, 0
    run = builder.build(start)
    while (divergence := _train_until_divergence(run)) is not None:
        if divergence.first_step > furthest:
            rollbacks = 0
        if rollbacks == builder.config.guard.max_rollbacks:
            raise _with_hint(divergence, rollbacks)
        rollbacks += 1
        furthest = max(furthest, divergence.last_step)
        builder.keep(run, divergence.samples)
        del run
        _free_memory()
        run = _go_back(divergence, rollbacks, builder)
    return run


def _go_back(divergence: DivergenceError, number: int, builder: RunBuilder) -> Run:
    """Build the run from before a divergence, save it, and set newer checkpoints aside; a collective call."""
    config = builder.config.checkpoint
    run = builder.build(builder.find_start(before_step=divergence.first_step), divergence.first_step)
    start = builder.plan.start
    run.checkpoints.save_now(run.state, start.manifest.kind if start is not None and start.is_own else "interval")
    saved = run.checkpoints.newest
    newer = on_rank_zero(lambda: _set_aside_newer(config.folder, run.state.step, saved))
    _log_rollback(divergence, number, newer, builder.status.events)
    return run


@dataclass
class RunBuilder:
    """Planner and builder of a job's run; after damage or a divergence it builds another.

    Attributes:
        config: complete settings.
        threads: CPU threads chosen for this process; None = keep the current number.
        stop_requests, status, lease, hook, sampler: as in `build_run`.
        rollback: what the next run keeps of those that have diverged.
        plan: plan of the last run that was built.
    """

    config: TrainConfig
    processes: Processes
    dims: Dims
    data: OpenedData
    threads: CpuThreads | None
    stop_requests: StopRequests
    status: RunStatusWriter
    lease: Lease | None
    hook: MetricsHook | None
    sampler: TextSampler | None
    rollback: Rollback | None = None
    plan: Plan = field(init=False)

    def keep(self, run: Run, samples: Range) -> None:
        """Keep what a rollback needs of a run, whose global samples may get other global numbers, back before a phase.

        Args:
            samples: samples to skip.
        """
        loader, skipped = self.plan.loader, dict[str, Sequence[Range]](self.rollback.skipped if self.rollback else {})
        for name, ranges in loader.reader.mixture.numbers([samples]).items():
            skipped[name] = [*skipped.get(name, ()), *ranges]
        self.rollback = Rollback(skipped, run.state.stop_step, loader.order_version)

    def find_start(
        self, damaged: Mapping[str, str] = MappingProxyType({}), before_step: int | None = None, *, returns: bool = True
    ) -> CheckpointRef | None:
        """Find the start point of another run, here or in the mirror; a collective call that raises as `find_start`."""
        config = self.config.checkpoint
        return on_rank_zero(
            lambda: find_start(config, damaged, before_step, list_copies(config, TRIES_OF_START), returns=returns)
        )

    def build(self, start: CheckpointRef | None, before_step: int | None = None) -> Run:
        """Build the run from a start point or, if that is damaged or no longer the newest, another; a collective call.

        Args:
            before_step: as in `find_start`.
        """
        damaged: dict[str, str] = {}
        while True:
            result = self._try_to_build(start)
            if not isinstance(result, str):
                return result
            assert start is not None
            damaged[start.source] = result
            _free_memory()
            start = self.find_start(damaged, before_step, returns=start.is_rewind)
            count_start(self.config.checkpoint, self.status, start)

    def _try_to_build(self, start: CheckpointRef | None) -> Run | str:
        """Build the run, or return the fault of its start point: an error would keep the failed run's memory alive."""
        restore_cpu_threads(start, self.config, self.processes, self.threads)
        try:
            self.plan = plan_run(self.config, self.processes, self.dims, self.data, start, self.rollback)
            return build_run(self.plan, self.stop_requests, self.status, self.lease, self.hook, self.sampler)
        except DamagedError as error:
            return str(error)


def count_start(config: CheckpointConfig, status: RunStatusWriter, start: CheckpointRef | None) -> None:
    """Make the run's folder, and count a start; a collective call.

    Raises:
        CheckpointError: the run has crashed too often from this start point, or the folder cannot be written.
    """
    if config.ckpt_save_path is not None:
        run, step = config.folder, start.step if start is not None else 0
        run_id = start.manifest.run_id if start is not None and start.is_own else ""
        on_rank_zero(lambda: make_run_folder(run))
        is_rewind = start is not None and start.is_rewind
        on_rank_zero(lambda: status.begin(run, step, is_rewind=is_rewind, run_id=run_id))


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
