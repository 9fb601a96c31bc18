"""Restores a run: chooses what it starts from, and reads that into the run's tensors.

    the newest by its manifest -> counted as a start from there -> tensors, compared while they are read -> it is good
              ^                                                                   |
              +------------------- a new optimizer, the next one <--------- it is damaged

What else the manifest says (the position in the data, …) is taken once the tensors are good.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from pretraining.checkpoint.manifest import check_same_model, tensor_state
from pretraining.checkpoint.start_point import CheckpointRef, find_checkpoint, load, make_run_folder
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.recipes import settings_in
from pretraining.config.training import ParallelConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import ConfigError, DamagedError
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.optim.optimizer import materialise_state
from pretraining.optim.registry import build_optimizer
from pretraining.train.run_status import StatusKeeper


def choose_start_point(
    config: TrainConfig, status: StatusKeeper | None, damaged: Mapping[Path, str] = MappingProxyType({})
) -> CheckpointRef | None:
    """Chooses what a run starts from (None: initial weights), makes its folder and counts the start; a collective call.

    Raises:
        CheckpointError: as `find_checkpoint`; or it is of another model, or the run has crashed there too often.
    """
    start = find_checkpoint(config.checkpoint, damaged)
    if start is not None:
        check_same_model(start.manifest, resolve_shape(config.model), start.path)
    run, step = Path(config.checkpoint.ckpt_save_path), start.step if start is not None else 0

    def begin() -> None:
        make_run_folder(run)
        if status is not None:
            status.begin(run, step)

    on_rank_zero(begin)
    return start


def restore(
    start: CheckpointRef | None,
    parameters: dict[str, nn.Parameter],
    config: TrainConfig,
    status: StatusKeeper | None,
) -> tuple[CheckpointRef | None, torch.optim.Optimizer]:
    """Reads what was chosen into a model's parameters, or an older checkpoint if that is damaged; a collective call.

    Returns:
        What the run really starts from, and an optimizer with the state that goes with it.

    Raises:
        CheckpointError: as `choose_start_point`, or it does not fit.
        ConfigError: it has the state of another optimizer.
    """
    damaged: dict[Path, str] = {}
    while True:
        optimizer = build_optimizer(parameters, config.optimizer)  # a new one each time: nothing damaged may stay
        if start is None:
            return None, optimizer
        try:
            _load(start, config, parameters, optimizer)
        except DamagedError as error:
            damaged[start.path] = str(error)
        else:
            return start, optimizer
        start = choose_start_point(config, status, damaged)


def take_threads(world: Mapping[str, Any], parallel: ParallelConfig, processes: int, threads: CpuThreads) -> str | None:
    """Takes as many threads as a checkpoint was made with, where its run goes on in the same layout and they fit.

    Their number decides on the last bits of sums.

    Args:
        world: of the checkpoint's manifest.
        processes: of this job.
        threads: that were chosen for this process.

    Returns:
        A line for the user where the number is not what it would be without the checkpoint, or not that of before.
    """
    saved, now = world.get("cpu_threads"), torch.get_num_threads()
    is_same_layout = (world.get("processes"), world.get("sharding_strategy")) == (processes, parallel.sharding_strategy)
    if type(saved) is not int or saved == now or not is_same_layout:
        return None
    if threads.is_chosen and 1 <= saved <= threads.fitting:
        torch.set_num_threads(saved)
        return f"cpu_threads is {saved} as before, of {threads.fitting} that fit: sums stay the same to the last bit"
    return f"cpu_threads was {saved} and is {now} from here on: sums differ in their last bits"


def _load(
    start: CheckpointRef, config: TrainConfig, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    wanted = None
    if not start.weights_only:
        materialise_state(optimizer)
        wanted = optimizer if _takes_optimizer(start, config) else None
    load(start, tensor_state(parameters, wanted))


def _takes_optimizer(start: CheckpointRef, config: TrainConfig) -> bool:
    """Whether a run goes on with the state of the optimizer that a checkpoint holds.

    Raises:
        ConfigError: it is that of another optimizer.
    """
    now = config.optimizer
    try:
        before = settings_in(start.manifest.config, "config of the checkpoint").optimizer
    except ConfigError:  # of a version with other settings
        before = now
    changes = before.optimizer != now.optimizer or (
        now.optimizer in OPTIMIZERS and before.moments(in_matrix=True) != now.moments(in_matrix=True)
    )
    if changes and config.checkpoint.load_optimizer:
        was, is_now = before.optimizer, now.optimizer
        if was == is_now:  # with momentum, or without
            was, is_now = f"{was} with momentum={before.resolved().momentum:g}", f"momentum={now.resolved().momentum:g}"
        raise ConfigError(
            f"{start.path} has the state of --optimizer={was}, which {is_now} cannot go on from. Give the optimizer of "
            "before, or --load_optimizer=false: parameters and position in the data stay, the optimizer begins anew"
        )
    return config.checkpoint.load_optimizer or (start.is_own and not changes)
