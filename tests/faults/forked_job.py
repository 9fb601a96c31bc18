"""Jobs of several runs with a fault of `storage_faults` in each process; they start in a tenth of a second.

job = start_job([["num_steps=4", ...]], fault=("kill_in_save", 0, "shard", 2))     # 2 processes, gloo on a CPU
wait(job) -> [Ended(status, output), Ended(status, output)]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import ForkedProcess, start_forked
from helpers import PATIENCE_SECONDS, free_ports
from training_runs import TINY

WORKER = Path(__file__).with_name("storage_faults.py")
Fault = tuple[Any, ...]  # name of a function of `storage_faults`, and its arguments
Job = list[ForkedProcess]


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: exit status of its last run; negative: the signal that ended it.
        output: what it printed.
    """

    status: int | None
    output: str


def start_job(runs: Sequence[Sequence[str]], processes: int = 2, fault: Fault | None = None) -> Job:
    """Starts a job that trains several runs one after the other, whatever comes of each.

    Args:
        runs: arguments of `pretrain train` on top of `TINY`; those of made-up data where no data is named.
        processes: how many.
        fault: what goes wrong.
    """
    lines = []
    for run in runs:
        data = [] if any(flag.startswith("data_path=") for flag in run) else ["use_dummy_dataset=true"]
        lines.append([*TINY, "num_workers=0", *run, *data])
    jobs = list(zip(free_ports(len(lines)), lines, strict=True))
    return start_forked(WORKER, processes, [json.dumps([fault, jobs])])


def wait(job: Job) -> list[Ended]:
    """Returns how each rank ended; those that take too long are killed and fail the test."""
    try:
        outputs = [process.communicate(PATIENCE_SECONDS)[0] for process in job]
    finally:
        kill(job)
    return [Ended(process.returncode, output) for process, output in zip(job, outputs, strict=True)]


def kill(job: Job) -> None:
    """Ends what is left."""
    for process in job:
        process.kill()


def run_job(
    runs: Sequence[Sequence[str]], processes: int = 2, fault: Fault | None = None, check: bool = True
) -> list[Ended]:
    """Runs a job to its end; `check`: fail the test unless every process ends with status 0."""
    ended = wait(start_job(runs, processes, fault))
    if check:
        assert [process.status for process in ended] == [0] * processes, "\n".join(each.output for each in ended)
    return ended
