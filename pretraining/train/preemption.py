"""Requests to stop a run early: a signal to any process, Ctrl-C, or a time limit that is near.

    signal handler, clock -> `StopRequests.pending` of this rank -> HostSync -> all ranks stop after the same step

`HostSync` sends a rank's request with the rank's clock, once per step. One step later all ranks know the request, stop
training, save, and exit with the code of `Preempted`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pretraining.durations import Duration
from pretraining.errors import Interrupted, Preempted
from pretraining.launch.signals import OUT_OF_TIME, ReceivedSignals

TIME_LIMIT = 3  # SIGQUIT's number: no handled signal has it
STARTED_AT = "PRETRAINING_STARTED_AT"

# SLURM kills the processes at its end time. The margin leaves time for a step or two and a save, like the signal of
# scripts/train.slurm. In a short job, the margin is a tenth of its time.
MARGIN_SECONDS = 300.0
MARGIN_SHARE = 0.1


@dataclass(frozen=True)
class StopRequests:
    """Requests to this process to stop the run early.

    Attributes:
        deadline: when training must stop, in seconds since 1970; None = never.
        clock: seconds since 1970.
    """

    signals: ReceivedSignals = field(default_factory=ReceivedSignals)
    deadline: float | None = None
    clock: Callable[[], float] = time.time

    def pending(self) -> int:
        """Return the request of this rank for `HostSync.exchange`; 0 = none, `stop_reason` explains the others."""
        if self.signals.first is not None:
            return int(self.signals.first)
        return TIME_LIMIT if self.deadline is not None and self.clock() >= self.deadline else 0

    def raise_if_signalled(self) -> None:
        """Raise `Preempted` if a signal came; the deadline is checked only after the start is counted."""
        replace(self, deadline=None).raise_if_pending()

    def raise_if_pending(self) -> None:
        """Raise `Preempted` if a request is pending before the first step."""
        pending = self.pending()
        if pending:
            raise preemption_error(
                pending, f"before the next step ({stop_reason(pending)}): nothing to save; the same command resumes."
            )


def preemption_error(stop: int, text: str) -> Preempted:
    """Return the error that ends a run on request; the request decides its first word and its exit code."""
    error = Interrupted(f"Interrupted {text}") if stop == signal.SIGINT else Preempted(f"Preempted {text}")
    error.reason = stop_reason(stop)
    error.is_out_of_time = stop in (TIME_LIMIT, *OUT_OF_TIME)
    return error


def stop_reason(stop: int) -> str:
    """Return a stop request in words."""
    if stop == TIME_LIMIT:
        return "the time limit is near"
    if stop == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(stop).name


def make_stop_requests(
    signals: ReceivedSignals, time_limit: Duration | None, environ: Mapping[str, str] = os.environ
) -> StopRequests:
    """Return the stop requests of this process, with the deadline of its job.

    Args:
        time_limit: from the start of the job to the end of training, 0 = none; None = SLURM's end time.
        environ: SLURM's times, and `STARTED_AT` of a job whose launcher restarts processes.
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
    """Return a time in seconds since 1970; None if the variable is missing or no number (SLURM may write "Unknown")."""
    try:
        return float(environ.get(name, ""))
    except ValueError:
        return None
