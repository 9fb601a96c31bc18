"""A job of `soak.py`: processes that train, a shot at them, and what it hit.

    Job(logs, settings) -> fire(shot): waits for its moment, kills -> await_end: exit codes

The processes are forked from one that has imported everything, so a start takes half a second.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from pretraining.checkpoint.manifest import BEST, CHECKPOINTS, UNFINISHED_SUFFIX
from pretraining.launch.layout import free_port

POLL_SECONDS = 0.001
STEP_NAME = re.compile(r"step_(\d+)_ckp")
REPORTED_STEP = re.compile(r"^step (\d+)/", re.MULTILINE)


@dataclass(frozen=True)
class Shot:
    """A kill to come.

    Attributes:
        whom: "rank" or "all" are hit by SIGKILL, "term" is SIGTERM to a rank.
        rank: that is hit, where it is not all.
        event: what it waits for: "start-up", a "step" that is reported, a "save" that begins, a "commit".
        count: how many of them in this start.
        delay_seconds: from then on.
    """

    whom: str
    rank: int
    event: str
    count: int
    delay_seconds: float


@dataclass(frozen=True)
class View:
    """What can be seen of a run from outside.

    Attributes:
        committed: names of checkpoints.
        unfinished: those of folders that are being written or removed, or that a kill has left so.
        steps: those that this start has reported, in their order.
    """

    committed: frozenset[str]
    unfinished: frozenset[str]
    steps: tuple[int, ...]

    @staticmethod
    def of(run: Path, log: Path | None = None) -> View:
        """How it is now; `log` is that of the start's rank 0."""
        folder = run / CHECKPOINTS
        names = frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()
        names -= {BEST, BEST + UNFINISHED_SUFFIX}
        unfinished = frozenset(name for name in names if name.endswith(UNFINISHED_SUFFIX))
        text = log.read_text() if log is not None and log.exists() else ""
        return View(names - unfinished, unfinished, tuple(int(step) for step in REPORTED_STEP.findall(text)))

    @property
    def newest(self) -> int:
        """The highest committed step; 0 where there is none."""
        return max((step_of(name) for name in self.committed), default=0)

    def has_happened(self, shot: Shot, begun: View, last_step: int) -> bool:
        """Whether a shot's event is over.

        Args:
            shot: that waits.
            begun: what the start has found.
            last_step: of the run; with its save the last event is over, however many were to come.
        """
        if shot.event == "start-up":
            return True
        if shot.event == "step":
            return len(self.steps) >= shot.count
        written = self.committed | (self.unfinished if shot.event == "save" else frozenset())
        new = [step for name in written - begun.unfinished if (step := step_of(name)) > begun.newest]
        return len(new) >= shot.count or last_step in new


class Job:
    """The processes of one start; end them with `close`.

    Args:
        run: folder of the run.
        logs: a file for each process's output.
        settings: of training, `name=value`.
        limit_seconds: past them, nothing is waited for: it hangs.
    """

    def __init__(self, run: Path, logs: list[Path], settings: list[str], limit_seconds: float = math.inf) -> None:
        self._limit = time.monotonic() + limit_seconds
        self._run, self._log, self._begun = run, logs[0], View.of(run)
        context = multiprocessing.get_context("forkserver")
        # The last one is imported at some later point of every run, and takes longer than all the rest.
        context.set_forkserver_preload([__name__, "pretraining.train.run", "pyarrow", "torch._dynamo"])
        port = free_port()
        self._processes: list[BaseProcess] = [
            context.Process(target=_train, args=(rank, len(logs), port, log, settings), daemon=True)
            for rank, log in enumerate(logs)
        ]
        for process in self._processes:
            process.start()

    def look(self) -> View:
        """How the run is now."""
        return View.of(self._run, self._log)

    def wait_for(self, happened: Callable[[View], bool]) -> bool:
        """Waits until something is to be seen; False where the processes ended before, or hang."""
        while any(process.is_alive() for process in self._processes) and time.monotonic() < self._limit:
            if happened(self.look()):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def fire(self, shot: Shot, last_step: int) -> bool:
        """Kill at a shot's moment; return whether there was anybody left to hit."""
        if not self.wait_for(lambda view: view.has_happened(shot, self._begun, last_step)):
            return False
        time.sleep(shot.delay_seconds)
        if not any(process.is_alive() for process in self._processes):
            return False
        for process in self._processes if shot.whom == "all" else [self._processes[shot.rank]]:
            if shot.whom == "term":
                process.terminate()
            else:
                process.kill()
        return True

    def await_end(self, patience_seconds: float = math.inf) -> list[int]:
        """Return exit codes; a process that does not end within that time is killed."""
        deadline = min(time.monotonic() + patience_seconds, self._limit)
        for process in self._processes:
            process.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        self.close()
        return [process.exitcode or 0 for process in self._processes]

    def close(self) -> None:
        """Leaves no process behind."""
        for process in self._processes:
            process.kill()
            process.join()


def step_of(name: str) -> int:
    """The step in a checkpoint's name, whether it is committed or not; -1 without one."""
    match = STEP_NAME.match(name)
    return int(match.group(1)) if match else -1


def _train(rank: int, world_size: int, port: int, log: Path, settings: list[str]) -> None:
    """A process of the run, as a launcher would start it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that kills
    import torch

    from pretraining.cli import main

    torch.set_num_threads(1)
    main(["train", *settings])
