"""Jobs in which something goes wrong (tests/faults/faulty_worker.py), and what became of them.

    ended = train([*EIGHT_STEPS, "ckpt_save_path=…"], (1, "in_step", 4, "SIGTERM"))      # 2 processes, gloo on a CPU
    ended[0].status, ended[0].stdout

A fault is the rank that has it, or ALL; a function of the worker; and its arguments.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import ForkedProcess, start_forked
from helpers import PATIENCE_SECONDS, ROOT, free_ports
from training_runs import TINY

WORKER = ROOT / "tests" / "faults" / "faulty_worker.py"
ALL = "all"
END = re.compile(r"\n--- run \d+: (\d+)\n")
Fault = tuple[Any, ...]
FaultyRun = tuple[Sequence[str], Sequence[Fault]]

# Eight steps, an evaluation every third one and at the end; nothing is saved before the end unless a run says so.
EIGHT_STEPS = [
    *("num_steps=8", "checkpoint_interval=0"),
    *("held_out_fraction=0.1", "eval_interval=3", "eval_batches=5", "save_best=false"),
]


@dataclass(frozen=True)
class Ended:
    """How a run ended in a process.

    Attributes:
        status: exit status; negative: the signal that ended it.
    """

    status: int | None
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def job(runs: Sequence[FaultyRun]) -> str:
    """The worker's argument for runs: flags on top of `TINY`, with made-up data where none is named, and faults."""
    jobs = []
    for port, (flags, faults) in zip(free_ports(len(runs)), runs, strict=True):
        data = [] if any("data_path=" in flag for flag in flags) else ["use_dummy_dataset=true"]
        jobs.append((port, faults, [*TINY, "batch_size=2", *data, *flags]))
    return json.dumps(jobs)


def start(flags: Sequence[str], *faults: Fault, processes: int = 2) -> list[ForkedProcess]:
    """Start a run as processes that nobody ends when one of them does."""
    return start_forked(WORKER, processes, [job([(flags, faults)])])


def wait(started: Sequence[ForkedProcess]) -> list[Ended]:
    """Return how each process ended; those that take too long are killed and fail the test."""
    try:
        outputs = [process.communicate(PATIENCE_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    return [Ended(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def train(flags: Sequence[str], *faults: Fault, processes: int = 2, status: int | None = 0) -> list[Ended]:
    """Run a job of one run to its end; unless `status` is None, every process has to end with it."""
    ended = wait(start(flags, *faults, processes=processes))
    if status is not None:
        assert {each.status for each in ended} == {status}, "\n".join(each.output for each in ended)
    return ended


def train_each(runs: Sequence[FaultyRun], processes: int = 2) -> list[list[Ended]]:
    """Train several runs in one job, whatever becomes of each; return how each ended in every process."""
    assert len(runs) > 1
    processes_ended = wait(start_forked(WORKER, processes, [job(runs)]))
    assert {each.status for each in processes_ended} == {0}, "\n".join(each.output for each in processes_ended)
    of_ranks = []
    for process in processes_ended:
        stdout, stderr = (END.split(text) for text in (process.stdout, process.stderr))  # text, status, text, …
        of_ranks.append([Ended(int(stdout[n + 1]), stdout[n], stderr[n]) for n in range(0, 2 * len(runs), 2)])
    return [list(of_run) for of_run in zip(*of_ranks, strict=True)]


def batches_of(notes: Path) -> dict[int, list[int]]:
    """Checksums of the rows of each step, rank after rank, of the last attempt that made the step."""
    attempts: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(notes.iterdir()):
        attempt, rank = map(int, path.name.split("."))
        for step, rows in map(json.loads, path.read_text().splitlines()):
            attempts[step][attempt][rank] = rows
    return {step: [row for rank in made[max(made)].values() for row in rank] for step, made in sorted(attempts.items())}
