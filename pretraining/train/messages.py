"""What a run says at its start and at its end, so that a person knows what is happening and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pretraining.checkpoint import store
from pretraining.checkpoint.state import Manifest
from pretraining.config.recipes import parse_recipe
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.model.flops import parameter_count
from pretraining.observability.progress import format_seconds
from pretraining.observability.trackers import METRICS_FILE
from pretraining.parallel.precision import compute_dtype
from pretraining.train.parts import Parts
from pretraining.train.preemption import reason_of
from pretraining.train.state import TrainState


def announce(parts: Parts, state: TrainState, changes: Sequence[str], note: Callable[[str], None]) -> None:
    """Say what is about to be trained, on what, for how long, and from where.

    Args:
        parts: of the run.
        state: where it stands.
        changes: how its data changes here, a line each.
        note: shows a line.
    """
    config, processes, plan, restorable = parts.config, parts.processes, parts.plan, parts.restorable
    precision = str(compute_dtype(config.parallel.mixed_precision, processes.device)).removeprefix("torch.")
    note(
        f"model       {config.model.model_variant}, {parameter_count(parts.shape):,} parameters, {precision}, "
        f"{config.parallel.sharding_strategy} over {processes.world_size} x {processes.device.type}"
    )
    if parts.data is None:
        note("data        made up")
    else:
        padded = "" if config.data.packing == "stream" else f" (packing {config.data.packing}, with padding)"
        note(
            f"data        {len(parts.data.datasets)} datasets, {parts.data.training_tokens:,} tokens to train on, "
            f"{parts.data.held_out_tokens:,} held out{padded}"
        )
    note(f"batch       {plan.describe()}, {config.data.seq_length} tokens each")
    note(f"length      {state.total_steps} steps, {parts.pace.tokens_at(state.total_steps):,} tokens")
    if restorable is None:
        note(f"start       from initial weights, seed {config.run.seed}")
    else:
        note(f"start       from {restorable.path}, step {restorable.manifest.step}")
        for change in changes:
            note(f"            {change}")
        before, now = _had_document_mask(restorable.manifest), config.data.document_mask
        if before != now:
            note(f"            document_mask was {format_value(before)} and is {format_value(now)} from here on")
        if state.stop_step < state.total_steps:
            note(f"            this invocation ends at step {state.stop_step}")
    for path in parts.abandoned:
        note(f"            {path} is incomplete: ignored")
    note(f"run folder  {config.checkpoint.ckpt_save_path}")


def conclude(
    config: TrainConfig, state: TrainState, restored: Path | None, elapsed_seconds: float, trained: bool
) -> str:
    """Where everything is, and what to run next."""
    run = Path(config.checkpoint.ckpt_save_path)
    checkpoint = store.checkpoint_path(run, state.step) if trained else restored
    if not trained:
        head = f"This run is finished already, at step {state.step} of {state.total_steps}: nothing was trained."
    elif state.finished:
        tokens, time = f"{state.progress.tokens:,}", format_seconds(elapsed_seconds)
        head = f"Finished {state.total_steps} steps, {tokens} tokens; this invocation took {time}."
    else:
        head = f"Stopped at step {state.step} of {state.total_steps}, as asked; the same command goes on from there."
    lines = [
        head,
        f"  checkpoint   {checkpoint}",
        f"  metrics      {run / 'logs' / METRICS_FILE}",
        f"  config       {run / 'config.yaml'}",
    ]
    if "tensorboard" in config.report.tracker:
        lines.append(f"  curves       tensorboard --logdir {config.report.tracker_dir or run / 'logs'}")
    if state.finished:
        lines.append(f"  go on        the same command with --num_steps={2 * max(state.step, state.total_steps)}")
        lines.append("  start anew   the same command with another --ckpt_save_path")
    return "\n".join(lines)


def conclude_preempted(state: TrainState) -> str:
    """Why a run ended before it was done, and how it goes on."""
    return (
        f"Preempted at step {state.step} of {state.total_steps} ({reason_of(state.stop)}): saved; "
        "the same command goes on from there."
    )


def _had_document_mask(manifest: Manifest) -> bool:
    """Whether the checkpoint's last step had one; the order of the data does not depend on it, so no phase says it."""
    settings = parse_recipe(manifest.config, "config of a checkpoint")
    return any(setting.name == "data.document_mask" and setting.raw == "true" for setting in settings)
