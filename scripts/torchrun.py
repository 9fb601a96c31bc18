"""torchrun with the exit codes and the messages of its workers.

The arguments are those of torchrun. On a worker's failure, plain torchrun prints its own traceback and a table, and
exits with 1; these hide the error of the worker. This script does the following instead:

- A worker exits with an error code: the worker printed its error, so the job exits with the same code. An error of one
  rank is repeated as the last line, since the other ranks print lines after it.
- A signal kills a worker: one line names signal, rank and machine; exit code 128 + number.
- SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU arrives: the workers receive it and have unlimited time to save. Repeated
  signals are ignored. The exit code is that of the workers: 75 if the run is saved and can be resumed.
- Ctrl-C: the same, with exit code 130; the second one makes the workers exit at once, the third one kills them.
- SIGQUIT arrives: the workers receive it and have 30 seconds; exit code 131.
- A signal that is ignored when this script starts (as by nohup) stays ignored, here and in the workers.
- The run was asked to stop and is saved: it is not restarted, whatever the value of --max-restarts. In an elastic job
  (--nnodes=1:4), the other machines continue unless the time limit of the run is over.

Errors of torchrun itself (wrong arguments, a failed rendezvous) are shown unchanged.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.append(str(Path(__file__).resolve().parent.parent))
from pretraining.launch.signals import INTERRUPTED, PREEMPTION_SIGNALS, heeded

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h; also the exit code of workers
TERMINATED = 143  # exit code of workers whose run saves nothing
STOP_SIGNALS = (*PREEMPTION_SIGNALS, signal.SIGINT)


if __name__ == "__main__":  # torch takes seconds to import, in which a signal would print a traceback
    for stop_signal in heeded(STOP_SIGNALS):
        signal.signal(stop_signal, lambda number, _: os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED))

import logging  # noqa: E402
import re  # noqa: E402
import socket  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from contextlib import suppress  # noqa: E402

from torch.distributed.elastic import multiprocessing  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SignalException, SubprocessContext  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure  # noqa: E402
from torch.distributed.run import main  # noqa: E402

# Warnings and errors that torchrun logs for normal ends of a job, and its banner about OMP_NUM_THREADS.
LOGS = (
    *("run", "elastic.multiprocessing.api", "elastic.agent.server.api"),
    "elastic.multiprocessing.errors.error_handler",
)
EXPECTED = re.compile(
    r"failed \(exitcode|(Sending|Closing) process|Received .* death signal|\W*Setting OMP_NUM_THR"
    r"|no error file defined for parent"
    r"|Failed to register signal handler"  # for no signal, if SIGQUIT is ignored
)
UNTIL_KILLED = 10**9  # seconds


class Workers(SubprocessContext):
    """The workers of this machine; torchrun makes a new object at every restart."""

    newest: Workers | None = None
    are_elastic = False  # whether the job continues without machines that leave
    time_is_over = Path()  # a file that workers create at the time limit
    is_stopping = False  # whether a signal requested a stop
    next_signal = signal.SIGINT  # of the next Ctrl-C

    def start(self) -> None:
        """Start the processes."""
        Workers.newest = self
        super().start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Return the result of exited workers; raise SignalException if they must not be restarted."""
        result = super().wait(timeout, period)
        codes = {*self.exit_codes()}
        requested = {PREEMPTED, INTERRUPTED, TERMINATED}
        are_saved = not requested.isdisjoint(codes) and codes <= {*requested, 0, -signal.SIGTERM}
        if result is not None and are_saved and (self.time_is_over.exists() or not self.are_elastic):
            raise SignalException("the workers were asked to stop", signal.SIGTERM)
        return result

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop the workers; after a stop request, without a time limit."""
        super().close(death_sig, UNTIL_KILLED if self.is_stopping else timeout)

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each worker, or minus the number of a signal."""
        return [handler.proc.returncode for handler in self.subprocess_handlers.values()]

    def send(self, number: int) -> None:
        """Send a signal to the running workers."""
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, number)


def request_stop(number: int, frame: FrameType | None) -> None:
    """Handle the first signal that requests a stop: torchrun forwards it to the workers."""
    for each in heeded(STOP_SIGNALS):
        signal.signal(each, hurry if each == signal.SIGINT else signal.SIG_IGN)
    Workers.is_stopping = True
    raise SignalException("asked to stop", signal.Signals(number))


def hurry(number: int, frame: FrameType | None) -> None:
    """Handle a later Ctrl-C: make the workers exit at once, then kill them."""
    if Workers.newest is not None:
        Workers.newest.send(Workers.next_signal)
    Workers.next_signal = signal.SIGKILL


def exit_code_after_stop(number: int, codes: list[int | None]) -> int:
    """Return the exit code of a job that got a signal, from the exit codes of its workers, if any were started.

    A worker killed by the signal had just been started, and had nothing to save.
    """
    if number not in STOP_SIGNALS:
        return 128 + number
    if codes and all(code == 0 for code in codes):
        return 0  # the run was finished
    if number == signal.SIGINT:
        return INTERRUPTED
    if all(code in (0, PREEMPTED, -number) for code in codes):
        return PREEMPTED
    return next((code for code in codes if code is not None and code > 0 and code != PREEMPTED), 128 + number)


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return global rank and failure of the worker that made the job fail.

    torchrun polls every 100 ms and records whole seconds. SIGKILL comes from outside (out of memory, the scheduler), so
    it is the cause among failures in the same second. The others are workers that lost their peer, or that torchrun
    stopped with SIGTERM.
    """
    latest = max(each.timestamp for each in error.failures.values())
    for each in error.failures.values():
        if "repeated" in each.error_file_data:  # its time is that of the worker, not of the poll
            each.timestamp = latest
    first_rank, first = error.get_first_failure()
    together = [(rank, each) for rank, each in error.failures.items() if each.timestamp == first.timestamp]
    killed = [(rank, each) for rank, each in together if each.exitcode == -signal.SIGKILL]
    failed = [(rank, each) for rank, each in together if each.exitcode > 0 and first.exitcode == -signal.SIGTERM]
    return [*killed, *failed, (first_rank, first)][0]


def run(arguments: list[str]) -> int:
    """Run torchrun and return the exit code."""
    for log in LOGS:
        logging.getLogger(f"torch.distributed.{log}").addFilter(lambda record: not EXPECTED.match(record.getMessage()))
    multiprocessing.SubprocessContext = Workers  # type: ignore[misc]
    # --time_limit counts from here, also for restarted workers.
    os.environ.setdefault("PRETRAINING_STARTED_AT", str(time.time()))
    nodes = re.findall(r"(?:^| )--nnodes[= ](\S+)", " ".join(arguments)) or [os.environ.get("PET_NNODES", "")]
    Workers.are_elastic = ":" in nodes[0]
    if Workers.are_elastic:
        # torchrun tells only machines of the first rendezvous the address of its shared store. A machine that joins
        # later waits for the store, and the others wait for this machine, until all time out.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with tempfile.TemporaryDirectory(prefix="pretraining_") as notes:
        Workers.time_is_over = Path(notes) / "time_is_over"
        os.environ["PRETRAINING_TIME_IS_OVER"] = str(Workers.time_is_over)
        try:
            main([f"--signals-to-handle={','.join(each.name for each in heeded((signal.SIGQUIT,)))}", *arguments])
        except ChildFailedError as error:
            rank, failure = first_failure(error)
            if failure.exitcode > 0:
                if failure.error_file_data.get("repeated"):  # other ranks have printed lines after this error
                    print(failure.error_file_data["message"]["message"], file=sys.stderr)
                return failure.exitcode
            worker = f"error: rank {rank} (local rank {failure.local_rank}) on {socket.gethostname()}"
            print(f"{worker} was killed by signal {-failure.exitcode} ({failure.signal_name()})", file=sys.stderr)
            return 128 - failure.exitcode
        except SignalException as stop:
            return exit_code_after_stop(stop.sigval, Workers.newest.exit_codes() if Workers.newest is not None else [])
    return 0


if __name__ == "__main__":
    for stop_signal in heeded(STOP_SIGNALS):
        signal.signal(stop_signal, request_stop)
    sys.exit(run(sys.argv[1:]))
