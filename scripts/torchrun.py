"""torchrun that lets its workers have the last word.

The arguments are torchrun's, which answers a worker's failure with a traceback of its own, a table and exit code 1,
whatever the worker returned, and a signal with another traceback. That buries what the worker said. Here instead:

- a worker exits with a code: it has said what is wrong, so nothing is added, and the job exits with the same code;
- a signal ends a worker, which could not say anything: one line says which and where; exit code 128 + number;
- a signal comes to torchrun: it hands it to its workers and waits for them; exit code 128 + number.

Errors of torchrun itself (wrong arguments, machines that do not meet) are shown as they are.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

# What torchrun logs as warnings and errors though it is only how jobs end, and its banner about a default.
LOGS = ("run", "elastic.multiprocessing.api", "elastic.agent.server.api")
EXPECTED = re.compile(r"failed \(exitcode|(Sending|Closing) process|Received .* death signal|\W*Setting OMP_NUM_THR")


def is_news(record: logging.LogRecord) -> bool:
    """Whether a message of torchrun's log says more than how jobs end; a filter."""
    return not EXPECTED.match(record.getMessage())


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Global rank and failure of the worker that made the job fail.

    torchrun looks only every 100 ms and counts in seconds. SIGKILL comes from outside (no memory left, the scheduler),
    so of failures in the same second it is the cause, and others are workers that lost their peer.
    """
    first_rank, first = error.get_first_failure()
    for rank, failure in error.failures.items():
        if failure.exitcode == -signal.SIGKILL and failure.timestamp == first.timestamp:
            return rank, failure
    return first_rank, first


def run(arguments: list[str]) -> int:
    """Run torchrun to its end; returns the exit code."""
    for log in LOGS:
        logging.getLogger(f"torch.distributed.{log}").addFilter(is_news)
    try:
        main(arguments)
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        if failure.exitcode > 0:
            return failure.exitcode
        worker = f"rank {rank} (local rank {failure.local_rank}) on {socket.gethostname()}"
        print(f"error: {worker} was ended by signal {-failure.exitcode} ({failure.signal_name()})", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    except KeyboardInterrupt:  # before there are workers, torchrun handles no signals
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
