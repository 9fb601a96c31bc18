"""Makes what saves a run."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from pretraining.checkpoint.async_save import Staging
from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.manager import CheckpointManager, SavePolicy
from pretraining.checkpoint.retention import tidy_up
from pretraining.checkpoint.state import FORMAT_VERSION, Manifest, Stateful, tensor_state
from pretraining.checkpoint.store import world_description
from pretraining.config.recipes import dump_config
from pretraining.data.loader import Loader
from pretraining.distributed.processes import on_rank_zero
from pretraining.observability.observer import Observer
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Interval, Progress

if TYPE_CHECKING:
    from pretraining.train.build import RunPlan

log = logging.getLogger(__name__)


def build_checkpoints(
    parts: RunPlan,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    observer: Observer,
    stopwatch: Stopwatch,
    states: dict[str, Stateful],
    lease: Lease | None,
) -> CheckpointManager:
    """What saves the run, and has its folder tidied up if it goes on; a collective call.

    Args:
        parts: of the run.
        parameters: by name.
        optimizer: of them.
        loader: of the training's batches; its position is saved.
        observer: knows the newest loss, and shows what is saved.
        stopwatch: books the time that the training waits for a save.
        states: collaborators whose memory goes into checkpoints, by name; restored here.
        lease: on the run's folder; None = nobody else writes there.
    """
    config, device = parts.config, parts.processes.device
    settings = dump_config(config)  # once: it takes milliseconds, and a step waits for each save

    policy = SavePolicy(
        interval=Interval(config.checkpoint.checkpoint_interval, parts.training_tokens),
        preempt_interval=Interval(config.checkpoint.preempt_interval, parts.training_tokens),
        keep_last=config.checkpoint.keep_last,
        save_best=config.checkpoint.save_best,
        name_style=config.checkpoint.ckpt_name,
        is_full=config.checkpoint.ckpt_format == "full",
    )
    wanted = config.checkpoint.async_save
    beside_training = device.type == "cuda" and not policy.is_full if wanted is None else wanted
    manager = CheckpointManager(
        run=Path(config.checkpoint.ckpt_save_path),
        policy=policy,
        tensors=lambda: tensor_state(parameters, optimizer),
        describe=lambda progress: _describe(progress, parts, settings, loader, observer),
        states=states,
        activity=stopwatch.measure,
        note=log.info,
        restored=parts.restored.manifest if parts.restored else None,
        staging=Staging(device) if beside_training else None,
        check_lease=lease.check if lease is not None else lambda: None,
    )
    optimizer.register_step_pre_hook(lambda *_: manager.before_update())
    restorable = parts.restored
    if restorable is not None and restorable.is_own:  # a kill may have come after its commit and before this
        run = Path(config.checkpoint.ckpt_save_path)
        on_rank_zero(lambda: tidy_up(run, restorable.path, config.checkpoint.keep_last))
    return manager


def _describe(progress: Progress, parts: RunPlan, settings: str, loader: Loader, observer: Observer) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        step=progress.steps,
        tokens_seen=progress.tokens,
        seconds=progress.seconds,
        kind="interval",
        loss=observer.last_loss,
        evaluation_loss=None,
        best_evaluation_loss=None,
        data=loader.state_dict(),
        state={},
        global_batch_size=parts.batch.global_batch_size,
        model=asdict(parts.shape),
        world=world_description(parts.config.parallel.sharding_strategy),
        torch_version=torch.__version__,
        files={},
        config=settings,
    )
