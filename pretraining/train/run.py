"""A run from its configuration to its end: join the processes, build, train, say what came of it."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from pretraining.checkpoint.lease import hold_lease
from pretraining.checkpoint.start_point import adopt_model, settle_run_path, without_own_load_path
from pretraining.config.rules import remarks
from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.tokenizer import load_fitting_tokenizer, load_tokenizer
from pretraining.distributed.compile import naming_the_flag, without_compiling
from pretraining.distributed.processes import Processes, join_processes, on_every_rank, on_rank_zero
from pretraining.distributed.rendezvous import Patience
from pretraining.distributed.watchdog import Watchdog, collective_timeout
from pretraining.evaluation.generation import generate
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.shared_cores import leaving_cores_to_others
from pretraining.observability.events import Events
from pretraining.observability.out_of_memory import explain_out_of_memory
from pretraining.train.build import Job
from pretraining.train.evaluate_only import evaluate_only, of_what_is_evaluated
from pretraining.train.loop import Run
from pretraining.train.messages import conclude, conclude_preempted
from pretraining.train.preemption import StopRequests
from pretraining.train.rollback import train_to_the_end
from pretraining.train.run_status import StatusKeeper

log = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    layout: ProcessLayout,
    stop_requests: StopRequests | None = None,
    threads: CpuThreads | None = None,
) -> None:
    """Trains as configured, in every process of a job; with `eval_only` it evaluates, and writes nothing.

    Args:
        config: the same in every process.
        stop_requests: what asks this process to end early; None = nothing.
        threads: how many were chosen for this process; None = it keeps those that it has.

    Raises:
        Preempted: the run was told to end before it was done, and is saved; `Interrupted` if it was Ctrl-C.
        PretrainError: any mistake of the user; the message says what to change.
    """
    for line in remarks(config):
        log.info(line)
    requests = StopRequests() if stop_requests is None else stop_requests
    # Whether the time limit leaves room for a start is asked once the start is counted.
    end_at_signal = replace(requests, deadline=None).end_before_training
    waiting = config.guard.first_step_timeout.amount or collective_timeout(config.guard).total_seconds()
    events = Events()
    # The status is written last, when an error has been put into words.
    with (
        StatusKeeper(config.run.max_starts_without_progress, layout.rank == 0, events) as status,
        join_processes(
            *(layout.rank, layout.world_size, layout.local_rank, layout.local_world_size),
            layout.as_environment(),
            timeout=collective_timeout(config.guard),
            patience=Patience(timedelta(seconds=waiting), end_at_signal),
            parallel=config.parallel,
        ) as processes,
        Watchdog(config.guard, processes),
        leaving_cores_to_others(torch.get_num_threads()) if processes.device.type == "cpu" else nullcontext(),
    ):
        if config.evaluation.eval_only:
            with naming_the_flag(processes.rank if processes.world_size > 1 else None):
                evaluate_only(adopt_model(of_what_is_evaluated(config)), processes, requests)
            return
        config = adopt_model(without_own_load_path(config))
        prompt = on_rank_zero(lambda: _encode_prompt(config))  # before training: a bad path should not cost a run
        on_every_rank(end_at_signal)
        run_path = on_rank_zero(lambda: settle_run_path(config))
        config = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=run_path))
        with (
            hold_lease(Path(run_path), processes) as lease,
            explain_out_of_memory(config, processes) as memory,
            naming_the_flag(processes.rank if processes.world_size > 1 else None),
        ):
            job = Job(processes, requests, status, lease, memory, threads, events, layout.launcher)
            run, trained = train_to_the_end(config, job)
        if run.state.preempted and not (run.state.finished and not run.evaluator.pending):
            raise conclude_preempted(run.state)
        _finish(config, processes, run, prompt, trained)


def _encode_prompt(config: TrainConfig) -> list[int] | None:
    """Tokens of the prompt that the sample at the end continues, or None without a sample."""
    if config.data.tokenizer_path is None or config.evaluation.sample_tokens == 0:
        return None
    tokenizer = load_fitting_tokenizer(config.data.tokenizer_path, resolve_shape(config.model).vocab_size)
    tokens = tokenizer.encode(config.evaluation.sample_prompt)
    return tokens or [tokenizer.end_of_text or 0]


def _finish(config: TrainConfig, processes: Processes, run: Run, prompt: list[int] | None, trained: bool) -> None:
    sample: list[int] = []
    if prompt is not None:
        count, context = config.evaluation.sample_tokens, config.data.seq_length
        with without_compiling():  # every token makes the sequence longer
            sample = generate(run.context.model.module, prompt, count, context, processes.device, seed=config.run.seed)
    log.info(conclude(config, run, trained))
    if prompt is not None and processes.is_main:
        assert config.data.tokenizer_path is not None
        tokenizer = load_tokenizer(config.data.tokenizer_path)
        text = config.evaluation.sample_prompt + tokenizer.decode(sample)
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        log.info("  a sample of its text:\n%s", indented)
