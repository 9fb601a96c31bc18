"""`pretrain train --dry_run=true`: the report of what a start would do.

    settings and their assignments -> table of settings with sources
    Plan (train/plan.py)           -> the lines of a start: model, data, memory, start point, length
    loader of the plan             -> Inspector -> samples of the next step

All processes of a job take part and run the checks of a start, with the same messages. No tensor is made or read.
Missing indices of the data are built in a temporary folder.
"""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from pretraining.checkpoint.lease import must_wait_for_lease
from pretraining.checkpoint.mirror import list_copies
from pretraining.checkpoint.run_folder import FROM_DATA, STATUS_FILE, find_run_folder
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.assignments import Assignment
from pretraining.config.fields import sections_of, settings_of, values_of
from pretraining.config.read import Given
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.terminal import print_text
from pretraining.observability.trackers import check_trackers
from pretraining.text import format_table
from pretraining.tools.inspect import Inspector, heading
from pretraining.train.complete import find_and_complete
from pretraining.train.job import Job, join_job
from pretraining.train.messages import log_plan
from pretraining.train.opening import open_run
from pretraining.train.plan import Plan, plan_run
from pretraining.train.preemption import StopRequests
from pretraining.train.run_status import RunStatus, count_start, read_status

SLOTS_SHOWN = 16
"""Slots of the next step that are listed."""
_LINE = 118


def dry_run(given: Given[TrainConfig], layout: ProcessLayout, stop_requests: StopRequests | None = None) -> None:
    """Print what `train` would do with the same arguments; every process of a job calls this.

    Raises:
        Preempted: a signal arrived.
        PretrainError: any error that `train` raises before it makes a tensor.
    """
    requests = stop_requests or StopRequests()
    with (
        join_job(given.config, layout, requests, is_embedded=False) as processes,
        _temporary_folder(processes) as folder,
    ):
        path = on_rank_zero(lambda: find_run_folder(given.config))
        checkpoint = replace(given.config.checkpoint, ckpt_save_path=path)
        in_folder = replace(given.config, checkpoint=checkpoint)
        config, start = find_and_complete(
            in_folder, lambda: find_start(checkpoint, copies=list_copies(checkpoint, writes=False))
        )
        if processes.is_main:
            _print(describe_settings(config, given, start))
        if config.checkpoint.ckpt_save_path is not None:
            on_rank_zero(lambda: _check_folder(config, start))
        opened = open_run(config, start, Job(processes, requests), index_folder=folder)
        plan = on_every_rank(lambda: plan_run(start, opened))
        on_rank_zero(lambda: check_trackers(config))
        log_plan(plan)
        on_every_rank(requests.raise_if_signalled)
        on_every_rank(lambda: _print(_describe_next_step(plan)) if processes.is_main else None)


def _check_folder(config: TrainConfig, start: CheckpointRef | None) -> None:
    """Raise if the lease or the start counter of the run's folder forbids a start."""
    run = config.checkpoint.folder
    must_wait_for_lease(run)
    count_start(read_status(run / STATUS_FILE) or RunStatus(), start, config.run.max_starts_without_progress)


def describe_settings(config: TrainConfig, given: Given[TrainConfig], found: CheckpointRef | None) -> Iterator[str]:
    """Yield a table of the settings that were given or adopted, with their sources; then the defaults by section.

    Args:
        config: settings of the run, with values adopted from its start point.
        found: checkpoint that the run starts from.
    """
    settings, values, before = settings_of(TrainConfig), values_of(config), values_of(given.config)
    sources = {
        name: _describe_source(name, given.chosen) if values[name] == before[name] else _describe_derived(name, found)
        for name in settings
        if name in given.chosen or values[name] != before[name]
    }
    yield f"settings    {len(sources)} set, {len(settings) - len(sources)} by default"
    shown = {name: format_value(values[name]) for name in settings}
    yield from format_table([(f"  {name}", shown[name], source) for name, source in sources.items()])
    yield "defaults"
    for section in sections_of(TrainConfig):
        others = [name for name, setting in settings.items() if setting.section == section and name not in sources]
        text = ", ".join(f"{name}={shown[name]}" for name in others)
        yield from textwrap.wrap(
            text, _LINE, initial_indent=f"  {section:12}", subsequent_indent=" " * 14, break_on_hyphens=False
        )


def _describe_source(name: str, chosen: Mapping[str, Assignment]) -> str:
    assignment = chosen[name]
    written = assignment.section_and_name[1]
    return assignment.source.name + (f", as {written}" if written != name else "")


def _describe_derived(name: str, found: CheckpointRef | None) -> str:
    """Return the source of a value that was not given: a checkpoint gives the model and what data gives new runs."""
    is_adopted = name in FROM_DATA or settings_of(TrainConfig)[name].section == "model"
    if found is None or not is_adopted or (name in FROM_DATA and found.weights_only):
        return "follows from other settings or the data"
    return f"taken from {found.path}"


def _describe_next_step(plan: Plan) -> Iterator[str]:
    """Yield the samples of the next step, and the closing line of a dry run."""
    state, data = plan.state, plan.config.data
    if state.step >= state.total_steps:
        yield f"dry run     nothing was written; the run is finished: step {state.step} of {state.total_steps}"
        return
    step = state.step + 1
    inspector = Inspector(plan.loader.reader, plan.data, data.seq_length, data.bad_documents == "quarantine")
    slots = inspector.global_batch_size(step)
    yield heading(step, "all ranks", slots, data.seq_length)
    for slot in islice(inspector.slots(step), SLOTS_SHOWN):
        yield from slot.describe(None)
    if slots > SLOTS_SHOWN:
        yield f"and {slots - SLOTS_SHOWN} more slots: `pretrain inspect --step={step}` with these settings lists them"
    yield f"dry run     nothing was written; without --dry_run the same command starts with step {step}"


def _print(lines: Iterator[str]) -> None:
    print_text("\n".join(lines), flush=True)


@contextmanager
def _temporary_folder(processes: Processes) -> Iterator[str]:
    """Provide one path to all processes: a temporary folder on each machine."""
    folder = on_rank_zero(lambda: tempfile.mkdtemp(prefix="pretrain-dry-run-"))
    try:
        yield folder
    finally:
        if processes.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
