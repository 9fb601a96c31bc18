"""torchrun with the exit codes and the messages of its workers.

The arguments are those of torchrun. On a worker's failure, plain torchrun prints its own traceback and a table, and
exits with 1; these hide the error of the worker. This script does the following instead:

- A worker exits with an error code: the worker printed its error, so the job exits with the same code and adds nothing.
- A signal kills a worker: one line names signal, rank and machine; exit code 128 + number.
- SIGTERM or SIGUSR1 arrives: the workers receive it and have unlimited time to save. Repeated signals are ignored. The
  exit code is that of the workers: 75 if the run is saved and can be resumed.
- Ctrl-C: the same, with exit code 130; the second one makes the workers exit at once, the third one kills them.
- Another signal arrives: the workers receive it and have 30 seconds; exit code 128 + number.
- The train.sh that started this script is killed: as for SIGTERM.
- The run was asked to stop and is saved: it is not restarted, whatever the value of --max-restarts. In an elastic job
  (--nnodes=1:4), the other machines continue unless the time limit of the run is over.

Errors of torchrun itself (wrong arguments, a failed rendezvous) are shown unchanged.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h; also the exit code of workers
TERMINATED = 143  # exit code of workers whose run saves nothing
TIME_IS_OVER = "PRETRAINING_TIME_IS_OVER"  # path of a file that workers create at the time limit
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Exit on a signal before any worker was started."""
    if number == signal.SIGINT:
        with suppress(OSError):  # stderr may be closed
            os.write(2, b"interrupted; nothing has begun\n")
    os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)


def end_with_script() -> None:
    """Make Linux send SIGTERM to this process when the train.sh that started it dies, even by SIGKILL."""
    script = os.environ.pop("PRETRAINING_SCRIPT_PID", "")
    if script and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != int(script):  # train.sh is already dead
            os._exit(PREEMPTED)


if __name__ == "__main__":  # before the import of torch, which takes seconds in which a signal would print a traceback
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, exit_at_once)
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

# Warnings and errors that torchrun logs for normal ends of a job, and its banner about OMP_NUM_THREADS.
LOGS = ("run", "elastic.multiprocessing.api", "elastic.agent.server.api")
EXPECTED = re.compile(r"failed \(exitcode|(Sending|Closing) process|Received .* death signal|\W*Setting OMP_NUM_THR")

# A variable number of machines.
ELASTIC = re.compile(r"--nnodes=\d+:\d+")

OTHER_SIGNALS = "SIGHUP,SIGQUIT"
UNTIL_KILLED = 10**9  # seconds


class Workers(SubprocessContext):
    """The workers of this machine; torchrun makes a new object at every restart.

    Attributes:
        are_elastic: whether the job continues without machines that leave.
    """

    newest: Workers | None = None
    are_elastic = False

    def start(self) -> None:
        """Start the processes."""
        Workers.newest = self
        super().start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Return the result of exited workers; raise Stop if they stopped on request and must not be restarted."""
        result = super().wait(timeout, period)
        continues = self.are_elastic and not Path(os.environ[TIME_IS_OVER]).exists()
        if result is not None and not continues and are_saved(self.exit_codes()):
            raise Stop("the workers were asked to stop", signal.SIGTERM)
        return result

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop the workers; after a stop request, without a time limit."""
        super().close(death_sig, UNTIL_KILLED if Stop.received is not None else timeout)

    def send(self, number: int) -> None:
        """Send a signal to the running workers."""
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, number)

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each worker, or minus the number of a signal."""
        return [handler.proc.returncode for handler in self.subprocess_handlers.values()]


class Stop(SignalException):
    """A received SIGTERM, SIGUSR1 or Ctrl-C, which torchrun forwards to its workers.

    Attributes:
        received: the signal, once it arrived.
    """

    received: signal.Signals | None = None

    @classmethod
    def come(cls, number: int, frame: FrameType | None) -> None:
        """Handle the first of these signals."""
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGINT, cls.hurry)
        cls.received = signal.Signals(number)
        raise cls(f"got {cls.received.name}", cls.received)

    @classmethod
    def hurry(cls, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C after the first signal: make the workers exit at once."""
        signal.signal(signal.SIGINT, cls.kill)
        if Workers.newest is not None:
            Workers.newest.send(signal.SIGINT)

    @classmethod
    def kill(cls, number: int, frame: FrameType | None) -> None:
        """Handle the next Ctrl-C: kill the workers."""
        if Workers.newest is not None:
            Workers.newest.send(signal.SIGKILL)


def exit_code_after_stop(number: int, codes: list[int | None]) -> int:
    """Return the exit code of a job that was asked to stop.

    Args:
        number: number of the signal.
        codes: exit codes of the workers, if any were started. A worker killed by the signal had just been started, and
            had nothing to save.
    """
    if codes and all(code == 0 for code in codes):
        return 0  # the run was finished
    if number == signal.SIGINT:
        return INTERRUPTED
    if all(code in (0, PREEMPTED, -number) for code in codes):
        return PREEMPTED
    failure = next((code for code in codes if code is not None and code > 0 and code != PREEMPTED), None)
    return 128 + number if failure is None else failure


def are_saved(codes: list[int | None]) -> bool:
    """Return whether all workers, which have exited, did so on request."""
    ends = {PREEMPTED, INTERRUPTED, TERMINATED}
    return not ends.isdisjoint(codes) and {*codes} <= {*ends, 0, -signal.SIGTERM}


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a message of torchrun's log is more than a normal end of a job; a logging filter."""
    return not EXPECTED.match(record.getMessage())


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return global rank and failure of the worker that made the job fail.

    torchrun polls every 100 ms and records whole seconds. SIGKILL comes from outside (out of memory, the scheduler), so
    it is the cause among failures in the same second. The others are workers that lost their peer, or that torchrun
    stopped with SIGTERM.
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
    """Run torchrun and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="pretraining_") as notes:
        os.environ[TIME_IS_OVER] = str(Path(notes) / "time_is_over")
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    for log in LOGS:
        logging.getLogger(f"torch.distributed.{log}").addFilter(is_news)
    multiprocessing.SubprocessContext = Workers  # type: ignore[misc]
    # --time_limit counts from here, also for restarted workers.
    os.environ.setdefault("PRETRAINING_STARTED_AT", str(time.time()))
    Workers.are_elastic = any(ELASTIC.fullmatch(argument) for argument in arguments)
    if Workers.are_elastic:
        # torchrun tells only machines of the first rendezvous the address of its shared store. A machine that joins
        # later waits for the store, and the others wait for this machine, until all time out.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        main([f"--signals-to-handle={OTHER_SIGNALS}", *arguments])
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        if failure.exitcode > 0:
            return failure.exitcode
        worker = f"rank {rank} (local rank {failure.local_rank}) on {socket.gethostname()}"
        print(f"error: {worker} was killed by signal {-failure.exitcode} ({failure.signal_name()})", file=sys.stderr)
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
