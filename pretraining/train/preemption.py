"""Why and when a run ends before it is done: a signal to any of its processes, Ctrl-C, or a time limit that comes near.

    signal handler, clock -> `StopRequests.pending` of this rank -> HostSync -> all ranks stop after the same step

A rank tells its request beside its clock, once a step. A step later all ranks know of it, stop training, save, and end
with the exit code of `Preempted`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pretraining.errors import Interrupted, Preempted
from pretraining.launch.signals import ReceivedSignals
from pretraining.progress import Duration

TIME_LIMIT = 1  # no signal that is listened to has this number
STARTED_AT = "PRETRAINING_STARTED_AT"

# SLURM's end time is the moment at which processes are killed: time to finish a step or two and to save, as in the
# signal that scripts/train.slurm asks for. Of a job that has little time, a tenth.
MARGIN_SECONDS = 300.0
MARGIN_SHARE = 0.1


@dataclass(frozen=True)
class StopRequests:
    """Whether this process has been asked to end the run early.

    Attributes:
        deadline: when training is to stop, in seconds since 1970; None = never.
        clock: seconds since 1970.
    """

    signals: ReceivedSignals = field(default_factory=ReceivedSignals)
    deadline: float | None = None
    clock: Callable[[], float] = time.time

    def pending(self) -> int:
        """Return the request of this rank, for `HostSync.exchange`: 0 = none, else what `reason_of` explains."""
        if self.signals.first is not None:
            return int(self.signals.first)
        return TIME_LIMIT if self.deadline is not None and self.clock() >= self.deadline else 0

    def end_before_training(self) -> None:
        """Raise `Preempted` if a request is pending before the first step."""
        pending = self.pending()
        if pending:
            raise ending(
                pending, f"before the next step ({reason_of(pending)}): nothing is saved; the same command goes on."
            )


def ending(stop: int, text: str) -> Preempted:
    """Make what a run ends with on request, which decides about the first word of its text and the exit code."""
    ended = Interrupted(f"Interrupted {text}") if stop == signal.SIGINT else Preempted(f"Preempted {text}")
    ended.reason = reason_of(stop)
    # The time limit, or the signal that SLURM sends ahead of its own.
    ended.is_out_of_time = stop in (TIME_LIMIT, signal.SIGUSR1)
    return ended


def reason_of(stop: int) -> str:
    """Put a request of any rank into words."""
    if stop == TIME_LIMIT:
        return "the time limit is near"
    if stop == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(stop).name


def stop_requests(
    signals: ReceivedSignals, time_limit: Duration | None, environ: Mapping[str, str] = os.environ
) -> StopRequests:
    """Return the requests of a process whose signals are listened to.

    Args:
        time_limit: from the start of the job to the end of training, 0 = none; None = what SLURM says.
        environ: with SLURM's end time, and `STARTED_AT` of a job whose launcher restarts processes.
    """
    if time_limit is None:
        return StopRequests(signals, _slurm_deadline(environ))
    if time_limit.amount == 0:
        return StopRequests(signals, None)
    started = _unix_time(environ, STARTED_AT)
    return StopRequests(signals, (time.time() if started is None else started) + time_limit.amount)


def _slurm_deadline(environ: Mapping[str, str]) -> float | None:
    end = _unix_time(environ, "SLURM_JOB_END_TIME")
    if end is None:
        return None
    start = _unix_time(environ, "SLURM_JOB_START_TIME")
    margin = MARGIN_SECONDS if start is None else min(MARGIN_SECONDS, MARGIN_SHARE * (end - start))
    return end - margin


def _unix_time(environ: Mapping[str, str], name: str) -> float | None:
    """Return a moment; None where the variable is missing or no number (SLURM may write "Unknown")."""
    try:
        return float(environ.get(name, ""))
    except ValueError:
        return None
