"""Jobs of several processes that take a tenth of a second to start: forked from a server that has imported everything.

    job = start_job(folder, [["num_steps=4", ...]], fault=("kill_at_write", 3))     # 2 processes, gloo on a CPU
    job.wait() -> [Ended(status, output), Ended(status, output)]

A fault is a function of `storage_faults`, by name, that each process calls before it trains; what it does is real: a
process is killed, a write fails, a disk is full.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forked import fork_context
from helpers import PATIENCE_SECONDS, free_ports
from training_runs import TINY

Fault = tuple[Any, ...]  # name of a function of `storage_faults`, and its arguments


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: exit status of its last run; negative: the signal that ended it.
        output: what it printed.
    """

    status: int
    output: str


@dataclass(frozen=True)
class Job:
    """Processes that train; wait for them with `wait`."""

    processes: list[BaseProcess]
    logs: list[Path]

    def wait(self) -> list[Ended]:
        """How each rank ended; those that take too long are killed and fail the test."""
        ended = []
        try:
            for process, log in zip(self.processes, self.logs, strict=True):
                process.join(PATIENCE_SECONDS)
                assert process.exitcode is not None, f"still running after {PATIENCE_SECONDS:.0f} s:\n{log.read_text()}"
                ended.append(Ended(process.exitcode, log.read_text()))
        finally:
            self.kill()
        return ended

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self) -> None:
        """Ends what is left."""
        for process in self.processes:
            process.kill()
            process.join()


def start_job(
    folder: Path, runs: Sequence[Sequence[str]], processes: int = 2, fault: Fault | None = None, name: str = "job"
) -> Job:
    """Starts a job that trains several runs one after the other, whatever comes of each.

    Args:
        folder: for what the processes print.
        runs: arguments of `pretrain train` on top of `TINY`; those of made-up data where no data is named.
        processes: how many.
        fault: what goes wrong.
        name: of the job, in case there are several.
    """
    context = fork_context()
    common = [*TINY, "num_workers=0"]
    lines = [[*common, *run] for run in runs]
    lines = [[*line, *([] if _names_data(line) else ["use_dummy_dataset=true"])] for line in lines]
    ports = free_ports(len(runs))
    logs = [folder / f"{name}-{rank}.log" for rank in range(processes)]
    children = [
        context.Process(target=_work, args=(rank, processes, ports, lines, fault, log), name=f"{name}-{rank}")
        for rank, log in enumerate(logs)
    ]
    for child in children:
        child.start()
    return Job(list(children), logs)


def run_job(
    folder: Path,
    runs: Sequence[Sequence[str]],
    processes: int = 2,
    fault: Fault | None = None,
    check: bool = True,
    name: str = "job",
) -> list[Ended]:
    """Runs a job to its end; `check`: fail the test unless every process ends with status 0."""
    ended = start_job(folder, runs, processes, fault, name).wait()
    if check:
        assert [process.status for process in ended] == [0] * processes, "\n".join(each.output for each in ended)
    return ended


def _names_data(line: Sequence[str]) -> bool:
    return any(argument.startswith("data_path=") for argument in line)


def _work(rank: int, world_size: int, ports: list[int], runs: list[list[str]], fault: Fault | None, log: Path) -> None:
    """One process of a job."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    import torch

    from pretraining.cli import main

    torch.set_num_threads(1)
    if fault is not None:
        getattr(importlib.import_module("faults.storage_faults"), fault[0])(*fault[1:])
    status: Any = 0
    for port, arguments in zip(ports, runs, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        print(f"--- {json.dumps(arguments)}", flush=True)
        try:
            main(["train", *arguments])
            status = 0
        except SystemExit as ending:
            status = ending.code
            print(f"--- status {status}", flush=True)
    sys.exit(status)
