"""Messages that a run logs at its start and its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import torch

from pretraining.checkpoint.run_folder import unfinished_saves
from pretraining.config.fields import settings_of, values_of
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.recipe_files import RUN_CONFIG_FILE
from pretraining.config.training import OptimizerConfig, TrainConfig
from pretraining.config.values import format_value
from pretraining.config.variants import NEUTRAL, SWITCHES, LlamaShape, format_scaling, name_of_model
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes
from pretraining.estimate.costs import flops_per_token, parameter_count
from pretraining.estimate.devices import peak_tflops
from pretraining.observability.observer import Observer
from pretraining.observability.throughput import device_name
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.optim.horizon import describe_schedule
from pretraining.optim.muon import RMS_OF_ADAMW
from pretraining.optim.registry import user_defined_arguments
from pretraining.text import count_of, describe_passes, describe_repeats, format_seconds
from pretraining.train.loop import Run
from pretraining.train.plan import Plan

log = logging.getLogger(__name__)


def log_plan(plan: Plan) -> None:
    """Log the plan of a run, as lines under headings such as "model" and "data"."""
    config, processes, total_steps = plan.config, plan.processes, plan.state.total_steps
    precision = str(compute_dtype(config.parallel, processes.device)).removeprefix("torch.")
    number = torch.get_num_threads()
    threads = f", {count_of(number, 'thread')} each" if processes.device.type == "cpu" else ""
    compiled = "compiled in the first step, which takes from seconds to minutes (--first_step_timeout)"
    ranks, context = config.parallel.context_parallel_size, plan.shape.max_position_embeddings
    shared = f", each sequence on {ranks} ranks (--context_parallel_size)" if ranks > 1 else ""
    if config.data.seq_length > context:
        shared += f"; the model's context has {context:,} (--max_position_embeddings), and exports will name the longer"
    reads, tasks = _count_reads(plan), plan.opened.tasks
    saves = processes.is_main and config.checkpoint.ckpt_save_path is not None
    unfinished = unfinished_saves(config.checkpoint.folder) if saves else ()
    lines_of = {
        "model": [
            f"{name_of_model(config.model)}, {parameter_count(plan.shape):,} parameters, {precision}, "
            f"{config.parallel.sharding_strategy} over {processes.world_size} x {processes.device.type}{threads}",
            *_describe_switches(plan.shape),
        ],
        "blocks": [compiled] if config.parallel.use_torch_compile else [],
        "data": [_describe_data(plan), *describe_passes(*reads)],
        "batch": [f"{plan.batch.describe()}, {count_of(config.data.seq_length, 'token')} each{shared}"],
        "tasks": [] if tasks is None or tasks.harness is None else tasks.harness.describe(),
        "length": [f"{count_of(total_steps, 'step')}, {count_of(plan.token_schedule.tokens_at(total_steps), 'token')}"],
        "optimizer": [_describe_optimizer(config.optimizer, plan.shape)],
        "schedule": [describe_schedule(config.schedule, plan.learning_rate.horizon)],
        "FLOPs": [_describe_flops(plan)],
        "start": list(_describe_start(plan)),
        "damaged": [
            *(f"{line}: skipped" for line in (plan.start.damaged if plan.start is not None else ())),
            *(f"{path} is incomplete: ignored" for path in unfinished),
        ],
        "run folder": [config.checkpoint.ckpt_save_path or "none: nothing is saved"],
    }
    for line in plan.evaluation.notes:
        log.info("%s", line)
    for name, lines in lines_of.items():
        for index, line in enumerate(lines):
            log.info("%-11s %s", "" if index else name, line)
    if processes.is_main and (repeats := describe_repeats(reads[1])):
        log.warning("%s", repeats)


def _count_reads(plan: Plan) -> tuple[dict[str, int], dict[str, float]]:
    """Return the tokens and the passes of the whole run per dataset; empty for dummy data."""
    if plan.data is None:
        return {}, {}
    counts = plan.loader.reader.mixture.counts_before_step(plan.state.total_steps)
    tokens = {name: sum(length * samples for length, samples in pairs) for name, pairs in counts.items()}
    sizes = {dataset.files.name: dataset.pass_tokens("train") for dataset in plan.data.datasets}
    return tokens, {name: count / sizes[name] for name, count in tokens.items() if name in sizes}


def _describe_data(plan: Plan) -> str:
    data, packing = plan.data, plan.config.data.packing
    if data is None:
        return "dummy data"
    padded = "" if packing == "stream" else f" (packing {packing}, with padding)"
    return (
        f"{count_of(len(data.datasets), 'dataset')}, {data.training_tokens:,} tokens to train on, "
        f"{data.held_out_tokens:,} held out{padded}"
    )


def _describe_switches(shape: LlamaShape) -> list[str]:
    """Return the family, the block and the switches that differ from a plain Llama."""
    names = [name for name in SWITCHES if getattr(shape, name) != NEUTRAL[name]]
    given = {name: format_value(getattr(shape, name)) for name in names}
    if shape.rope_scaling is not None:
        given["rope_scaling"] = ",".join(format_scaling(shape.rope_scaling))
    return [", ".join(f"{name} {value}" for name, value in given.items())] if given else []


def _describe_optimizer(optimizer: OptimizerConfig, shape: LlamaShape) -> str:
    chosen = optimizer.resolved()
    if chosen.optimizer in OPTIMIZERS:
        names = ("learning_rate", "weight_decay", *OPTIMIZERS[chosen.optimizer].options)
        given = {name: format_value(value) for name in names if (value := getattr(chosen, name)) is not None}
    else:
        given = user_defined_arguments(optimizer)
    line = f"{chosen.optimizer}: {', '.join(f'{name} {value}' for name, value in given.items())}"
    if chosen.optimizer == "muon":
        # Ours 0.2 sqrt(longer side); plain Muon's sqrt(max(1, rows / columns)). Their ratio is 0.2 sqrt(columns).
        widths = {shape.hidden_size: "", shape.query_width: " (o_proj)", shape.intermediate_size: " (down_proj)"}
        widths[shape.hidden_size] = ""
        factors = ", ".join(f"{RMS_OF_ADAMW * math.sqrt(width):.3g}{name}" for width, name in widths.items())
        line += f"; updates of matrices are {factors} times as long as of plain Muon, by 0.2 x sqrt(input width)"
    return line


def _describe_start(plan: Plan) -> Iterator[str]:
    start = plan.start
    if start is None:
        yield f"from initial weights, seed {plan.config.run.seed}"
        return
    if plan.restored is None:
        yield f"at step 0 with the weights of {start.path}"
    else:
        yield f"from {start.path}, step {start.manifest.step}"
        yield from start.unmet
        if not plan.loads_optimizer:
            yield "with a new optimizer state (--load_optimizer=false)"
        yield from plan.loader.changes_at_resume
        for name, (was, is_now) in changed_settings(start.config, plan.config).items():
            yield f"{name} changed from {was} to {is_now}"
        if plan.state.step < plan.state.total_steps:
            rate = plan.learning_rate.at(plan.state.step, plan.config.optimizer.peak_learning_rate)
            yield f"the learning rate is {rate:.3g} at first"


def _describe_flops(plan: Plan) -> str:
    flops, name = flops_per_token(plan.shape, plan.config.data.seq_length), device_name(plan.processes.device)
    peak = peak_tflops(name)
    mfu = f"no MFU: the peak of a {name} is unknown"
    if peak is not None:
        mfu = f"MFU is relative to {peak:g} TFLOP/s, the dense bfloat16 peak of {name}"
    return f"{flops:.3e} per token{', less in shorter documents' if plan.config.data.document_mask else ''}; {mfu}"


def describe_speed(observer: Observer, processes: Processes) -> str:
    """Return the measured speed of a run on dummy data: the median of all reports but the first, which warms up."""
    measured, newest, gpus = list(observer.step_seconds), observer.newest, processes.world_size
    measured = measured[1:] or measured
    step = median(measured)
    speedup = newest["step_seconds"] / step  # scales the rates of the newest report to the median step
    rate, kind = newest["tokens_per_second_per_gpu"] * speedup, "GPU" if processes.device.type == "cuda" else "process"
    mfu = "no MFU: the peak is unknown"
    if observer.throughput.peak_tflops is not None:
        mfu = f"MFU {newest['mfu'] * speedup:.1%} of {observer.throughput.peak_tflops:g} TFLOP/s"
    return (
        f"speed       {step:#.3g} s/step, the median of {count_of(len(measured), 'report')}; {rate:,.0f} tokens/s per "
        f"{kind}, {rate * gpus:,.0f} in all; {mfu}; peak {newest['memory_gib']:.1f} GiB"
    )


def describe_end(run: Run) -> str:
    """Return how a run ended, and where its files are."""
    state, config = run.state, run.plan.config
    head = f"Stopped at step {state.step} of {state.total_steps}."
    if not run.observer.newest:  # nothing was trained or evaluated
        head = f"This run is already finished, at step {state.step} of {state.total_steps}."
        if not state.early_end:
            head += (
                " --num_steps counts from step 0, with the steps before the start point: raise it above "
                f"{state.step} to continue."
            )
    elif state.finished and not state.early_end:
        tokens, time = f"{state.progress.tokens:,}", format_seconds(run.stopwatch.elapsed)
        head = f"Finished {count_of(state.total_steps, 'step')}, {tokens} tokens; this invocation took {time}."
    lines = [f"{head} {state.early_end}".rstrip()]
    if config.checkpoint.ckpt_save_path is not None:
        folder = config.checkpoint.folder
        lines += [
            f"  checkpoint   {run.checkpoints.newest}",
            f"  metrics      {folder / LOGS / METRICS_FILE}",
            f"  config       {folder / RUN_CONFIG_FILE}",
        ]
    return "\n".join(lines)


def changed_settings(before: TrainConfig, now: TrainConfig) -> dict[str, tuple[str, str]]:
    """Return both values of each changed setting, as text, except those that declare `silent_change`."""
    settings = settings_of(TrainConfig)
    was, is_now = (values_of(replace(each, optimizer=each.optimizer.resolved())) for each in (before, now))
    return {
        name: (format_value(was[name]) or "none", format_value(value) or "none")
        for name, value in is_now.items()
        if was[name] != value and not settings[name].silent_change
    }
