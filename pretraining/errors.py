"""The errors that users see: what happened, where, and what to do about it.

Every entry point catches `PretrainError`, prints its text once and exits with the error's exit code; anything else is a
bug in this project and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PretrainError(Exception):
    """Base of all errors that a user can cause and mend.

    Args:
        text: what happened, and what to do.
        path: the file or folder that the error is about; the message begins with it.
        row: the document of that file.

    Attributes:
        rank: the one process that failed; None where several fail alike.
        is_everywhere: whether all processes of the job fail with it, so that one message is enough.
        exit_code: of a process that ends with it.
    """

    rank: int | None = None
    is_everywhere: bool = False
    exit_code: int = 1

    def __init__(self, text: str = "", *, path: str | Path | None = None, row: int | None = None) -> None:
        place = "" if path is None else f"{path}: " if row is None else f"{path}, row {row}: "
        super().__init__(place + text)
        self.path = None if path is None else Path(path)
        self.row = row

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that the message gives as flags, in its order."""
        return tuple(dict.fromkeys(re.findall(r"(?<!\S)[`'(]*--([a-z]\w*)", str(self))))


class ConfigError(PretrainError):
    """The settings cannot be trained with; carries every problem found, not only the first.

    Attributes:
        problems: one sentence each, naming the flag to change.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
            text = f"{len(self.problems)} problems in the configuration:\n{lines}"
        super().__init__(text)


class PathError(PretrainError):
    """The file system refuses a path; names it, and says why."""


class DataError(PretrainError):
    """A dataset is missing, damaged or not what was asked for; names file, row and sample where there is one."""


class CheckpointError(PretrainError):
    """A checkpoint cannot be written, or cannot be restored into this run."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not what was written; another checkpoint may be good."""


class LaunchError(PretrainError):
    """The processes of a job cannot find each other or their devices."""


class DivergenceError(PretrainError):
    """Training goes wrong, and going on would not mend it.

    Attributes:
        first_step, last_step: the updates that were left out in a row, numbered from 1.
        samples: (first, end) of what they would have trained on, as global indices.
    """

    def __init__(self, text: str, first_step: int, last_step: int, samples: tuple[int, int]) -> None:
        super().__init__(text)
        self.first_step, self.last_step, self.samples = first_step, last_step, samples


class HardwareError(PretrainError):
    """A device computes or remembers something else than it should."""


class OutOfMemoryError(PretrainError):
    """A device, or the machine, has too little memory for what the settings ask."""


class LostPeerError(LaunchError):
    """Another process of the job has ended, so this one cannot go on; the other one says why."""


class Preempted(PretrainError):
    """The run was told to end before it was done: no mistake, and the next start goes on.

    A run that keeps nothing ends with exit code 143 instead: nobody is to start it again.

    Attributes:
        reason: what asked for it, such as "SIGTERM".
        is_out_of_time: whether its time was nearly over, rather than that somebody wanted its place.
        result: what the run has come to (`TrainResult`); None where it ended before its first step.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later
    reason: str = ""
    is_out_of_time: bool = False
    result: Any = None


class Interrupted(Preempted):
    """The same by Ctrl-C: no launcher is to start the job again."""

    exit_code = 130  # what shells report for a process that SIGINT ended
