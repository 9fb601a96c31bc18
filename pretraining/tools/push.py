"""`pretrain push`: a copy of the checkpoints of a run to an object store."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.mirror import Mirror, newest_good_step, open_mirror
from pretraining.checkpoint.object_store import checkpoints_in
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.checkpoint.run_path import CONFIG_FILE
from pretraining.config.recipes import load_config
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import is_address
from pretraining.launch.terminal import print_text
from pretraining.text import count_of
from pretraining.tools.commands import PushConfig


def push(config: PushConfig) -> None:
    """Copy every checkpoint that the mirror of a run lacks, oldest first.

    Raises:
        ConfigError: no run or no address is named.
        CheckpointError: another process writes to the run, a checkpoint is damaged, or the store cannot be used.
    """
    run = Path(config.paths[0])
    settings = load_config(run / CONFIG_FILE).checkpoint
    address = config.paths[1] if len(config.paths) == 2 else settings.ckpt_mirror_path
    if is_address(config.paths[0]) or not is_address(address) or len(config.paths) > 2:
        raise ConfigError("name the run's folder and an address: `pretrain push runs/mine s3://bucket/runs/mine`")
    settings = replace(settings, ckpt_save_path=str(run), ckpt_mirror_path=address)
    lease = Lease(run)
    lease.acquire()
    try:
        store = open_mirror(settings)
        checkpoints = [each.path for each in committed_checkpoints(run)]
        step = newest_good_step(run)
        newer = [folder for folder, manifest in checkpoints_in(store).items() if manifest.step > step]
        if newer:
            raise CheckpointError(f"has {newer[-1]}, which is newer than all checkpoints of {run}", path=store.address)
        mirror = Mirror(settings, step)
        missing = [path for path in checkpoints if mirror.lacks(path)]
        for path in missing:
            mirror.copy(path)
            mirror.finish(threading.TIMEOUT_MAX)
            if mirror.lacks(path):
                raise CheckpointError("is not copied; the line above gives the reason", path=path)
        print_text(f"{count_of(len(missing), 'checkpoint')} copied, {len(checkpoints)} are in {store.address}")
    finally:
        lease.release()
