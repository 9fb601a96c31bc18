"""The command line: `pretrain COMMAND --flag=value …`, one row per command.

fire splits the words; the text of each value goes to the settings' own parser, because fire would turn `false` into a
true string and let unknown flags through. Errors for users are printed once and end the process with status 1, as does
what the file system says about a path; other exceptions keep their traceback.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pretraining import __version__
from pretraining.config.command_line import parse_config, resolve_config
from pretraining.config.commands import (
    DoctorConfig,
    ExportConfig,
    ImportConfig,
    InspectConfig,
    ListConfig,
    PageConfig,
    PlanConfig,
    PrepareConfig,
    PushConfig,
    SampleConfig,
    SweepConfig,
    TranslateConfig,
    VerifyConfig,
)
from pretraining.config.help import help_text
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError, LaunchError, LostPeerError, PathError, Preempted, PretrainError
from pretraining.files import path_error
from pretraining.launch.cpu_threads import set_threads, torch_is_imported
from pretraining.launch.layout import ProcessLayout, resolve_layout
from pretraining.launch.program import FAILED, run_as_program
from pretraining.launch.signals import (
    INTERRUPTED,
    ReceivedSignals,
    exit_at_interrupt,
    mark_time_limit,
    terminate_with_launcher,
)
from pretraining.launch.terminal import ignore_output_errors, log_to_terminal, print_text
from pretraining.tools.translate.hook import translate_when_needed

log = logging.getLogger(__name__)


def train_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Train a model."""
    signals = ReceivedSignals().listen()
    terminate_with_launcher()
    resolved = resolve_config(TrainConfig, overrides, flags, (), translate_when_needed)
    config = resolved.config
    if not config.run.dry_run:
        ignore_output_errors()
    layout = resolve_layout(os.environ)
    if torch_is_imported():
        log.info("torch is imported already: it keeps its number of threads")
    threads = set_threads(config.run.cpu_threads, layout)
    if config.parallel.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that nothing of PyTorch takes memory on a GPU
    with exit_at_interrupt(WHEN_INTERRUPTED):  # torch is imported only when there is something to train
        from pretraining.train.preemption import stop_requests
        from pretraining.train.run import train

        if config.run.dry_run:
            from pretraining.tools.dry_run import dry_run

    requests = stop_requests(signals, config.run.time_limit)
    if config.run.dry_run:
        dry_run(resolved, layout, requests, threads)
    else:
        train(config, layout, requests, threads)


@dataclass(frozen=True)
class Command:
    """What `pretrain NAME` does.

    Attributes:
        function: takes the settings, as "module:function" of `pretraining`.
        purpose: for the list of commands.
        reads_words: whether the function takes the words of the command line and its flags instead.
    """

    settings: type
    function: str
    purpose: str
    reads_words: bool = False

    def run(self, overrides: Sequence[str], flags: dict[str, str]) -> None:
        """Run the command; its module is imported now, and torch gets as many threads as fit."""
        module, _, name = self.function.partition(":")
        if self.reads_words:
            getattr(import_module(f"pretraining.{module}"), name)(overrides, flags)
            return
        config: Any = parse_config(self.settings, overrides, flags, translate=translate_when_needed)
        if (layout := _layout()) is not None:
            set_threads(config.run.cpu_threads if isinstance(config, TrainConfig) else None, layout)
        getattr(import_module(f"pretraining.{module}"), name)(config)


COMMANDS = {
    "train": Command(TrainConfig, "cli:train_command", "train a model", reads_words=True),
    "prepare": Command(
        PrepareConfig,
        "tools.prepare.prepare:prepare_in_job",
        "turn text into token files; trains a tokenizer where none is given",
    ),
    "inspect": Command(
        InspectConfig,
        "tools.inspect:inspect_command",
        "show what steps train on, from the settings of a run or a checkpoint",
        reads_words=True,
    ),
    "list": Command(ListConfig, "tools.list_checkpoints:list_checkpoints", "show the checkpoints of a run"),
    "push": Command(
        PushConfig,
        "tools.push:push",
        "copy the checkpoints of a run into an object store",
    ),
    "report": Command(
        PageConfig, "tools.report:report", "write a page about a run, or several: curves, events, settings"
    ),
    "sample": Command(SampleConfig, "tools.sample:sample", "continue a prompt with a trained model"),
    "export": Command(
        ExportConfig, "tools.export:export", "write a checkpoint for Hugging Face's transformers, or as .pt files"
    ),
    "import": Command(ImportConfig, "tools.import_weights:import_weights", "make a run of a Hugging Face Llama"),
    "plan": Command(
        PlanConfig, "tools.planner:plan", "say what a run takes of GPUs, and how fast it is, before it is started"
    ),
    "sweep": Command(
        SweepConfig,
        "tools.sweep:sweep",
        "train every combination of the values that settings are given",
        reads_words=True,
    ),
    "translate": Command(
        TranslateConfig, "tools.translate.translate:translate", "turn another system's file of settings into a recipe"
    ),
    "verify": Command(
        VerifyConfig, "tools.verify:verify", "read checkpoints or token files wholly and name every fault"
    ),
    "doctor": Command(DoctorConfig, "tools.doctor:doctor", "measure devices, disk and links, and name what is slow"),
}

WHEN_INTERRUPTED = "interrupted; the same command resumes from what is complete"
HEAD_START = 3.0
"""Seconds that a process which says nothing leaves to the one that does: as one ends, a launcher kills the others."""


def run_console_script() -> NoReturn:
    """Run the command of this process's arguments, and end the process."""
    run_as_program(main)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and return; `arguments` without the program's name, by default those of this process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    layout = _layout()
    log_to_terminal(layout.rank if layout else 0)
    try:
        _run(arguments)
    except PretrainError as error:
        _fail(error)
    except OSError as error:
        if error.filename is None:
            _end_without_output(error)
        failure = path_error(error)
        failure.rank = layout.rank if layout and layout.world_size > 1 else None  # the others do not know of it
        _fail(failure)
    except KeyboardInterrupt:
        if _speaks(for_all_nodes=True):
            print(WHEN_INTERRUPTED, file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run(arguments: Sequence[str]) -> None:
    name = arguments[0] if arguments else "--help"
    helps = [each for each in arguments if each in ("--help", "-h") or each.startswith("--help=")]
    if name == "--version":
        import platform
        from importlib.metadata import version

        print(f"pretraining {__version__}, torch {version('torch')}, Python {platform.python_version()}")
    elif name not in COMMANDS:
        lines = "\n".join(f"  pretrain {command:10} {row.purpose}" for command, row in COMMANDS.items())
        text = f"Commands:\n{lines}\n`pretrain COMMAND --help` explains every flag, --help=FLAG one."
        if arguments and not name.startswith("-"):
            raise ConfigError(f"unknown command {name!r}. {text}")
        print(text)
    elif helps:
        row, topic = COMMANDS[name], helps[0].partition("=")[2] or None
        print(help_text(row.settings, f"pretrain {name}", row.purpose, topic=topic))
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # a file's name need not be UTF-8; it is printed as it is
        _check_words(arguments[1:])
        try:
            Path.cwd()  # libraries abort without one
        except OSError as error:
            raise PathError(f"the working folder is gone ({error.strerror}): change to one that is there") from None
        import fire  # here: `--help` does without, and answers at once

        fire.Fire(_taking_text(COMMANDS[name].run), command=arguments[1:], name=f"pretrain {name}")


def _end_without_output(error: OSError) -> NoReturn:
    """End a command whose output cannot be written: quietly if its reader has gone, as head does.

    Any other error of the system that names no path is raised again.
    """
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to complain about at the exit
    if error.errno != errno.EPIPE:
        print(f"error: output cannot be written: {error.strerror}", file=sys.stderr)
    sys.exit(FAILED)


def _check_words(words: Sequence[str]) -> None:
    """Refuse words of dashes alone, behind which fire would drop all others, or take them for flags of its own."""
    for word in words:
        if word.startswith("-") and not word.partition("=")[0].strip("-"):
            raise ConfigError(f"{word!r} is no setting: leave it out, or write --name=value where it is a value")


def _taking_text(command: Callable[[Sequence[str], dict[str, str]], None]) -> Callable[..., None]:
    """Return the command as fire calls it: every value as the text that was typed."""

    def run(*overrides: str, **flags: Any) -> None:
        command(overrides, flags)

    from fire.decorators import SetParseFn

    as_typed: Callable[..., None] = SetParseFn(str)(run)
    return as_typed


def _fail(error: PretrainError) -> NoReturn:
    """Print an error, if no other process prints the same one, and end this process."""
    if isinstance(error, Preempted) and error.is_out_of_time:
        mark_time_limit()
    if error.rank is not None:
        print_text(f"error: rank {error.rank}: {error}", file=sys.stderr, flush=True)
    elif _speaks(for_all_nodes=error.is_everywhere):
        prefix = "" if isinstance(error, Preempted) else "error: "
        print_text(f"{prefix}{error}", file=sys.stderr, flush=True)
    else:
        time.sleep(HEAD_START)
    layout = _layout()
    if isinstance(error, LostPeerError) or (error.rank is not None and layout is not None and layout.world_size > 1):
        sys.stdout.flush()
        os._exit(error.exit_code)  # alone with it: the usual end may wait for processes that are elsewhere, or dead
    sys.exit(error.exit_code)


def _speaks(for_all_nodes: bool) -> bool:
    """Return whether this process prints for the job or for its node; without a layout it does."""
    layout = _layout()
    return layout is None or (layout.rank if for_all_nodes else layout.local_rank) == 0


def _layout() -> ProcessLayout | None:
    """Return that of this process; None if it cannot be read, which is an error of the commands that need one."""
    try:
        return resolve_layout(os.environ)
    except LaunchError:
        return None
