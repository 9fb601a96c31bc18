"""One process of a job of several runs, each with a fault injected: reads (port, fault, flags) as JSON.

A fault is a function of this module that is given the run, before its first step, and the process's rank; it puts hooks
into the model, the weights or the data. How a run ends is printed as a line of JSON.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from pretraining.config.command_line import load_train_config
from pretraining.distributed.grad_norm import local_part
from pretraining.errors import PretrainError
from pretraining.launch.layout import resolve_layout
from pretraining.launch.terminal import log_to_terminal
from pretraining.observability import stragglers
from pretraining.train import run
from pretraining.train.loop import Run, train_loop


def at_steps(job: Run, steps: range, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A hook that changes what a module gives in some steps, numbered from 1, while training."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return change(output) if job.state.step + 1 in steps and torch.is_grad_enabled() else output

    return hook


def spoil_objective(job: Run, steps: range, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The model finds another objective in some steps."""
    job.context.model.module.register_forward_hook(
        at_steps(job, steps, lambda output: output._replace(objective_sum=change(output.objective_sum)))
    )


def spoil_norm(job: Run, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The last norm gives something else in step 3."""
    norm: Any = job.context.model.module.model.norm
    norm.register_forward_hook(at_steps(job, range(3, 4), change))


def no_fault(job: Run, rank: int) -> None:
    """Nothing is wrong."""


def loss_is_nan(job: Run, rank: int) -> None:
    """Rank 1's loss is NaN in step 3; the NaN is added, so that gradients by themselves would stay finite."""
    if rank == 1:
        spoil_objective(job, range(3, 4), lambda objective: objective + torch.nan)


def loss_is_infinite(job: Run, rank: int) -> None:
    """Rank 1's loss overflows in step 3."""
    if rank == 1:
        spoil_objective(job, range(3, 4), lambda objective: objective * 1e30 * 1e30)


def gradient_is_infinite(job: Run, rank: int) -> None:
    """A gradient of rank 1 overflows in step 3 in the middle of the backward pass; the loss is right."""

    def change(output: torch.Tensor) -> torch.Tensor:
        output.register_hook(lambda gradient: gradient * torch.inf)
        return output

    if rank == 1:
        spoil_norm(job, change)


def memory_runs_out(job: Run, rank: int) -> None:
    """Rank 1 asks for more memory than there is in step 3."""
    if rank == 1:
        spoil_norm(job, lambda output: output + torch.empty(1 << 55, dtype=torch.uint8))


def loss_stays_nan(job: Run, rank: int) -> None:
    """Rank 1's loss is NaN from step 3 on."""
    if rank == 1:
        spoil_objective(job, range(3, 1000), lambda objective: objective * torch.nan)


def loss_is_nan_at_first(job: Run, rank: int) -> None:
    """The loss of steps 7 and 8 is NaN, the first time that the run comes there."""

    def change(objective: torch.Tensor) -> torch.Tensor:
        return objective * torch.nan if _lost.setdefault(job.state.step, job) is job else objective

    spoil_objective(job, range(7, 9), change)


_lost: dict[int, Run] = {}


def loss_is_tenfold(job: Run, rank: int) -> None:
    """The loss of every rank is ten times what it should be in step 9."""
    spoil_objective(job, range(9, 10), lambda objective: objective * 10)


def learning_rate_explodes(job: Run, rank: int) -> None:
    """The learning rate of step 7 is 100, the first time that the run comes there. Keeps what every step trains on."""

    def set_learning_rate(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if job.state.step + 1 == 7 and not _exploded:
            _exploded.append(True)
            for group in optimizer.param_groups:
                group["lr"] = 100.0

    job.context.optimizer.register_step_pre_hook(set_learning_rate)
    folder = job.checkpoints._config.folder

    def keep(module: nn.Module, inputs: Any) -> None:
        with (folder / f"trained_{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": job.state.step + 1, "tokens": inputs[0].tolist()}) + "\n")

    job.context.model.module.register_forward_pre_hook(keep)


_exploded: list[bool] = []


def killed_after_a_rollback(job: Run, rank: int) -> None:
    """The same, and the process is killed in the step after that, before anything is saved again."""
    has_gone_back = bool(_exploded)
    learning_rate_explodes(job, rank)

    def kill(module: nn.Module, inputs: Any) -> None:
        if has_gone_back and job.state.step + 1 == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    job.context.model.module.register_forward_pre_hook(kill)


def flip_weight_bit(job: Run, rank: int) -> None:
    """One bit of one weight of rank 1 flips before step 3."""
    weights: Any = next(iter(job.context.model.parameters.values()))

    def flip(module: nn.Module, inputs: Any) -> None:
        if job.state.step == 2 and rank == 1:
            local_part(weights).detach().view(-1).view(torch.int32)[5] ^= 1 << 3

    job.context.model.module.register_forward_pre_hook(flip)


def slow_forward(job: Run, rank: int) -> None:
    """Rank 1 sleeps in every forward pass; looks are so many that a short run is enough."""
    log_to_terminal(rank)
    stragglers.PERIOD_SECONDS = 0.01
    if rank == 1:
        job.context.model.module.register_forward_pre_hook(lambda module, inputs: time.sleep(0.1))


def in_read(job: Run, rank: int, step: int, act: Callable[[], object]) -> None:
    """Something happens to rank 1 while it reads the batch of a step, numbered from 1."""
    reader = inspect.getgeneratorlocals(job.batches)["loader"].reader
    read = reader.read

    def reading(done: int) -> Any:
        if done + 1 == step and rank == 1:
            act()
        return read(done)

    reader.read = reading


def die_while_reading(job: Run, rank: int) -> None:
    """The thread of rank 1 that reads is killed, as far as a thread can be, while it reads the batch of step 3."""

    def kill() -> None:
        thread = ctypes.c_ulong(threading.get_ident())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))

    in_read(job, rank, 3, kill)


def fail_while_reading(job: Run, rank: int) -> None:
    """What reads rank 1's data fails, as by a bug, in step 3."""
    in_read(job, rank, 3, lambda: 1 / 0)


def hang_while_reading(job: Run, rank: int) -> None:
    """Rank 1's read of the batch of step 3 never comes back."""
    in_read(job, rank, 3, threading.Event().wait)


def hang_at_the_first_read(job: Run, rank: int) -> None:
    """Rank 1's very first read never comes back."""
    in_read(job, rank, 1, threading.Event().wait)


def tell_steps(job: Run, rank: int) -> None:
    """Every step is told on standard output, so that somebody can act in the middle of the run."""
    job.context.model.module.register_forward_pre_hook(
        lambda module, inputs: print(f"rank {rank} in step {job.state.step + 1}", flush=True)
    )


def faulty_loop(inject: Callable[[Run, int], None], rank: int, job: Run) -> None:
    """The training loop, with something wrong."""
    inject(job, rank)
    train_loop(job)


def main(jobs: list[tuple[int, str, list[str]]]) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, fault, flags in jobs:
        os.environ["MASTER_PORT"] = str(port)
        layout = resolve_layout(os.environ)
        run.train_loop = partial(faulty_loop, globals()[fault], layout.rank)
        ending: dict[str, Any] = {"fault": fault, "rank": layout.rank}
        try:
            run.train(load_train_config(flags), layout)
        except PretrainError as error:
            ending["error"] = f"{type(error).__name__}: {error}"
        os.write(1, f"\n{json.dumps(ending)}\n".encode())  # at once, so that processes do not write into each other's
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
