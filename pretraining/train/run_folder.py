"""A run's folder and its settings, config.yaml."""

from __future__ import annotations

from pathlib import Path

from pretraining.checkpoint.manifest import CHECKPOINTS
from pretraining.checkpoint.start_point import CONFIG_FILE
from pretraining.config.recipes import dump_config
from pretraining.config.training import TrainConfig
from pretraining.files import run_not_writable, write_atomic


def make_run_folder(run: Path) -> None:
    """Makes the run's folder, unless it is there.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_not_writable(run, error) from None


def write_config(config: TrainConfig) -> None:
    """Writes the settings of a start that was not refused: the file is there to start the run again."""
    run = Path(config.checkpoint.ckpt_save_path)
    try:
        write_atomic(run / CONFIG_FILE, dump_config(config))
    except OSError as error:
        raise run_not_writable(run, error) from None
