"""Trains a run to its end, going back where it diverges: to the newest checkpoint before, without the samples since.

That is how PaLM got past its loss spikes (Chowdhery et al., 2022, section 5.1): they came of certain batches meeting
certain weights, and with other batches from there on they did not come back. The run is built again as for any start,
from a checkpoint, with the samples of the updates that were left out added to `skip_samples`; the state of the data
keeps them from there on, so that later starts and `pretrain inspect` know of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from pretraining.checkpoint.manifest import UNFINISHED_SUFFIX, committed_checkpoints, step_of
from pretraining.checkpoint.retention import best_of, list_records, point_to_best
from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import Processes, on_rank_zero
from pretraining.errors import DivergenceError
from pretraining.train.loop import Run, train_loop

Build = Callable[[TrainConfig, DeviceMesh | None], Run]


def train_to_the_end(config: TrainConfig, processes: Processes, build: Build) -> Run:
    """Train, going back at most `max_rollbacks` times without progress in between; a collective call.

    Args:
        config: the settings.
        processes: this process among the others.
        build: makes the run of settings, restored from the newest checkpoint, on the mesh of an earlier one if there
            is one; a collective call, too.

    Returns:
        the run that came to its end.

    Raises:
        DivergenceError: it diverged, and must not go back again.
    """
    furthest, rollbacks = 0, 0
    mesh: DeviceMesh | None = None
    stop_step: int | None = None
    while True:
        run = build(config, mesh)
        stop_step = run.state.stop_step = stop_step or run.state.stop_step  # going back does not move the end
        divergence = _train(run)
        if divergence is None:
            return run
        if divergence.first_step > furthest:
            rollbacks = 0
        if rollbacks == config.guard.max_rollbacks:
            raise _without_hope(divergence, rollbacks)
        rollbacks += 1
        furthest = max(furthest, divergence.last_step)
        mesh = run.mesh  # another one would make other groups of processes, which take memory of the device
        del run  # the next one needs its memory
        gc.collect()
        if processes.device.type == "cuda":
            torch.cuda.empty_cache()
        config = _without_samples(config, divergence.samples)
        folder = Path(config.checkpoint.ckpt_save_path)
        dropped = on_rank_zero(partial(_drop_checkpoints, folder, divergence.first_step))
        if processes.is_main:
            _tell(divergence, rollbacks, config.guard.max_rollbacks, dropped)


def _train(run: Run) -> DivergenceError | None:
    """Train, and return how it diverged; as a value, since an exception would keep the run alive."""
    try:
        train_loop(run)
    except DivergenceError as divergence:
        return divergence.with_traceback(None)
    return None


def _without_hope(divergence: DivergenceError, rollbacks: int) -> DivergenceError:
    """What to tell the user where the run must not go back (again)."""
    if rollbacks:
        hint = f"Going back {rollbacks} times (--max_rollbacks) got the run no further."
    else:
        hint = "With --max_rollbacks=1 a run leaves samples out by itself."
    text = f"{divergence} {hint}"
    return DivergenceError(text, divergence.first_step, divergence.last_step, divergence.samples)


def _without_samples(config: TrainConfig, samples: tuple[int, int]) -> TrainConfig:
    begin, end = samples
    skipped = (*config.data.skip_samples, f"{begin}-{end - 1}")
    return replace(config, data=replace(config.data, skip_samples=skipped))


def _drop_checkpoints(run: Path, step: int) -> list[Path]:
    """Take the checkpoints of a step and of later ones out of the run; returns what they were called.

    They hold the weights from before the updates that were left out, and a place in the data behind them: the next
    start would go on from there. Renamed, they are as a save that was interrupted, and go with the next save.
    """
    dropped = [path for path in committed_checkpoints(run) if step_of(path) >= step]
    for path in dropped:
        path.rename(path.with_name(path.name + UNFINISHED_SUFFIX))
    point_to_best(run, best_of(list_records(run)))
    return dropped


def _tell(divergence: DivergenceError, rollbacks: int, most: int, dropped: list[Path]) -> None:
    begin, end = divergence.samples
    print(
        f"step {divergence.last_step}  the updates since step {divergence.first_step} were left out: rollback "
        f"{rollbacks} of {most}, from here on without samples {begin}-{end - 1}",
        flush=True,
    )
    for path in dropped:
        print(f"            {path} was saved after the first of them: given up", flush=True)
