"""One process of a job of several runs, in which something goes wrong: reads [port, faults, flags] of each as JSON.

A fault is [ranks, name, arguments]: a function of this module that returns a context around the run, or None. What it
does is real: signals are sent at the very place that a test is about, processes are killed, writes fail, files are cut.
A job of one run is the program `pretrain train`; of several, each prints lines that `faulty_runs` reads.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from pretraining import cli, files, object_store
from pretraining.checkpoint import copies, lease, manager, mirror, saver, writer
from pretraining.checkpoint.stored_files import ChecksummedFile
from pretraining.data import dataset
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.data.batch_reader import BatchReader
from pretraining.data.loader import Loader
from pretraining.data.samples import Samples
from pretraining.data.sampling.token_stream import Spans
from pretraining.distributed.grad_norm import local_part
from pretraining.errors import DataError
from pretraining.launch.program import run_as_program
from pretraining.observability import stragglers
from pretraining.train import loop, opening, preemption, run
from pretraining.train.step import StepContext

RANK = os.environ["RANK"]
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
Context = AbstractContextManager[Any]


# What happens


def act(what: str) -> None:
    """Signals to this process, by name, or to the launcher that started it; or one of the others."""
    for each in what.split(" and "):
        if each.startswith("SIG"):
            name, _, receiver = each.partition(" ")
            os.kill(os.getppid() if receiver else os.getpid(), signal.Signals[name])
        else:
            OTHERS[each]()


def hang() -> None:
    os.write(1, b"\nhangs\n")
    threading.Event().wait()


def lose_thread() -> None:
    """Kill this thread, as far as a thread can be."""
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))


OTHERS: dict[str, Callable[[], object]] = {"hang": hang, "bug": lambda: 1 / 0, "lost thread": lose_thread}


# When


def before(place: Any, name: str, action: Callable[..., object]) -> Context:
    """Call a function ahead of another one, with its arguments."""
    original = getattr(place, name)

    def both(*arguments: Any, **more: Any) -> Any:
        action(*arguments)
        return original(*arguments, **more)

    return patch.object(place, name, both)


@contextmanager
def at_steps(
    steps: Iterable[int], add_hooks: Callable[[StepContext], list[Any] | None], time: int | None = None
) -> Iterator[None]:
    """Hooks during steps, counted from 1; with a `time`, only when the run comes to the step for this time."""
    train_step, times = loop.train_step, Counter[int]()

    def hooked(context: StepContext, batch: StepBatch, done: int) -> Any:
        times[done + 1] += 1
        is_now = done + 1 in steps and time in (None, times[done + 1])
        hooks = (add_hooks(context) if is_now else None) or []
        try:
            return train_step(context, batch, done)
        finally:
            for hook in hooks:
                hook.remove()

    with patch.object(loop, "train_step", hooked):
        yield


def in_step(step: int, what: str, time: int = 1) -> Context:
    """In the middle of a step, when its backward pass begins."""
    return at_steps(
        [step], lambda context: [context.model.module.register_full_backward_pre_hook(lambda *_: act(what))], time
    )


def in_step_at_first(step: int, what: str) -> Context | None:
    """The same, but not once torchrun has restarted the job."""
    return in_step(step, what) if ATTEMPT == "0" else None


def in_evaluation(what: str) -> Context:
    """In the second batch of the first evaluation."""
    batches = count(1)
    return before(
        MicroBatch, "model_inputs", lambda _: act(what) if not torch.is_grad_enabled() and next(batches) == 2 else None
    )


@contextmanager
def in_data_wait(step: int, what: str) -> Iterator[None]:
    """In the read of the batch of a step, counted from 1, while the training thread waits for it."""
    asked = threading.Event()

    def read(_: BatchReader, done: int) -> None:
        if done + 1 == step:
            asked.wait()
            act(what)

    def take(loader: Loader) -> None:
        if loader.next_step + 1 == step:
            asked.set()

    with before(BatchReader, "read", read), before(Loader, "__next__", take):
        yield


def in_fetch(number: int, what: str) -> Context:
    """In a fetch of data from an object store, counted from 1, when its bytes are there but not yet used."""
    fetches, read_at = count(1), object_store.Store.read_at

    def read(store: Any, name: str, file: Any, begin: int, size: int) -> bytes:
        content = read_at(store, name, file, begin, size)
        if threading.current_thread().name.startswith("fetch") and next(fetches) == number:
            act(what)
        return content

    return patch.object(object_store.Store, "read_at", read)


def in_setup(what: str) -> Context:
    """While the run is put together."""
    return before(opening, "open_data", lambda *_: act(what))


@contextmanager
def in_save(number: int, place: str, what: str) -> Iterator[None]:
    """In a save, counted from 1.

    Places: `shard`, when half a file is written; `flush`, when a file is; `manifest`, before it is written; `commit`,
    before the checkpoint gets its name; `retention`, after that and before anything older is removed.
    """
    write, saves = ChecksummedFile.write, count(1)

    def half(file: ChecksummedFile, content: memoryview) -> None:
        write(file, content[: len(content) // 2])
        act(what)

    places = {
        "shard": patch.object(ChecksummedFile, "write", half),
        "flush": before(os, "fsync", lambda _: act(what)),
        "manifest": before(writer, "write_flushed", lambda *_: act(what)),
        "retention": before(saver, "apply_retention", lambda *_: act(what)),
    }
    save_checkpoint = saver.save_checkpoint
    with ExitStack() as stack:

        def save(*arguments: Any, **more: Any) -> None:
            if next(saves) == number:
                if place == "commit":
                    more["lease"] = SimpleNamespace(check=lambda: act(what))
                else:
                    stack.enter_context(places[place])
            save_checkpoint(*arguments, **more)

        stack.enter_context(patch.object(saver, "save_checkpoint", save))
        yield


def in_upload(checkpoint: str, what: str) -> Context:
    """When half a file of a checkpoint is sent to the mirror, and never the rest."""
    upload = copies.upload_file

    def half(store: Any, file: Path, name: str, *others: Any) -> None:
        if checkpoint in name:
            threading.Timer(0.05, act, [what]).start()
        upload(store, file, name, *others)
        if checkpoint in name:
            threading.Event().wait()

    return patch.object(mirror, "upload_file", half)


# What is wrong with the model


def spoil_objective(first: int, last: int, change: str, time: int | None = None) -> Context:
    """The model finds another objective in some steps; what is added leaves the gradients as they are."""
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plus NaN": lambda objective: objective + torch.nan,
        "times NaN": lambda objective: objective * torch.nan,
        "overflow": lambda objective: objective * 1e30 * 1e30,
        "tenfold": lambda objective: objective * 10,
    }

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        return output._replace(objective_sum=changes[change](output.objective_sum))

    return at_steps(range(first, last + 1), lambda context: [context.model.module.register_forward_hook(spoil)], time)


def in_norm(step: int, change: str) -> Context:
    """A gradient overflows in the middle of the backward pass, or the forward pass runs out of memory."""

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if change == "out of memory":
            return output + torch.empty(1 << 55, dtype=torch.uint8)
        output.register_hook(lambda gradient: gradient * torch.inf)
        return output

    def add_hook(context: StepContext) -> list[Any]:
        model: Any = context.model.module
        return [model.model.norm.register_forward_hook(spoil)]

    return at_steps([step], add_hook)


def learning_rate_explodes(step: int) -> Context:
    """The learning rate is 100, the first time that the run comes to the step."""

    def explode(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 100.0

    return at_steps([step], lambda context: [context.optimizer.register_step_pre_hook(explode)], time=1)


def flip_weight_bit(step: int) -> Context:
    """One bit of one weight flips before a step."""

    def flip(context: StepContext) -> None:
        weights: Any = next(iter(context.model.parameters.values()))
        local_part(weights).detach().view(-1).view(torch.int32)[5] ^= 1 << 3

    return at_steps([step], flip)


def slow_steps() -> Context:
    """Every step takes a tenth of a second more."""
    return before(loop, "train_step", lambda *_: time.sleep(0.1))


def look_for_stragglers_often() -> Context:
    """Looks are so many that a short run is enough."""
    return patch.object(stragglers, "PERIOD_SECONDS", 0.01)


# What is wrong with storage


def fail_first_writes(number: int) -> Context:
    """The first writes fail as those of a network file system do that has lost its server for a moment."""
    files.PAUSES_SECONDS = (0.01, 0.02, 0.04, 0.08)
    writes = count(1)

    def fail(*_: Any) -> None:
        if next(writes) <= number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return before(ChecksummedFile, "write", fail)


def limit_file_size(limit_bytes: int) -> None:
    """The system refuses larger files, as a quota does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def work_in_own_folder(root: str) -> None:
    """Each rank works in a folder of its own, as on a node with its own disk."""
    lease.SHARED_SECONDS = 1
    os.chdir(Path(root, RANK))


def unreadable_samples() -> Context:
    """Every fifth dummy sample cannot be read, as on a node that has lost a file for a moment."""
    make = dataset.dummy_samples  # type: ignore[attr-defined]

    def failing(*arguments: Any) -> Samples:
        samples = make(*arguments)

        def read(spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
            if (spans.documents % 5 == 0).any():
                raise DataError("Input/output error", path=Path("part-0.arrow"))
            samples.read(spans, target, rows)

        return replace(samples, read=read)

    return patch.object(dataset, "dummy_samples", failing)


def lose_mirror() -> Context:
    """Another start takes the mirror over, before a checkpoint is complete there."""

    def lose(of: mirror.Mirror, _: Path) -> None:
        of._store.write(mirror.MIRROR_FILE, [mirror._to_json(run="same", writer="another")])

    return before(mirror.Mirror, "_commit", lose)


def wait_for_copies_at_most(seconds: float) -> Context:
    """A preempted run waits this long for its last copy."""
    return patch.object(manager, "PREEMPTED_SECONDS", seconds)


# What is wrong with streams, launchers and time


def make_stream(descriptor: int, kind: str) -> None:
    """A stream that nobody reads any more, on a full disk, or closed, as `2>&-` does: Python has none then."""
    if kind == "gone":
        reading, writing = os.pipe()
        os.dup2(writing, descriptor)
        os.close(reading)
        os.close(writing)
    elif kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    else:
        os.close(descriptor)
    stream = None if kind == "closed" else os.fdopen(descriptor, "w", closefd=False)
    name = ("stdout", "stderr")[descriptor - 1]
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def wait_at_step(step: int, gate: str) -> Context:
    """Tell that a step is reached, and wait; `gate` is a named pipe, opened for writing and then for reading."""

    def wait(_: StepContext) -> None:
        for mode in "wr":
            Path(gate).open(mode).close()

    return at_steps([step], wait)


def wait_for_company() -> None:
    """Where this is the first machine of a job that another one is to join, wait for torchrun to start all anew."""
    if (os.environ["WORLD_SIZE"], ATTEMPT) == ("1", "0"):
        signal.pause()


def time_limit_is_near() -> Context:
    """A clock that ticks when it is looked at: three times before training."""
    make = preemption.make_stop_requests

    def counting(*arguments: Any) -> preemption.StopRequests:
        return replace(make(*arguments), deadline=4, clock=count().__next__)

    return patch.object(preemption, "make_stop_requests", counting)


def fail_alone(of: str) -> Context:
    """One rank fails with a collective under way that the other one never joins."""

    def fail(*_: Any) -> None:
        if of != RANK:
            dist.recv(torch.ones(1), src=int(of))
        atexit.register(threading.Event().wait)  # as what waits for the others at the end of a program
        dist.all_reduce(torch.ones(1), async_op=True)
        error = DataError("a file of this machine is gone")
        error.rank = int(of)
        raise error

    return before(run, "build_run", fail)


def note_batches(folder: str) -> Context:
    """Every row that is trained on is noted: a line of JSON per step, with the checksums of the rows' tokens."""

    def note(context: StepContext, batch: StepBatch, done: int) -> None:
        rows = []
        for each in batch.micro_batches:
            lengths = each.lengths_B if each.lengths_B is not None else torch.ones(len(each.tokens_BT))
            for row, length in zip(each.tokens_BT.long().numpy(), lengths, strict=True):
                rows += [crc32(row.tobytes())] if length else []
        with Path(folder, f"{ATTEMPT}.{RANK}").open("a") as notes:
            notes.write(f"{json.dumps([done + 1, rows])}\n")

    return before(loop, "train_step", note)


def train(faults: list[list[Any]], flags: list[str]) -> None:
    """Train a run with its faults on this rank."""
    with ExitStack() as stack:
        for ranks, name, *arguments in faults:
            if ranks in ("all", int(RANK)) and (context := globals()[name](*arguments)) is not None:
                stack.enter_context(context)
        cli.main(["train", *flags])


def main() -> None:
    torch.set_num_threads(1)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        cli.HEAD_START = 0.2  # the exit of a process ends no other
    jobs = json.loads(sys.argv[1])
    if len(jobs) == 1:
        train(*jobs[0][1:])
    for number, (port, faults, flags) in enumerate(jobs if len(jobs) > 1 else ()):
        os.environ["MASTER_PORT"] = str(port)  # a run needs a meeting place of its own
        status: Any = 0
        try:
            train(faults, flags)
        except SystemExit as ending:
            status = ending.code
        print(f"\n--- run {number}: {status}", flush=True)
        print(f"\n--- run {number}: {status}", flush=True, file=sys.stderr)


if __name__ == "__main__":
    run_as_program(main)
