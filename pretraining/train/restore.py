"""Restores a run: chooses what it starts from, and reads that into the run's tensors.

    the newest by its manifest -> counted as a start from there -> tensors, compared while they are read -> it is good
              ^                                                                   |
              +------------------- a new optimizer, the next one <--------- it is damaged

What else the manifest says (the position in the data, …) is taken once the tensors are good.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from pretraining.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    check_same_model,
    committed_checkpoints,
    step_of,
    tensor_state,
)
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.start_point import (
    CONFIG_FILE,
    CheckpointRef,
    find_checkpoint,
    is_within,
    load,
    make_run_folder,
)
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.recipes import load_config, settings_in
from pretraining.config.training import CheckpointConfig, ParallelConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.processes import on_rank_zero
from pretraining.errors import CheckpointError, ConfigError, DamagedError
from pretraining.files import exists, file_checksum, real_path
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.optim.optimizer import materialise_state
from pretraining.optim.registry import build_optimizer
from pretraining.train.run_status import STATUS_FILE, RunStatus, StatusKeeper

log = logging.getLogger(__name__)


def choose_start_point(
    config: TrainConfig, status: StatusKeeper | None, damaged: Mapping[Path, str] = MappingProxyType({})
) -> CheckpointRef | None:
    """Chooses what a run starts from (None: initial weights), makes its folder and counts the start; a collective call.

    A run without a folder starts from initial weights, and is not counted.

    Raises:
        CheckpointError: as `find_start_point`; or the run has crashed there too often.
    """
    if config.checkpoint.ckpt_save_path is None:
        return None
    start = find_start_point(config, status, damaged)
    run, step = config.checkpoint.folder, start.step if start is not None else 0

    def begin() -> None:
        make_run_folder(run)
        if status is not None:
            status.begin(
                *(run, step),
                goes_back=start is not None and start.going_back,
                is_to_go_back=config.checkpoint.resume_from_checkpoint is not None,
            )

    on_rank_zero(begin)
    return start


def find_start_point(
    config: TrainConfig, status: StatusKeeper | None, damaged: Mapping[Path, str] = MappingProxyType({})
) -> CheckpointRef | None:
    """Finds what a run starts from (None: initial weights), and writes nothing; a collective call.

    Raises:
        CheckpointError: as `find_checkpoint`; or it is of another model, or `init_from` and `resume_from_checkpoint`
            ask for what is not there.
    """
    back_to = on_rank_zero(lambda: _checkpoint_to_go_back_to(config.checkpoint, status))
    start = find_checkpoint(config.checkpoint, damaged, back_to)
    on_rank_zero(lambda: _check_beginning(config.checkpoint, start))
    if start is not None and start.is_own and not start.going_back and _is_starting(status):
        on_rank_zero(lambda: _warn_of_other_load_path(config.checkpoint, start))
    if start is not None:
        check_same_model(start.manifest, resolve_shape(config.model), start.path)
    return start


def _checkpoint_to_go_back_to(config: CheckpointConfig, status: StatusKeeper | None) -> Path | None:
    """The checkpoint of the run's own that `resume_from_checkpoint` names, unless a start has gone back to it.

    Raises:
        CheckpointError: the run has no such checkpoint.
    """
    request, run = config.resume_from_checkpoint, config.folder
    own = committed_checkpoints(run) if request is not None else []
    if request is None or not own:
        return None  # a run without checkpoints starts from what was named
    found = _named_in(own, request)
    before = status.before(run) if status is not None else RunStatus()
    if before is None:
        log.warning(
            "%s is damaged: whether the run has gone back to %s is not known, and it goes on from its newest. A start "
            "without --resume_from_checkpoint, and then one with it, goes back",
            *(run / STATUS_FILE, request),
        )
        return None
    if before.went_back_to and (
        before.went_back_to == request or (found is not None and before.went_back_checksum == _checksum_of(found))
    ):
        if _is_starting(status):
            log.info(
                "--resume_from_checkpoint=%s was done by an earlier start: this one goes on from what came after it",
                request,
            )
        return None
    if found is None and not exists(Path(request)):
        there = ", ".join(path.name for path in own)
        raise CheckpointError(
            f"--resume_from_checkpoint={request} is no checkpoint of the run in {run}, which holds {there}"
        )
    if found is None and is_within(Path(request), run):
        raise CheckpointError(
            f"--resume_from_checkpoint={request} is in the run's folder, and none of its checkpoints: name one of "
            f"those in {run / CHECKPOINTS} (what was set aside can be moved back there)"
        )
    if found is None:
        log.info("--resume_from_checkpoint=%s is not of this run, which goes on from its own newest", request)
    elif config.weights_only:
        raise CheckpointError(
            f"--resume_from_checkpoint={request} goes on with this run, and --weights_only=true begins a new one: give "
            "--ckpt_load_path and another --ckpt_save_path instead"
        )
    return found


def _is_starting(status: StatusKeeper | None) -> bool:
    """Whether no run has trained in this process yet; else the run goes back by itself."""
    return status is None or not status.is_training


def _warn_of_other_load_path(config: CheckpointConfig, start: CheckpointRef) -> None:
    """Log what a run starts from if `ckpt_load_path` names something else; a restarted job names what it began with."""
    run, named = config.folder, config.ckpt_load_path
    if named is None or real_path(Path(named)) in map(real_path, (start.path, run, run / CHECKPOINTS)):
        return
    if is_within(Path(named), run):
        log.warning(
            "the start is from %s, the run's newest checkpoint, and not from --ckpt_load_path=%s: give "
            "--resume_from_checkpoint=%s to go back to that one",
            *(start.path, named, named),
        )
    else:
        log.info(
            "the run in %s goes on from its own newest checkpoint, not from --ckpt_load_path=%s: another "
            "--ckpt_save_path would begin one from there",
            *(run, named),
        )


def settle_going_back(config: CheckpointConfig, start: CheckpointRef, status: StatusKeeper | None) -> None:
    """Moves what is newer than the checkpoint that a run has gone back to, and notes that this was done; on rank 0.

    Call it once nothing can refuse the start any more. Killed in between, the next start does the rest.

    Raises:
        CheckpointError: a newer one cannot be moved, or it cannot be noted.
    """
    run = config.folder
    newer = [path for path in committed_checkpoints(run) if step_of(path) > start.manifest.step]
    aside = set_aside(run, newer)
    for path in newer:
        log.info("%s is newer than %s: moved to %s", path.name, start.path.name, aside)
    if status is not None and config.resume_from_checkpoint is not None:
        status.went_back(run, config.resume_from_checkpoint, _checksum_of(start.path))


def _checksum_of(checkpoint: Path) -> str:
    try:
        return file_checksum(checkpoint / MANIFEST)[0]
    except OSError:  # it has lost its manifest
        return ""


def _named_in(own: list[Path], request: str) -> Path | None:
    """The checkpoint among a run's own that was named by its path, its name or its step."""
    named = {path.name: path for path in own}
    by_step = {str(step_of(path)): path for path in own}
    by_path = {real_path(path): path for path in own}
    return named.get(request) or by_step.get(request) or by_path.get(real_path(Path(request)))


def _check_beginning(config: CheckpointConfig, start: CheckpointRef | None) -> None:
    """Raises a CheckpointError unless a run begins as `init_from` says."""
    run = config.folder
    if config.init_from == "resume" and start is None:
        raise CheckpointError(
            f"--init_from=resume goes on with a run, and {run} holds no checkpoint: --init_from=auto begins one, "
            "--ckpt_load_path names one of elsewhere"
        )
    if config.init_from != "scratch" or start is None:
        return
    try:
        begun = load_config(run / CONFIG_FILE).checkpoint.init_from
    except ConfigError:  # none was written, or by a version with other settings
        begun = "auto"
    if begun != "scratch":
        raise CheckpointError(
            f"--init_from=scratch begins from initial weights, and {run} holds a run at step {start.step}: give "
            "another --ckpt_save_path, or --init_from=auto to go on with it"
        )


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
        wanted = optimizer if takes_optimizer(start, config) else None
        if wanted is None:
            log.info("optimizer   begins anew (--load_optimizer=false): its state in %s is left behind", start.path)
    load(start, tensor_state(parameters, wanted))


def takes_optimizer(start: CheckpointRef, config: TrainConfig) -> bool:
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
    # A restarted job repeats its command line, and goes on with what it has made of the new optimizer.
    return config.checkpoint.load_optimizer or (start.is_own and not changes and not start.going_back)
