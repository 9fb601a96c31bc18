"""One process of a job of several runs, in each of which something happens to it: reads (port, fault, flags) as JSON.

A fault is a context of this module around a run. What each run came to is printed as a line of JSON. Signals are real
ones, which the process sends to itself at the very place that a test is about.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch

from pretraining.config.command_line import load_train_config
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.data.batch_reader import BatchReader
from pretraining.data.loader import Loader
from pretraining.errors import PretrainError
from pretraining.launch.layout import resolve_layout
from pretraining.launch.signals import ReceivedSignals
from pretraining.train import loop, run
from pretraining.train.preemption import StopRequests
from pretraining.train.run import train


def send(*numbers: signal.Signals) -> None:
    """Gets signals, as if somebody had sent them."""
    for number in numbers:
        os.kill(os.getpid(), number)


@contextmanager
def in_step(step: int, act: Callable[[], None]) -> Iterator[None]:
    """Does something in the middle of a step, counted from 1: when its backward pass begins."""
    train_step = loop.train_step

    def wrapped(context: Any, batch: StepBatch, done: int) -> Any:
        hooks = []
        if done + 1 == step:
            hooks.append(context.model.module.register_full_backward_pre_hook(lambda *_: act()))
        try:
            return train_step(context, batch, done)
        finally:
            for hook in hooks:
                hook.remove()

    with patch.object(loop, "train_step", wrapped):
        yield


@contextmanager
def in_evaluation(act: Callable[[], None]) -> Iterator[None]:
    """Does something in the second batch of the first evaluation."""
    model_inputs, evaluated = MicroBatch.model_inputs, []

    def wrapped(batch: MicroBatch) -> Any:
        if not torch.is_grad_enabled():
            evaluated.append(batch)
            if len(evaluated) == 2:
                act()
        return model_inputs(batch)

    with patch.object(MicroBatch, "model_inputs", wrapped):
        yield


@contextmanager
def in_data_wait(step: int, act: Callable[[], None]) -> Iterator[None]:
    """Does something while the training thread waits for the batch of a step, counted from 1."""
    read, take, asked = BatchReader.read, Loader.__next__, threading.Event()

    def reading(reader: BatchReader, done: int) -> StepBatch:
        if done + 1 == step:
            asked.wait()
            act()
        return read(reader, done)

    def taking(loader: Loader) -> StepBatch:
        if loader.next_step + 1 == step:
            asked.set()
        return take(loader)

    with patch.object(BatchReader, "read", reading), patch.object(Loader, "__next__", taking):
        yield


@contextmanager
def in_save(act: Callable[[], None]) -> Iterator[None]:
    """Does something each time that a file of a checkpoint is flushed."""
    fsync = os.fsync

    def wrapped(descriptor: int) -> None:
        act()
        fsync(descriptor)

    with patch.object(os, "fsync", wrapped):
        yield


@contextmanager
def in_setup(act: Callable[[], None]) -> Iterator[None]:
    """Does something while the run is put together."""
    open_data = run.open_data

    def wrapped(*arguments: Any, **more: Any) -> Any:
        act()
        return open_data(*arguments, **more)

    with patch.object(run, "open_data", wrapped):
        yield


def never_end() -> None:
    """Hangs, and says so."""
    print("hangs", flush=True)
    threading.Event().wait()


def fail() -> None:
    """A bug."""
    raise RuntimeError("division by cucumber")


@contextmanager
def both(first: Any, second: Any) -> Iterator[None]:
    """Two faults."""
    with first, second:
        yield


@contextmanager
def the_save_never_ends() -> Iterator[None]:
    """SIGTERM in step 4, and the save that follows hangs; those before are as always."""
    told = threading.Event()

    def tell() -> None:
        told.set()
        send(TERM)

    with in_step(4, tell), in_save(lambda: never_end() if told.is_set() else None):
        yield


@contextmanager
def batches_noted(rank: int) -> Iterator[None]:
    """Every row that is trained on is noted in $NOTES/<attempt>.<rank>: step and checksum of its tokens."""
    train_step = loop.train_step
    path = Path(os.environ["NOTES"]) / f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{rank}"

    def wrapped(context: Any, batch: StepBatch, done: int) -> Any:
        with path.open("a") as notes:
            for each in batch.micro_batches:
                lengths = each.lengths_B if each.lengths_B is not None else torch.ones(len(each.tokens_BT))
                for row, length in zip(each.tokens_BT.numpy(), lengths.tolist(), strict=True):
                    if length:
                        notes.write(f"{done + 1} {crc32(row.tobytes())}\n")
        return train_step(context, batch, done)

    with patch.object(loop, "train_step", wrapped):
        yield


def on_first_attempt(fault: Callable[[], Any]) -> Any:
    """A fault that torchrun's first restart does not have again."""
    return fault() if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else nullcontext()


@contextmanager
def loses_its_node() -> Iterator[None]:
    """SIGKILL in step 4 to this process and to the torchrun that started it."""

    def lose() -> None:
        os.kill(os.getppid(), KILL)
        send(KILL)

    with in_step(4, lose):
        yield


def wait_for_company() -> None:
    """Where this is the first machine of a job that another one is to join, wait for torchrun to start all anew."""
    if os.environ["WORLD_SIZE"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.pause()


TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL

# What happens to rank 1; to the others nothing does.
FAULTS: dict[str, Callable[[], Any]] = {
    "SIGTERM": lambda: in_step(4, lambda: send(TERM)),
    "SIGUSR1": lambda: in_step(4, lambda: send(USR1)),
    "SIGHUP": lambda: in_step(4, lambda: send(signal.SIGHUP)),
    "in the first step": lambda: in_step(1, lambda: send(TERM)),
    "in an evaluation": lambda: in_evaluation(lambda: send(TERM)),
    "in a wait for data": lambda: in_data_wait(2, lambda: send(TERM)),
    "before training": lambda: in_setup(lambda: send(TERM)),
    "in the save": lambda: both(in_step(4, lambda: send(TERM)), in_save(lambda: send(TERM, USR1))),
    "at the end of an evaluation's step": lambda: in_step(2, lambda: send(TERM)),
    "in the last step but one": lambda: in_step(7, lambda: send(TERM)),
    "killed": lambda: in_step(4, lambda: send(KILL)),
    "killed at first": lambda: on_first_attempt(lambda: in_step(4, lambda: send(KILL))),
    "fails": lambda: in_step(4, fail),
    "loses its node": loses_its_node,
    "its node is told to leave": lambda: in_step(4, lambda: os.kill(os.getppid(), TERM)),
    "the save never ends": the_save_never_ends,
}


def run_one(fault: str, flags: list[str]) -> int:
    """Trains a run with a fault, prints what it came to, and returns the exit code that it should have."""
    layout = resolve_layout(os.environ)
    requests = StopRequests(ReceivedSignals().listen())
    if fault == "time limit" and layout.rank == 1:  # a clock that ticks when it is looked at: twice before training
        requests = replace(requests, deadline=3, clock=count().__next__)
    context = FAULTS[fault]() if fault in FAULTS and layout.rank == 1 else nullcontext()
    if "NOTES" in os.environ:
        context = both(context, batches_noted(layout.rank))
    if "its node" in fault:
        wait_for_company()
    outcome: dict[str, Any] = {"fault": fault, "rank": layout.rank, "exit_code": 0, "said": ""}
    try:
        with context:
            train(load_train_config(flags), layout, requests)
    except PretrainError as error:
        outcome |= {"exit_code": error.exit_code, "said": str(error)}
    sys.stdout.write(f"\n{json.dumps(outcome)}\n")  # in one write, behind whatever line gloo has begun
    sys.stdout.flush()
    if outcome["exit_code"] == 1:
        sys.stderr.write(str(outcome["said"]))
        os._exit(1)
    exit_code: int = outcome["exit_code"]
    return exit_code


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = json.loads(sys.argv[1])
    if len(jobs) > 1:  # a run needs a meeting place of its own: the last one's holds the addresses of the last one
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, fault, flags in jobs:
        if len(jobs) > 1:
            os.environ["MASTER_PORT"] = str(port)
        exit_code = run_one(fault, flags)
    sys.stdout.flush()
    os._exit(exit_code if "PRETRAINING_STARTED_AT" in os.environ else 0)  # which scripts/torchrun.py sets
