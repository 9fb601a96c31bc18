"""The terminal: where messages are printed."""

from __future__ import annotations

import io
import logging
import os
from unittest.mock import Mock

import pytest

from pretraining.launch.terminal import (
    PACKAGE,
    TerminalHandler,
    _LossyOutput,
    log_to_terminal,
    logging_to_terminal,
    print_text,
)

log = logging.getLogger(f"{PACKAGE}.some.module")


@pytest.mark.parametrize(("rank", "out"), [(0, "step 1\n"), (3, "")])
def test_rank_0_prints_info_and_each_rank_its_warnings(rank: int, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_terminal(rank)
    log.info("step %d", 1)
    log.warning("disk %s", "slow")
    log.debug("nothing")
    assert capsys.readouterr() == (out, f"rank {rank}: disk slow\n")


def test_control_characters_are_escaped_in_messages_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_terminal()
    log.info("a\tb\n%s", "\x1b]0;title\x07\r")
    log.warning("\x9b2J")
    print_text("\x1b[2Jété\x7f\u2028", end="")
    escaped = "a\tb\n\\x1b]0;title\\x07\\x0d\n" + "\\x1b[2Jété\\x7f\u2028"
    assert capsys.readouterr() == (escaped, "rank 0: \\x9b2J\n")


def test_the_log_is_printed_within_the_block_and_other_handlers_stay(capsys: pytest.CaptureFixture[str]) -> None:
    logger, own = logging.getLogger(PACKAGE), logging.NullHandler()
    logger.addHandler(own)
    logger.setLevel(logging.ERROR)
    with pytest.raises(ValueError), logging_to_terminal(0):
        log.info("inside")
        raise ValueError
    log.info("outside")
    assert capsys.readouterr() == ("inside\n", "")
    assert own in logger.handlers and logger.level == logging.ERROR
    assert not any(isinstance(each, TerminalHandler) for each in logger.handlers)


def test_a_closed_pipe_stops_the_program_and_other_logging_errors_do_not() -> None:
    handler = log_to_terminal(0)
    handler.show = Mock(side_effect=BrokenPipeError)
    with pytest.raises(BrokenPipeError):
        log.info("to nobody")
    handler.show = Mock(side_effect=RuntimeError)
    log.info("the display has failed")  # logging prints the traceback itself


def test_output_beyond_a_full_non_blocking_pipe_is_dropped() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    stream = io.TextIOWrapper(io.BufferedWriter(_LossyOutput(writing)), line_buffering=True)
    stream.write("x" * 1_000_000 + "\n")
    assert len(os.read(reading, 10_000_000)) > 1000
    stream.write("again\n")
    stream.close()
    os.close(reading)
    os.close(writing)
