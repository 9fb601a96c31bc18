"""Errors for users: what happened, where, and the remedy.

Every entry point catches `PretrainError`, prints its text once and exits with its exit code. Any other exception is a
bug in this project and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_USER = re.compile(r"\b((?!file:|abfss?:)[a-z][\w+.-]*:/{1,2}|abfss?:/{1,2}[^\s/:@]*:)\S*@", re.IGNORECASE)
_PARAMETERS = re.compile(r"(\b[a-z][\w+.-]*:/{1,2}[^\s?]*\?)\S*?(?=[:;,.)'\"]*(?:\s|$))", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """Return a text whose addresses, such as s3://KEY:SECRET@bucket?secret_key=…, show no user and no parameters."""
    return _PARAMETERS.sub(r"\1***", _USER.sub(r"\1***@", text))


def flags_in(text: str) -> tuple[str, ...]:
    """Return the names of the flags in a message, in order; messages write every flag as `--name`."""
    return tuple(dict.fromkeys(re.findall(r"(?<!\S)[`'(]*--([a-z]\w*)", text)))


class Problem(NamedTuple):
    """A problem of a configuration: the settings that it is about, and a sentence."""

    names: tuple[str, ...]
    text: str


class PretrainError(Exception):
    """Base of all errors that a user can fix.

    Args:
        text: what happened, and the remedy.
        path: file or folder at fault, or its address; the message begins with it.
        row: document in that file.

    Attributes:
        rank: the only process that failed; None if several failed alike.
        is_everywhere: whether all processes of the job fail alike, so that one message is enough.
        exit_code: exit code of a process that fails with this error.
    """

    rank: int | None = None
    is_everywhere: bool = False
    exit_code: int = 1

    def __init__(self, text: str = "", *, path: object = None, row: int | None = None) -> None:
        place = "" if path is None else f"{path}: " if row is None else f"{path}, row {row}: "
        super().__init__(without_credentials(place + text))
        self.path = None if path is None else Path(str(path))
        self.row = row

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the flags in the message, in order."""
        return flags_in(str(self))


class ConfigError(PretrainError):
    """Invalid settings; carries every problem found, not only the first.

    Args:
        problems: one sentence each, with the flag to change. A sentence is about the flags that it names.

    Attributes:
        problems: the sentences.
        found: the problems with the settings that they are about.
    """

    def __init__(self, problems: str | Sequence[str | Problem]) -> None:
        listed = (problems,) if isinstance(problems, str) else problems
        self.found = [
            Problem(flags_in(each), without_credentials(each)) if isinstance(each, str) else each for each in listed
        ]
        self.problems: tuple[str, ...] = tuple(each.text for each in self.found)
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
            text = f"{len(self.problems)} problems in the configuration:\n{lines}"
        super().__init__(text)


class PathError(PretrainError):
    """A path that the file system refuses."""


class DataError(PretrainError):
    """A missing, damaged or wrong dataset; names file, row and sample if known."""


class CheckpointError(PretrainError):
    """A checkpoint that cannot be written, or not be restored into this run."""


class DamagedError(CheckpointError):
    """A start point that cannot be used, since its files changed; another one may be good."""


class OutdatedError(DamagedError):
    """A start point that is good, but no longer the newest checkpoint of its run."""


class LaunchError(PretrainError):
    """A job whose processes cannot find each other or their devices."""


class DivergenceError(PretrainError):
    """Too many skipped updates in a row.

    Attributes:
        first_step, last_step: the skipped updates, counted from 1.
        samples: global indices (first, end) of the samples of these updates.
    """

    def __init__(self, text: str, first_step: int, last_step: int, samples: tuple[int, int]) -> None:
        super().__init__(text)
        self.first_step, self.last_step, self.samples = first_step, last_step, samples


class HardwareError(PretrainError):
    """A device with wrong results or corrupted memory."""


class OutOfMemoryError(PretrainError):
    """A device or machine with too little memory for the settings."""


class LostPeerError(LaunchError):
    """The exit of another process, which this process cannot continue without; the other one prints the cause."""


class Preempted(PretrainError):
    """A stop on request before the end of the run; the next start resumes.

    A run without checkpoints exits with code 143 instead, so that no launcher restarts it.

    Attributes:
        reason: origin of the request, such as "SIGTERM".
        is_out_of_time: whether the job's time is nearly over (time limit, or a signal ahead of it); otherwise its place
            was wanted.
        result: `TrainResult` so far; None if the run stopped before its first step.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later
    reason: str = ""
    is_out_of_time: bool = False
    result: Any = None


class Interrupted(Preempted):
    """A stop by Ctrl-C; launchers must not restart the job."""

    exit_code = 130  # what shells report for SIGINT
