"""torchrun that lets its workers have the last word.

The arguments are torchrun's, which answers a worker's failure with a traceback of its own, a table and exit code 1,
whatever the worker returned, and a signal with another traceback. That buries what the worker said. Here instead:

- a worker exits with a code: it has said what is wrong, so nothing is added, and the job exits with the same code;
- a signal ends a worker, which could not say anything: one line says which and where; exit code 128 + number;
- SIGTERM or SIGUSR1 comes: the workers get it, and as long as they need to save (its sender knows when to kill);
  further ones are ignored, and the exit code is theirs: 75, the run is saved and can be gone on with;
- Ctrl-C comes: the same, with exit code 130; by the second one the workers leave at once, by the third they are killed;
- another signal comes: the workers get it and 30 seconds; exit code 128 + number;
- the train.sh that started it is killed: as for SIGTERM;
- the run was told to end and is saved: it is not restarted, whatever --max-restarts says. Where machines may come and
  go (--nnodes=1:4), those that are left go on, unless the time of all is over.

Errors of torchrun itself (wrong arguments, machines that do not meet) are shown as they are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h; the workers', too
TERMINATED = 143  # the workers', of a run that keeps nothing
TIME_IS_OVER = "PRETRAINING_TIME_IS_OVER"  # the path of a file that workers then make
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """Exit at a signal before anything has begun."""
    if number == signal.SIGINT:
        with suppress(OSError):  # nobody reads it
            os.write(2, b"interrupted; nothing has begun\n")
    os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)


def end_with_script() -> None:
    """Have Linux send SIGTERM to this process when the train.sh that started it dies, even by SIGKILL."""
    script = os.environ.pop("PRETRAINING_SCRIPT_PID", "")
    if script and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != int(script):  # dead already
            os._exit(PREEMPTED)


if __name__ == "__main__":  # before torch is imported, which takes seconds, in which a signal would end in a traceback
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, leave_at_once)
    end_with_script()

import logging  # noqa: E402
import re  # noqa: E402
import socket  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

from torch.distributed.elastic import multiprocessing  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SignalException, SubprocessContext  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure  # noqa: E402
from torch.distributed.run import main  # noqa: E402

# What torchrun logs as warnings and errors though it is only how jobs end, and its banner about a default.
LOGS = ("run", "elastic.multiprocessing.api", "elastic.agent.server.api")
EXPECTED = re.compile(r"failed \(exitcode|(Sending|Closing) process|Received .* death signal|\W*Setting OMP_NUM_THR")

# A number of machines that may change.
ELASTIC = re.compile(r"--nnodes=\d+:\d+")

OTHER_SIGNALS = "SIGHUP,SIGQUIT"
UNTIL_KILLED = 10**9  # seconds


class Workers(SubprocessContext):
    """torchrun's workers of this machine; it makes new ones at every restart.

    Attributes:
        are_elastic: whether the job goes on without machines that leave.
    """

    newest: Workers | None = None
    are_elastic = False

    def start(self) -> None:
        """Start the processes."""
        Workers.newest = self
        super().start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """How they ended, once they have; those that were told to end by somebody else are not to be restarted."""
        result = super().wait(timeout, period)
        goes_on = self.are_elastic and not Path(os.environ[TIME_IS_OVER]).exists()
        if result is not None and not goes_on and are_saved(self.exit_codes()):
            raise Stop("the workers were told to end", signal.SIGTERM)
        return result

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End them: on request, in their own time."""
        super().close(death_sig, UNTIL_KILLED if Stop.received is not None else timeout)

    def send(self, number: int) -> None:
        """Send a signal to those that run."""
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, number)

    def exit_codes(self) -> list[int | None]:
        """How they ended: an exit code, or minus a signal's number."""
        return [handler.proc.returncode for handler in self.subprocess_handlers.values()]


class Stop(SignalException):
    """SIGTERM, SIGUSR1 or Ctrl-C has come; torchrun answers by handing it to its workers.

    Attributes:
        received: which one, from then on.
    """

    received: signal.Signals | None = None

    @classmethod
    def come(cls, number: int, frame: FrameType | None) -> None:
        """Handle these signals."""
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGINT, cls.hurry)
        cls.received = signal.Signals(number)
        raise cls(f"got {cls.received.name}", cls.received)

    @classmethod
    def hurry(cls, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C after that."""
        signal.signal(signal.SIGINT, cls.kill)
        if Workers.newest is not None:
            Workers.newest.send(signal.SIGINT)

    @classmethod
    def kill(cls, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C if that did not help."""
        if Workers.newest is not None:
            Workers.newest.send(signal.SIGKILL)


def exit_code_after_stop(number: int, codes: list[int | None]) -> int:
    """Return the exit code of a job that was told to stop.

    Args:
        number: of the signal.
        codes: of its workers, if there are any yet. One that the signal ended had only just been started, and had
            nothing to save.
    """
    if codes and all(code == 0 for code in codes):
        return 0  # the run was at its end
    if number == signal.SIGINT:
        return INTERRUPTED
    if all(code in (0, PREEMPTED, -number) for code in codes):
        return PREEMPTED
    failure = next((code for code in codes if code is not None and code > 0 and code != PREEMPTED), None)
    return 128 + number if failure is None else failure


def are_saved(codes: list[int | None]) -> bool:
    """Whether workers, all of which have ended, were told to."""
    ends = {PREEMPTED, INTERRUPTED, TERMINATED}
    return not ends.isdisjoint(codes) and {*codes} <= {*ends, 0, -signal.SIGTERM}


def is_news(record: logging.LogRecord) -> bool:
    """Whether a message of torchrun's log says more than how jobs end; a filter."""
    return not EXPECTED.match(record.getMessage())


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Global rank and failure of the worker that made the job fail.

    torchrun looks only every 100 ms and counts in seconds. SIGKILL comes from outside (no memory left, the scheduler),
    so of failures in the same second it is the cause, and others are workers that lost their peer. SIGTERM is how
    torchrun ends those that are left.
    """
    first_rank, first = error.get_first_failure()
    together = {rank: failure for rank, failure in error.failures.items() if failure.timestamp == first.timestamp}
    for rank, failure in together.items():
        if failure.exitcode == -signal.SIGKILL:
            return rank, failure
    if first.exitcode == -signal.SIGTERM:
        return next(((rank, each) for rank, each in together.items() if each.exitcode > 0), (first_rank, first))
    return first_rank, first


def run(arguments: list[str]) -> int:
    """Run torchrun to its end; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="pretraining_") as notes:
        os.environ[TIME_IS_OVER] = str(Path(notes) / "time_is_over")
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    for log in LOGS:
        logging.getLogger(f"torch.distributed.{log}").addFilter(is_news)
    multiprocessing.SubprocessContext = Workers  # type: ignore[misc]
    # --time_limit counts from here, also in workers that are started again.
    os.environ.setdefault("PRETRAINING_STARTED_AT", str(time.time()))
    Workers.are_elastic = any(ELASTIC.fullmatch(argument) for argument in arguments)
    if Workers.are_elastic:
        # With the store that its processes share torchrun tells only machines of the first round where it is: one that
        # comes later, or back, waits for it, and the others for that one, until all give up.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        main([f"--signals-to-handle={OTHER_SIGNALS}", *arguments])
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        if failure.exitcode > 0:
            return failure.exitcode
        worker = f"rank {rank} (local rank {failure.local_rank}) on {socket.gethostname()}"
        print(f"error: {worker} was ended by signal {-failure.exitcode} ({failure.signal_name()})", file=sys.stderr)
        return 128 - failure.exitcode
    except Stop as stop:
        return exit_code_after_stop(stop.sigval, Workers.newest.exit_codes() if Workers.newest is not None else [])
    except SignalException as stopped:
        return 128 + stopped.sigval
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, Stop.come)
    sys.exit(run(sys.argv[1:]))
