"""Reads batches ahead with threads in a process that is killed again and again, and goes on from its last state.

    python killed_reader.py <data_path> <folder> <steps> <lives: JSON [[threads, steps before the kill], …]>

Each life is a forked process. It appends a line (step, digest of the batch) to <folder>/log and then replaces
<folder>/state.json, as a run that saves at every step. Once it has told of so many steps it is killed, wherever it is
then, at most `STEPS_BEYOND` steps on. A life that is given enough steps comes to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from unit.data.token_files import opened, plan, rows

from pretraining.config.training import DataConfig
from pretraining.data.dataset import build_loader

CONFIG = DataConfig(seq_length=24, sep_token=999, logical_shards=4, held_out_fraction=0.1)
BATCH, SEED = 7, 5
STEPS_BEYOND = 2


def digest(batch: list[list[int]]) -> str:
    return hashlib.blake2b(json.dumps(batch).encode(), digest_size=8).hexdigest()


def live(data_path: str, folder: Path, steps: int, workers: int, allowed: int, told: int) -> None:
    """Runs to the end, or as far as it may: a byte from one pipe for each step, a byte to the other after it."""
    config = replace(CONFIG, data_path=data_path, num_workers=workers)
    saved, log = folder / "state.json", os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with build_loader(opened(config), config, plan(BATCH), 0, SEED, 1000) as loader:
        if saved.exists():
            loader.load_state_dict(json.loads(saved.read_text()))
        while loader.next_step < steps and os.read(allowed, 1):
            step = loader.next_step
            os.write(log, f"{step} {digest(rows(next(loader)))}\n".encode())
            aside = folder / "state.json.tmp"
            aside.write_text(json.dumps(loader.state_dict()))
            aside.replace(saved)
            os.write(told, b".")


def main(data_path: str, folder: str, steps: str, lives: str) -> None:
    for workers, count in json.loads(lives):
        (allowed, allow), (heard, told) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(heard)
            os.close(allow)
            try:
                live(data_path, Path(folder), int(steps), workers, allowed, told)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(told)
        os.write(allow, bytes(count + STEPS_BEYOND))
        if all(os.read(heard, 1) for _ in range(count)):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        for end in (allowed, allow, heard):
            os.close(end)
        print("killed" if os.WIFSIGNALED(status) else f"ended with {os.WEXITSTATUS(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
