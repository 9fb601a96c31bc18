"""One process of a job whose storage fails: reads a fault and the (port, flags) of each run as JSON.

A fault is a function of this module, by name, with its arguments; every process calls it before the first run. What it
does is real: a process is killed, a write fails, a file is cut.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pretraining import files, object_store
from pretraining.checkpoint import copies, manager, mirror, saver, writer
from pretraining.checkpoint.manager import CheckpointManager
from pretraining.checkpoint.manifest import ChecksummedFile
from pretraining.cli import main
from pretraining.data import dataset
from pretraining.data.samples import Samples
from pretraining.data.sampling.token_stream import Spans
from pretraining.errors import DataError
from pretraining.train import loop


def _rank() -> int:
    return int(os.environ["RANK"])


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work_in_own_folder(root: str) -> None:
    """Each rank works in a folder of its own, as on a node with its own disk."""
    os.chdir(Path(root, str(_rank())))


def kill_in_save(rank: int, place: str, number: int) -> None:
    """SIGKILL this rank in its save with this number, counted from 1.

    Places: `shard`, when half a file is written; `manifest`, before it; `commit`, before the checkpoint gets its name;
    `retention`, after that and before anything older is removed.
    """
    if _rank() != rank:
        return

    def prepare(more: dict[str, Any]) -> None:
        if place == "shard":
            write = ChecksummedFile.write

            def half(self: ChecksummedFile, content: memoryview) -> None:
                write(self, content[: len(content) // 2])
                _die()

            ChecksummedFile.write = half  # type: ignore[method-assign,assignment]
        elif place == "manifest":
            writer.write_flushed = _die
        elif place == "commit":
            more["lease"] = SimpleNamespace(check=_die)
        else:
            assert place == "retention"
            saver.apply_retention = _die

    _before_save(number, prepare)


def kill_while_writing_beside_the_training(rank: int, write: int, step: int) -> None:
    """Lets this rank's writes wait for ever from one save on, and SIGKILL it at a later step."""
    if _rank() != rank:
        return

    def hang(_: dict[str, Any]) -> None:
        ChecksummedFile.write = lambda *_: threading.Event().wait()  # type: ignore[method-assign]

    _before_save(write, hang)
    _at_step(step, _die)


def kill_in_upload(ranks: list[int], checkpoint: str) -> None:
    """SIGKILL these ranks when half a file of a checkpoint is sent to the mirror."""
    upload = copies.upload_file

    def half(store: object_store.Store, file: Path, name: str, *others: Any) -> None:
        if checkpoint in name and _rank() in ranks:
            threading.Timer(0.05, _die).start()
        upload(store, file, name, *others)
        if checkpoint in name and _rank() in ranks:
            threading.Event().wait()

    mirror.upload_file = half  # type: ignore[assignment,attr-defined]


def unreadable_samples(ranks: list[int]) -> None:
    """These ranks cannot read every fifth dummy sample, as on a node that has lost a file for a moment."""
    if _rank() not in ranks:
        return
    make = dataset.dummy_samples  # type: ignore[attr-defined]

    def failing(*arguments: Any) -> Samples:
        samples = make(*arguments)

        def spans(shards: np.ndarray, numbers: np.ndarray) -> Spans:
            if ((shards + numbers) % 5 == 0).any():
                raise DataError("Input/output error", path=Path("part-0.arrow"))
            return samples.spans(shards, numbers)

        return replace(samples, spans=spans)

    dataset.dummy_samples = failing  # type: ignore[attr-defined,assignment]


def preempt_with_wait(step: int, seconds: float) -> None:
    """SIGTERM at a step; the run waits this long for its last copy."""
    manager.PREEMPTED_SECONDS = seconds  # type: ignore[attr-defined]
    _at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def lose_mirror() -> None:
    """Let another start take the mirror over, before a checkpoint is complete there."""
    commit = mirror.Mirror._commit

    def late(self: mirror.Mirror, checkpoint: Path) -> None:
        self._store.write(mirror.MIRROR_FILE, [mirror._to_json(run="same", writer="another")])
        commit(self, checkpoint)

    mirror.Mirror._commit = late  # type: ignore[method-assign]


def fail_first_writes(count: int) -> None:
    """Fails the first writes of this process as a network file system does that has lost its server for a moment."""
    files.PAUSES_SECONDS = (0.01, 0.02, 0.04, 0.08)
    write, failures = ChecksummedFile.write, 0

    def flaky(self: ChecksummedFile, content: memoryview) -> int:
        nonlocal failures
        failures += 1
        if failures <= count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(self, content)

    ChecksummedFile.write = flaky  # type: ignore[method-assign]


def limit_file_size(limit_bytes: int) -> None:
    """Lets the system refuse larger files, as a quota does."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def wait_at_step(step: int, gate: str) -> None:
    """Tells that a step is reached, and waits; `gate` is a named pipe, opened for writing and then for reading."""

    def wait() -> None:
        with open(gate, "w"):  # noqa: PTH123
            pass
        with open(gate):  # noqa: PTH123
            pass

    if _rank() == 0:
        _at_step(step, wait)


def cut_after_step(step: int, path: str) -> None:
    """Truncates a file while the run goes on."""
    if _rank() == 0:
        _at_step(step, lambda: os.truncate(path, 300))


def keep_rows(path: str) -> None:
    """Notes a hash of every row that this process trains on, a line a step."""
    train_step = loop.train_step

    def noting(context: Any, batch: Any, step: int) -> Any:
        rows = []
        for micro_batch in batch.micro_batches:
            lengths = micro_batch.lengths_B
            for number, row in enumerate(micro_batch.tokens_BT):
                if lengths is None or lengths[number] > 0:
                    rows.append(hashlib.sha256(row.numpy().tobytes()).hexdigest())
        with Path(f"{path}.{_rank()}").open("a") as file:
            file.write(json.dumps([step, rows]) + "\n")
        return train_step(context, batch, step)

    loop.train_step = noting


def _before_save(number: int, prepare: Callable[[dict[str, Any]], None]) -> None:
    """Calls `prepare` ahead of the save with this number, with its keyword arguments."""
    saves, save_checkpoint = 0, saver.save_checkpoint

    def counted(*args: Any, **more: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == number:
            prepare(more)
        save_checkpoint(*args, **more)

    saver.save_checkpoint = counted


def _at_step(step: int, action: Callable[[], object]) -> None:
    maybe_save = CheckpointManager.maybe_save

    def watching(self: CheckpointManager, state: Any, evaluation_loss: float | None) -> None:
        maybe_save(self, state, evaluation_loss)
        if state.progress.steps == step:
            action()

    CheckpointManager.maybe_save = watching  # type: ignore[method-assign]


if __name__ == "__main__":
    os.dup2(1, 2)  # one text, in the order in which it was written
    torch.set_num_threads(1)
    fault, runs = json.loads(sys.argv[1])
    if fault is not None:
        globals()[fault[0]](*fault[1:])
    status: Any = 0
    for port, flags in runs:
        os.environ["MASTER_PORT"] = str(port)
        print(f"--- {json.dumps(flags)}", flush=True)
        try:
            main(["train", *flags])
            status = 0
        except SystemExit as ending:
            status = ending.code
            print(f"--- status {status}", flush=True)
    sys.exit(status)
