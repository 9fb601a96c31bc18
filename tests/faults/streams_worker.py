"""`pretrain train` as a program whose streams or keyboard do what its first argument says; the rest are its flags."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO

import torch

from pretraining.cli import main
from pretraining.data.batch import StepBatch
from pretraining.launch.program import run_as_program
from pretraining.observability.step_outcome import StepOutcome
from pretraining.train import loop
from pretraining.train.step import StepContext


def replace(descriptor: int, stream: TextIO | None) -> None:
    """Gives Python what it would have made of a stream at the start of the process."""
    if descriptor == 1:
        sys.stdout = sys.__stdout__ = stream  # type: ignore[assignment, misc]
    else:
        sys.stderr = sys.__stderr__ = stream  # type: ignore[assignment, misc]


def gone(descriptor: int) -> None:
    """Makes a stream a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(reading)
    os.close(writing)
    replace(descriptor, os.fdopen(descriptor, "w", closefd=False))


def both_gone() -> None:
    """As in `2>&1 | head -1`."""
    gone(1)
    gone(2)


def full(descriptor: int) -> None:
    """Makes a stream a file on a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    replace(descriptor, os.fdopen(descriptor, "w", closefd=False))


def closed(descriptor: int) -> None:
    """Closes a stream, as `2>&-` does: Python has none then, and the next file gets its number."""
    os.close(descriptor)
    replace(descriptor, None)


def interrupted(times: int) -> None:
    """Ctrl-C in the third step."""
    train_step = loop.train_step

    def wrapped(context: StepContext, batch: StepBatch, step: int) -> StepOutcome:
        if step == 2:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return train_step(context, batch, step)

    loop.train_step = wrapped


FAULTS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "stdout gone": lambda: gone(1),
    "stdout full": lambda: full(1),
    "stdout closed": lambda: closed(1),
    "stderr closed": lambda: closed(2),
    "both gone": both_gone,
    "Ctrl-C": lambda: interrupted(1),
    "Ctrl-C twice": lambda: interrupted(2),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    FAULTS[sys.argv[1]]()
    run_as_program(lambda: main(["train", *sys.argv[2:]]))
