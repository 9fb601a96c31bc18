"""torchrun that lets its workers have the last word.

The arguments are torchrun's. torchrun answers a worker's failure with its own traceback, a table and exit code 1,
whatever the worker returned, and a signal with another traceback: after a clean error message of a worker, that buries
the message. Here the job ends as its first failed worker did:

- a worker exits with a code: nothing is added, because it has said what is wrong, and the job exits with the same code;
- a signal ends a worker, which then could not say anything: one line says which and where, the exit code is 128 + number;
- a signal ends torchrun: it hands the signal to its workers, waits for them, and exits with 128 + number.

Errors of torchrun itself (wrong arguments, machines that do not meet) are shown as they are.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

# What torchrun logs as warnings and errors though it is only how any job ends, and a banner about a default.
TALKATIVE = ("torch.distributed.run", "torch.distributed.elastic.multiprocessing.api") + (
    "torch.distributed.elastic.agent.server.api",
)
EXPECTED = ("failed (exitcode", "Sending process", "Closing process", "Setting OMP_NUM_THREADS")


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of torchrun's log says more than that the job ends; a filter."""
    message = record.getMessage().strip("*\n ")
    return not message.startswith(EXPECTED) and "death signal, shutting down" not in message


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Global rank and failure of the worker that made the job fail.

    torchrun looks only every 100 ms and counts in seconds. SIGKILL comes from outside (no memory left, the scheduler),
    so of failures in the same second it is the cause, and others are workers that lost their peer.
    """
    _, first = error.get_first_failure()
    for rank, failure in error.failures.items():
        if failure.exitcode == -signal.SIGKILL and failure.timestamp == first.timestamp:
            return rank, failure
    return error.get_first_failure()


def run(arguments: list[str]) -> int:
    """Run torchrun to its end; returns the exit code."""
    for name in TALKATIVE:
        logging.getLogger(name).addFilter(is_news)
    try:
        main(arguments)
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        if failure.exitcode > 0:
            return failure.exitcode
        host, name = socket.gethostname(), failure.signal_name()
        where = f"rank {rank} (local rank {failure.local_rank}) on {host}"
        print(f"error: {where} was ended by signal {-failure.exitcode} ({name})", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    except KeyboardInterrupt:  # before there are workers, torchrun handles no signals
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
