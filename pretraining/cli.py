"""The command line, `pretrain COMMAND --flag=value …`: a table of commands, and the handling of errors.

    arguments -> `read_words` -> fire, which calls the command -> `translate` -> `read` -> the command's function

Fire gets no words: alone it would lose the order of flags and words, turn `false` into a true string and accept unknown
flags. Errors for users, and errors of the file system about a path, are printed once and exit with the error's code;
other exceptions keep their traceback.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pretraining import __version__
from pretraining.config.assignments import Assignment
from pretraining.config.command_line import read_words
from pretraining.config.help import help_text
from pretraining.config.read import naming_places, read
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError, LaunchError, LostPeerError, PathError, Preempted, PretrainError
from pretraining.files import path_error
from pretraining.launch.cpu_threads import CpuThreads, set_threads, torch_is_imported
from pretraining.launch.layout import INTERACTIVE, ProcessLayout, resolve_layout
from pretraining.launch.machine import name_user
from pretraining.launch.program import FAILED, run_as_program
from pretraining.launch.signals import (
    INTERRUPTED,
    ReceivedSignals,
    exit_at_interrupt,
    mark_time_limit,
    terminate_with_launcher,
)
from pretraining.launch.terminal import ignore_output_errors, log_to_terminal, print_text
from pretraining.tools import demo
from pretraining.tools.command_settings import BESIDE_RECIPES, BESIDE_TRAINING, Command
from pretraining.tools.translate.translate import translate

log = logging.getLogger(__name__)


WHEN_INTERRUPTED = "interrupted; the same command resumes from what is complete"
HEAD_START = 3.0
"""Seconds that a silent process waits before it exits: its exit would make the launcher kill the one that prints."""


def run_console_script() -> NoReturn:
    """Run the command in this process's arguments, and exit."""
    run_as_program(main)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and return; `arguments` exclude the program's name, and default to this process's."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    name_user()  # before PyTorch is imported
    layout = _layout()
    log_to_terminal(layout.rank if layout else 0)
    try:
        _run(arguments)
    except PretrainError as error:
        _exit_with(error)
    except OSError as error:
        if error.filename is None:
            _exit_without_output(error)
        failure = path_error(error)
        failure.rank = layout.rank if layout and layout.world_size > 1 else None  # only this process failed
        _exit_with(failure)
    except KeyboardInterrupt:
        if _prints_errors(for_all_nodes=True):
            print(WHEN_INTERRUPTED, file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run(arguments: Sequence[str]) -> None:
    name = arguments[0] if arguments else "--help"
    helps = [word for word in arguments if word in ("--help", "-h") or word.startswith("--help=")]
    if name == "--version":
        import platform
        from importlib.metadata import version

        print(f"pretraining {__version__}, torch {version('torch')}, Python {platform.python_version()}")
    elif name not in COMMANDS:
        lines = "\n".join(f"  pretrain {command:10} {row.purpose}" for command, row in COMMANDS.items())
        text = f"Commands:\n{lines}\n`pretrain COMMAND --help` explains all flags, `--help=FLAG` one."
        if arguments and not name.startswith("-"):
            raise ConfigError(f"unknown command {name!r}. {text}")
        print(text)
    elif helps:
        row, topic = COMMANDS[name], helps[0].partition("=")[2] or None
        print(help_text(row.settings, f"pretrain {name}", row.purpose, topic=topic))
        if topic is None and issubclass(row.settings, TrainConfig):
            print(BESIDE_RECIPES)
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # prints file names that are not UTF-8 unchanged
        try:
            Path.cwd()  # libraries abort without one
        except OSError as error:
            raise PathError(f"the working folder was deleted ({error.strerror}): change to another") from None
        words = read_words(COMMANDS[name].settings, arguments[1:])

        def run() -> None:
            _run_command(COMMANDS[name], words)

        import fire  # here, so that `--help` is fast

        fire.Fire(run, command=[], name=f"pretrain {name}")


def train_command(words: Sequence[Assignment]) -> None:
    """Train a model: read the settings, lay out this process, then train, evaluate, or describe the start."""
    signals = ReceivedSignals().listen()
    terminate_with_launcher()
    of_demo = demo.settings_beside(words)
    translated = translate(TrainConfig, [*of_demo, *words])
    given = read(TrainConfig, translated, continues_runs=True)
    config = given.config
    if of_demo:
        demo.prepare()
    if not config.run.dry_run:
        ignore_output_errors()
    layout, threads = _lay_out(config)
    with exit_at_interrupt(WHEN_INTERRUPTED):  # imports torch, after the settings are checked
        from pretraining.train.preemption import make_stop_requests
        from pretraining.train.run import train

        if config.run.dry_run:
            from pretraining.tools.dry_run import dry_run
        if config.evaluation.eval_only:
            from pretraining.tools.evaluate import evaluate_and_print

    requests = make_stop_requests(signals, config.run.time_limit)
    with naming_places(given.chosen):
        if config.evaluation.eval_only:
            evaluate_and_print(config, layout, requests)
        elif config.run.dry_run:
            dry_run(given, layout, requests)
        else:
            train(config, layout, requests, threads)


def _lay_out(config: TrainConfig) -> tuple[ProcessLayout, CpuThreads]:
    """Return the place of this process in its job and its CPU threads, which are set before torch is imported."""
    layout = resolve_layout(os.environ)
    if layout.launcher == INTERACTIVE:
        log.info(
            "one process: this shell is one of several tasks of `srun --pty`. A command after srun starts them all"
        )
    if torch_is_imported():
        log.info("torch is imported already: it keeps its number of threads")
    threads = set_threads(config.run.cpu_threads, layout)
    if config.parallel.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # PyTorch would allocate memory on a GPU
    return layout, threads


def _run_command(command: Command, words: Sequence[Assignment]) -> None:
    """Import and run a command, after the number of CPU threads is set."""
    if command.takes_assignments:
        _import_function(command.function)(words)
        return
    translated = translate(command.settings, words)
    config: Any = read(command.settings, translated).config
    if (layout := _layout()) is not None:
        set_threads(config.run.cpu_threads if isinstance(config, TrainConfig) else None, layout)
    _import_function(command.function)(config)


def _import_function(function: str | Callable[..., None]) -> Callable[..., None]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    imported: Callable[..., None] = getattr(import_module(f"pretraining.{module}"), name)
    return imported


COMMANDS = {
    "train": Command(TrainConfig, train_command, "train a model", takes_assignments=True),
    **BESIDE_TRAINING,
}


def _exit_without_output(error: OSError) -> NoReturn:
    """Exit a command whose output cannot be written, silently if its pipe was closed, as `head` does.

    Any other error of the system without a path is raised again.
    """
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit would fail again
    if error.errno != errno.EPIPE:
        print(f"error: output cannot be written: {error.strerror}", file=sys.stderr)
    sys.exit(FAILED)


def _exit_with(error: PretrainError) -> NoReturn:
    """Exit with an error, and print the error unless another process does."""
    if isinstance(error, Preempted) and error.is_out_of_time:
        mark_time_limit()
    if error.rank is not None or _prints_errors(for_all_nodes=error.is_everywhere):
        kind = "" if isinstance(error, Preempted) else "error: "
        text = f"error: rank {error.rank}: {error}" if error.rank is not None else f"{kind}{error}"
        print_text(text, file=sys.stderr, flush=True)
        if error.exit_code == FAILED and not isinstance(error, LostPeerError):
            _record_for_torchrun(text, is_of_one_rank=error.rank is not None)
    else:
        time.sleep(HEAD_START)
    layout = _layout()
    if isinstance(error, LostPeerError) or (error.rank is not None and layout is not None and layout.world_size > 1):
        sys.stdout.flush()
        os._exit(error.exit_code)  # a normal exit could wait for processes that are busy or dead
    sys.exit(error.exit_code)


def _record_for_torchrun(text: str, *, is_of_one_rank: bool) -> None:
    """Write an error to the file whose text torchrun shows in its table of failures, if torchrun started this process.

    Other ranks print lines after the error of one rank, so scripts/torchrun.py repeats it.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}  # as torch's `record` writes it
        content = {"message": message, "repeated": is_of_one_rank}
        with suppress(OSError):
            Path(path).write_text(json.dumps(content))


def _prints_errors(for_all_nodes: bool) -> bool:
    """Return whether this process prints errors for the whole job or for its node; True without a layout."""
    layout = _layout()
    return layout is None or (layout.rank if for_all_nodes else layout.local_rank) == 0


def _layout() -> ProcessLayout | None:
    """Return this process's layout; None if it cannot be read, an error only in commands that need a layout."""
    try:
        return resolve_layout(os.environ)
    except LaunchError:
        return None
