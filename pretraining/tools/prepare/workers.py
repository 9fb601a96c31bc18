"""Units over the cores of a machine: threads in this process, and beyond a few of them, processes with threads.

A Python process hands tokens over one thread at a time, which about a dozen cores fill. Workers ask for the next unit
when they are done with one, and tell what they have done as they go; a worker whose parent is gone finds nobody to tell
and ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.errors import DataError, PretrainError
from pretraining.tools.prepare.encode import encode_unit
from pretraining.tools.prepare.encoding_progress import Counts, Report
from pretraining.tools.prepare.units import Unit
from pretraining.tools.prepare.work import Encoding, WorkFolder
from pretraining.tools.prepare.writer import output_errors

THREADS_A_PROCESS = 8


def encode_units(
    units: Sequence[Unit],
    encoding: Encoding,
    tokenizer: Tokenizer | None,
    work: WorkFolder,
    threads: int,
    report: Report,
) -> None:
    """Write the token files of units.

    Args:
        units: to be read.
        encoding: how.
        tokenizer: of the encoding, the one in the work folder; None where the input holds token ids.
        work: where to write.
        threads: that encode, over all processes.
        report: is told what was done; what it raises ends the work.

    Raises:
        DataError: the input cannot be read or the output cannot be written, or a worker was killed.
    """
    processes = min(len(units), -(-threads // THREADS_A_PROCESS))
    if processes > 1:
        _encode_in_processes(units, encoding, work, processes, -(-threads // processes), report)
        return
    for unit in units:
        encode_unit(unit, encoding, tokenizer, work, threads, report)


def _encode_in_processes(
    units: Sequence[Unit], encoding: Encoding, work: WorkFolder, processes: int, threads: int, report: Report
) -> None:
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, SpawnProcess] = {}
    waiting = iter(units)
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, encoding, work, threads), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
        busy = set(workers)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                if not _attend(connection, workers[connection], waiting, report):
                    busy.remove(connection)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
            process.join()


def _attend(connection: Connection, process: SpawnProcess, waiting: Iterator[Unit], report: Report) -> bool:
    """Take one message of a worker; False where that was its last."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        if process.exitcode == 0:
            return False
        if process.exitcode is not None and process.exitcode < 0:
            raise DataError(
                f"a process that encodes was ended by signal {-process.exitcode}; where that is 9, memory may have run "
                "out: give fewer --num_workers. The same command goes on from the files that are whole"
            ) from None
        raise RuntimeError("a process that encodes has failed; its traceback stands above") from None
    if isinstance(message, Counts):
        report(message)
    elif isinstance(message, PretrainError):
        raise message
    else:
        connection.send(next(waiting, None))
    return True


def _work(connection: Connection, encoding: Encoding, work: WorkFolder, threads: int) -> None:
    """What a worker process does: ask for units until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its workers

    def tell(message: Counts | PretrainError | None) -> None:
        try:
            connection.send(message)
        except ConnectionError:
            sys.exit()  # the parent is gone

    try:
        tokenizer = None if encoding.tokenizer is None else load_tokenizer(work.path)
        tell(None)
        while (unit := connection.recv()) is not None:
            with output_errors(work.root):
                encode_unit(unit, encoding, tokenizer, work, threads, tell)
            tell(None)
    except PretrainError as error:
        tell(error)
    except EOFError:
        sys.exit()  # likewise
