"""`pretrain push`: a copy of the checkpoints of a run to an object store."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from pretraining.checkpoint.branches import identity_of, is_given_up
from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.mirror import Mirror, TakenOverError, list_copies
from pretraining.checkpoint.own_checkpoints import list_run
from pretraining.checkpoint.start_point import newest_good
from pretraining.config.recipe_files import RUN_CONFIG_FILE, load_config
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import is_address, parse_address
from pretraining.launch.terminal import print_text
from pretraining.text import count_of, list_some
from pretraining.tools.command_settings import PushConfig
from pretraining.train.run_status import original_of


def push(config: PushConfig) -> None:
    """Copy every checkpoint that the mirror of a run lacks, oldest first.

    Raises:
        ConfigError: no run or no address is named.
        CheckpointError: another process writes to the run, the store cannot be used or holds newer checkpoints, or, at
            the end, a checkpoint is damaged.
    """
    run = Path(config.paths[0])
    misnamed = ConfigError("name the run's folder and an address: `pretrain push runs/mine s3://bucket/runs/mine`")
    if is_address(config.paths[0]) or len(config.paths) > 2:
        raise misnamed
    settings = load_config(run / RUN_CONFIG_FILE).checkpoint
    address = config.paths[1] if len(config.paths) == 2 else settings.ckpt_mirror_path
    if not is_address(address):
        raise misnamed
    original = original_of(run) if address == settings.ckpt_mirror_path else None
    if original is not None:
        raise CheckpointError(f"is a copy of the run in {original}, whose mirror this is: name another", path=address)
    settings = replace(settings, ckpt_save_path=str(run), ckpt_mirror_path=address)
    store, lease = parse_address(str(address)).place, Lease(run)
    lease.acquire()
    try:
        listed = list_run(run, list_copies(settings))
        newest, _ = newest_good(listed.saved)
        readable = [checkpoint for checkpoint in listed.saved if checkpoint.kind is not None]
        here = {identity_of(checkpoint) for checkpoint in readable if checkpoint.is_here}
        ahead = [] if newest is None or identity_of(newest.manifest) in here else [newest.path]
        given_up = [each.path for each in readable if newest is not None and is_given_up(each, newest.manifest)]
        if unlike := [*ahead, *given_up]:
            names = list_some([path.name for path in unlike], 4)
            raise CheckpointError(
                f"holds other checkpoints than {store}, where the run has continued: {names}. Start the run to fetch "
                "them",
                path=run,
            )
        paths = [checkpoint.path for checkpoint in listed.saved if checkpoint.is_here]
        mirror, copied, faults = Mirror(settings, listed.run_id), 0, list[str]()
        for path in paths:
            try:
                copied += _copy_if_missing(path, mirror)
            except TakenOverError:
                raise
            except CheckpointError as error:
                faults.append(str(error))
        print_text(f"{count_of(copied, 'checkpoint')} copied, {len(paths) - len(faults)} are in {store}")
        if faults:
            raise CheckpointError(
                f"{count_of(len(faults), 'checkpoint')} not copied:\n  " + "\n  ".join(faults), path=run
            )
    finally:
        lease.release()


def _copy_if_missing(checkpoint: Path, mirror: Mirror) -> bool:
    """Return whether a mirror lacked a checkpoint; raise a CheckpointError if the checkpoint is damaged."""
    if not mirror.lacks(checkpoint):
        return False
    mirror.copy(checkpoint)
    if (problem := mirror.finish(threading.TIMEOUT_MAX)) is not None:
        raise CheckpointError(problem)
    return True
