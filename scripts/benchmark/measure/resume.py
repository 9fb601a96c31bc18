"""Seconds from kill -9 to the end of the new process's first step; a part of `checkpoints.py`.

A run is killed soon after a checkpoint is there. Its successor starts at once, finds the checkpoint (in the file cache,
as on a machine that stays up), compares every checksum, loads it, and trains a step.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pretraining.checkpoint.manifest import committed_checkpoints
from scripts.benchmark.common import in_turn, print_table
from scripts.benchmark.measure.startup import PHASES, start

LOOK_SECONDS = 0.02


def measure(folder: Path, settings: Sequence[str], kills: int) -> None:
    """Kills and resumes a run again and again, and prints where the time goes.

    Args:
        folder: of the runs.
        settings: of training, as name=value.
        kills: that count; one more warms up.
    """
    folder.mkdir()
    resumed = [_kill_and_resume(folder / str(number), settings) for number in in_turn(range(kills + 1))][1:]
    rows = [(text, f"{statistics.median(run[phase] for run in resumed):.2f}") for phase, text in PHASES.items()]
    totals = [sum(run.values()) for run in resumed]
    rows.append(("from the kill until the first step is done", f"{statistics.median(totals):.2f}"))
    print_table(("after kill -9", "seconds"), rows)
    print(f"\nmedian of {kills} kills; in all {min(totals):.2f} to {max(totals):.2f}", flush=True)


def _kill_and_resume(run: Path, settings: Sequence[str]) -> dict[str, float]:
    """Seconds of each phase, the first from the kill on."""
    own = [*settings, "num_steps=1000000", "checkpoint_interval=5", "keep_last=2", f"ckpt_save_path={run}"]
    command = [sys.executable, "-c", "from pretraining.cli import main; main()", "train", *own]
    with run.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log)
        try:
            while not committed_checkpoints(run):
                if process.poll() is not None:
                    sys.exit("the run to be killed has ended by itself: its error stands above")
                time.sleep(LOOK_SECONDS)
        finally:
            process.kill()
            killed = time.time()
            process.wait()
    return start(own, since=killed)
