"""What a run leaves in its folder besides checkpoints (settings, metrics, curves), and what it shows meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pretraining.checkpoint.manifest import CHECKPOINTS
from pretraining.checkpoint.start_point import CONFIG_FILE
from pretraining.config.recipes import dump_config
from pretraining.config.training import TrainConfig
from pretraining.distributed.activation_checkpointing import recomputed_share
from pretraining.distributed.host_sync import is_waiting
from pretraining.distributed.processes import on_every_rank
from pretraining.errors import CheckpointError, ConfigError
from pretraining.model.flops import flops_per_token, recomputed_flops_per_token
from pretraining.observability.display import ProgressDisplay, Silent, choose_display
from pretraining.observability.observer import Observer
from pretraining.observability.stragglers import StragglerWatch
from pretraining.observability.throughput import Stopwatch, device_name, peak_tflops
from pretraining.observability.trackers import Tracker, open_trackers
from pretraining.progress import Interval, TrainState
from pretraining.train.parts import Parts

LOGS = "logs"


def make_run_folder(run: Path) -> None:
    """Make the run's folder, unless it is there.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(run, error) from None


def write_config(config: TrainConfig) -> None:
    """Keep the settings of a start; only one that is not refused, as the file is there to start the run again."""
    run = Path(config.checkpoint.ckpt_save_path)
    try:
        temporary = run / (CONFIG_FILE + ".tmp")
        temporary.write_text(dump_config(config), encoding="utf-8")
        temporary.replace(run / CONFIG_FILE)
    except OSError as error:
        raise _not_writable(run, error) from None


def _not_writable(run: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"--ckpt_save_path={run} cannot be written: {error}. Give a folder that this user may write."
    )


def build_observer(parts: Parts, stopwatch: Stopwatch, state: TrainState) -> Observer:
    """The run's observer, with rank 0's display and trackers; a collective call.

    Args:
        parts: of the run.
        stopwatch: shared with whoever spends time on something else than training.
        state: where the run stands.

    Raises:
        ConfigError: metrics or curves cannot be written; the same on all ranks.
    """
    config, device = parts.config, parts.processes.device
    peak = peak_tflops(device_name(device))
    again = recomputed_share(config.parallel, parts.shape, config.data.seq_length)
    display: ProgressDisplay = Silent()
    trackers = on_every_rank(lambda: _open_trackers(config, state.step) if parts.processes.is_main else [])
    if parts.processes.is_main:
        display = choose_display(config.report.progress, parts.total_steps, peak)
    return Observer(
        interval=Interval(config.report.report_interval, parts.training_tokens),
        total_steps=parts.total_steps,
        flops_per_token=partial(flops_per_token, parts.shape),
        recomputed_flops_per_token=partial(recomputed_flops_per_token, parts.shape, again),
        peak_tflops=peak,
        device=device,
        stopwatch=stopwatch,
        display=display,
        trackers=trackers,
        stragglers=StragglerWatch(config.guard.straggler_factor, is_waiting, lambda: parts.processes.pulse.doing),
        last_loss=parts.restorable.manifest.loss if parts.restorable else None,
    )


def _open_trackers(config: TrainConfig, restored_step: int) -> list[Tracker]:
    logs = Path(config.checkpoint.ckpt_save_path) / LOGS
    tracker_dir = Path(config.report.tracker_dir) if config.report.tracker_dir else logs
    try:
        return open_trackers(config.report.tracker, logs, tracker_dir, restored_step)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be written to {logs}, or curves to {tracker_dir}: {error}. "
            "Give a --tracker_dir (and --ckpt_save_path) that this user may write."
        ) from None
