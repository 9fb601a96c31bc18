"""What a run says at its start and at its end, so that a person knows what is happening and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pretraining.checkpoint.state import Manifest
from pretraining.config.parallel import PER_OPERATION, ParallelConfig, checkpointed_blocks
from pretraining.config.recipes import dump_config, parse_recipe
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw
from pretraining.distributed.fsdp import compute_dtype
from pretraining.model.flops import flops_per_token, matmul_parameters, parameter_count
from pretraining.observability.display import format_seconds
from pretraining.observability.throughput import device_name, peak_tflops
from pretraining.observability.trackers import METRICS_FILE
from pretraining.progress import TrainState
from pretraining.train.parts import Parts
from pretraining.train.preemption import reason_of


def announce(parts: Parts, state: TrainState, changes: Sequence[str], note: Callable[[str], None]) -> None:
    """Say what is about to be trained, on what, for how long, and from where.

    Args:
        parts: of the run.
        state: where it stands.
        changes: how its data changes here, a line each.
        note: shows a line.
    """
    config, processes, plan, restorable = parts.config, parts.processes, parts.plan, parts.restorable
    precision = str(compute_dtype(config.parallel, processes.device)).removeprefix("torch.")
    name = config.model.model_variant or "llama"
    note(
        f"model       {name}, {parameter_count(parts.shape):,} parameters, {precision}, "
        f"{config.parallel.sharding_strategy} over {processes.world_size} x {processes.device.type}"
    )
    for line in _levers(config.parallel, parts.shape.num_hidden_layers):
        note(f"            {line}")
    if parts.data is None:
        note("data        made up")
    else:
        padded = "" if config.data.packing == "stream" else f" (packing {config.data.packing}, with padding)"
        note(
            f"data        {len(parts.data.datasets)} datasets, {parts.data.training_tokens:,} tokens to train on, "
            f"{parts.data.held_out_tokens:,} held out{padded}"
        )
    note(f"batch       {plan.describe()}, {config.data.seq_length} tokens each")
    note(f"length      {state.total_steps} steps, {parts.token_schedule.tokens_at(state.total_steps):,} tokens")
    for line in _describe_flops(parts):
        note(line)
    if parts.weights is not None:
        note(f"start       at step 0 with the weights of {parts.weights.path}")
        for line in parts.weights.passed_over:
            note(f"            {line}: passed over")
    elif restorable is None:
        note(f"start       from initial weights, seed {config.run.seed}")
    else:
        note(f"start       from {restorable.path}, step {restorable.manifest.step}")
        for change in changes:
            note(f"            {change}")
        for change in changed_settings(restorable.manifest, config):
            note(f"            {change}")
        if state.stop_step < state.total_steps:
            note(f"            this invocation ends at step {state.stop_step}")
        for line in restorable.passed_over:
            note(f"            {line}: passed over")
    for path in parts.abandoned:
        note(f"            {path} is incomplete: ignored")
    note(f"run folder  {config.checkpoint.ckpt_save_path}")


def _describe_flops(parts: Parts) -> list[str]:
    """What MFU counts, and what it is a share of."""
    shape, seq_length = parts.shape, parts.config.data.seq_length
    operations = flops_per_token(shape, seq_length)
    less = ", less in shorter documents" if parts.config.data.document_mask else ""
    name = device_name(parts.processes.device)
    peak = peak_tflops(name)
    relative = (
        f"no MFU: the peak of a {name} is not known, `pretrain doctor` measures what it reaches"
        if peak is None
        else f"MFU is the share of {peak:g} TFLOP/s, the dense bfloat16 peak of {name}"
    )
    return [
        f"FLOPs       {operations:.3e} a token = 6 x {matmul_parameters(shape):,} matmul parameters + "
        f"6 x {shape.num_hidden_layers} layers x {shape.num_attention_heads * shape.head_dim} x {seq_length}{less}",
        f"            {relative}",
    ]


def _levers(parallel: ParallelConfig, layers: int) -> Iterator[str]:
    """What is done to the model's blocks, a line each."""
    if parallel.float8 is not None:
        yield f"linear layers of the blocks multiply in float8, {parallel.float8} scaled"
    selective = parallel.selective_checkpointing
    if parallel.fsdp_activation_checkpointing:
        count = len(checkpointed_blocks(selective, layers))
        kept = ", but for matrix products and attention" if selective == PER_OPERATION else ""
        yield f"{count} of {layers} blocks are computed again in the backward pass{kept}"
    if parallel.use_torch_compile:
        yield "blocks are compiled in the first step, which takes from seconds to minutes (--first_step_timeout)"


def conclude(
    config: TrainConfig, state: TrainState, checkpoint: Path | None, elapsed_seconds: float, trained: bool
) -> str:
    """Where everything is, and what to run next.

    Args:
        config: the settings.
        state: where the run stands.
        checkpoint: the newest one, saved now or before.
        elapsed_seconds: of this invocation.
        trained: whether there was anything left to do.
    """
    run = Path(config.checkpoint.ckpt_save_path)
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
        longer = f"--num_steps={2 * max(state.step, state.total_steps)}"
        lines.append(f"  go on        the same command with {longer} --ckpt_save_path={run}")
        lines.append("  start anew   the same command with another --ckpt_save_path")
    return "\n".join(lines)


def conclude_preempted(state: TrainState) -> str:
    """Why a run ended before it was done, and how it goes on."""
    return (
        f"Preempted at step {state.step} of {state.total_steps} ({reason_of(state.stop)}): saved; "
        "the same command goes on from there."
    )


# What may change at every start without a word: where things are, how much is shown, how the work is laid out on the
# machines.
_UNREMARKABLE_SECTIONS = ("model", "checkpoint", "report", "profiler")
_UNREMARKABLE = {
    *(
        "run_steps",
        "gc_interval",
        "num_workers",
        "data_path",
        "file_type",
        "index_path",
        "tokenizer_path",
        "sample_prompt",
        "sample_tokens",
    ),
    *("sharding_strategy", "hsdp_group_size", "batch_size", "grad_accum_steps"),
    *("fsdp_activation_checkpointing", "selective_checkpointing", "use_torch_compile"),
    *("datasets", "weights", "global_batch_size", "skip_samples"),  # the lines about phases say these
}


def changed_settings(manifest: Manifest, config: TrainConfig) -> list[str]:
    """How the settings differ from those that a checkpoint was made with, a line each.

    What cannot change (the model, the order of the data) was refused before; the order of the data does not depend on
    what is left.
    """
    before = {setting.name.rpartition(".")[2]: setting.raw for setting in parse_recipe(manifest.config, "before")}
    lines = []
    for setting in parse_recipe(dump_config(config), "now"):
        section, _, name = setting.name.rpartition(".")
        if section in _UNREMARKABLE_SECTIONS or name in _UNREMARKABLE or name not in before:
            continue
        if before[name] != setting.raw:
            lines.append(f"{name} was {_shown(before[name])} and is {_shown(setting.raw)} from here on")
    return lines


def _shown(raw: Raw) -> str:
    return "none" if raw is None else raw if isinstance(raw, str) else ",".join(raw)
