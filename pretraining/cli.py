"""The command line: `pretrain COMMAND --flag=value …`, one row per command.

fire splits the words; the text of each value goes to the settings' own parser, because fire would turn `false` into a
true string and let unknown flags through. Errors for users are printed once and end the process with status 1, as does
what the file system says about a path; other exceptions keep their traceback.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pretraining import __version__
from pretraining.config.command_line import parse_config, resolve_config, value_given, value_on_command_line
from pretraining.config.commands import (
    DoctorConfig,
    ExportConfig,
    ImportConfig,
    InspectConfig,
    ListConfig,
    PageConfig,
    PlanConfig,
    PrepareConfig,
    SampleConfig,
    SweepConfig,
    TranslateConfig,
    VerifyConfig,
)
from pretraining.config.help import help_text
from pretraining.config.recipes import parse_recipe
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError, LaunchError, LostPeerError, PathError, Preempted, PretrainError
from pretraining.files import path_error
from pretraining.launch.cpu_threads import set_threads, torch_is_imported
from pretraining.launch.layout import ProcessLayout, resolve_layout
from pretraining.launch.program import FAILED, run_as_program
from pretraining.launch.signals import (
    INTERRUPTED,
    ReceivedSignals,
    end_with_launcher,
    leave_at_interrupt,
    tell_launcher_that_time_is_over,
)
from pretraining.launch.terminal import (
    log_to_terminal,
    outlive_readers,
    output_failure,
    print_text,
    showing_through,
)
from pretraining.tools.translate.hook import translate_when_needed

log = logging.getLogger(__name__)


def train_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Trains a model."""
    if not value_on_command_line("dry_run", overrides, flags, translate_when_needed):
        outlive_readers()
    signals = ReceivedSignals().listen()
    end_with_launcher()
    resolved = resolve_config(TrainConfig, overrides, flags, (), translate_when_needed)
    config = resolved.config
    layout = resolve_layout(os.environ)
    if torch_is_imported():
        log.info("torch is imported already: it keeps its number of threads")
    threads = set_threads(config.run.cpu_threads, layout)
    if config.parallel.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that nothing of PyTorch takes memory on a GPU
    with leave_at_interrupt(_interrupted("train")):  # torch is imported only when there is something to train
        from pretraining.train.preemption import stop_requests
        from pretraining.train.run import train

        if config.run.dry_run:
            from pretraining.tools.dry_run import dry_run

    requests = stop_requests(signals, config.run.time_limit)
    if not config.run.dry_run:
        train(config, layout, requests, threads)
        return
    dry_run(resolved, layout, requests, threads)


def prepare_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Turns text into token files."""
    config = parse_config(PrepareConfig, overrides, flags)
    layout = resolve_layout(os.environ)
    from pretraining.tools.prepare.prepare import prepare

    prepare(config, layout=layout)


def inspect_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Shows what steps train on: those of the run that `train` would start or go on with, or of a named checkpoint."""
    translate = translate_when_needed
    named = value_on_command_line("ckpt_load_path", overrides, flags, translate)
    named = named or value_on_command_line("resume_from_checkpoint", overrides, flags, translate)
    if value_given("weights_only", overrides, flags, translate):
        named = None  # a new run, with the settings and the data that `train` would begin it with
    if named is None:
        config = parse_config(InspectConfig, overrides, flags, translate=translate)
    from pretraining.checkpoint.manifest import run_of
    from pretraining.checkpoint.start_point import adopt_settings, find_newest, find_start, newest_run_path

    path = config.checkpoint.ckpt_save_path if named is None else named
    path = None if path is None else newest_run_path(path)
    # What steps train on stands in the manifest; whether the tensors are whole does not matter here.
    if named is None:
        start = find_start(replace(config.checkpoint, ckpt_save_path=path))
    else:
        start = find_newest(Path(path or ""))
        settings = parse_recipe(start.manifest.config, f"config of {start.path}")
        config = parse_config(InspectConfig, overrides, flags, settings, translate)
    with showing_through(partial(print, file=sys.stderr, flush=True)):  # stdout is for the answer
        config = adopt_settings(config, start)
    from pretraining.tools.inspect import inspect

    # Where the weights alone are taken, the data begins with them.
    manifest = start.manifest if start and not start.weights_only else None
    state, size = (manifest.data, manifest.global_batch_size) if manifest else (None, None)
    inspect(config, state, size, None if path is None else run_of(Path(path)))


def sample_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Continues a prompt."""
    config = parse_config(SampleConfig, overrides, flags)
    set_threads(None, resolve_layout(os.environ))
    from pretraining.tools.sample import sample

    sample(config)


def sweep_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Trains a grid of runs."""
    from pretraining.tools.sweep import sweep

    sweep(overrides, flags)


def verify_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Checks checkpoints or token files."""
    config = parse_config(VerifyConfig, overrides, flags)
    from pretraining.tools.verify import verify

    verify(config)


def doctor_command(overrides: Sequence[str], flags: dict[str, str]) -> None:
    """Measures the machines that training would run on."""
    config = parse_config(DoctorConfig, overrides, flags, translate=translate_when_needed)
    layout = resolve_layout(os.environ)
    set_threads(config.run.cpu_threads, layout)  # as training does
    from pretraining.tools.doctor import doctor

    if doctor(config, layout) == "bad":
        sys.exit(FAILED)


@dataclass(frozen=True)
class Command:
    """What `pretrain NAME` does.

    Attributes:
        function: takes the settings, as "module:function" of `pretraining.tools`; or a function of this module, which
            takes the words of the command line and its flags.
        purpose: for the list of commands.
        when_interrupted: what was done by then, and what the same command does.
    """

    settings: type
    function: str | Callable[[Sequence[str], dict[str, str]], None]
    purpose: str
    when_interrupted: str = "nothing was changed"

    def run(self, overrides: Sequence[str], flags: dict[str, str]) -> None:
        """Run the command; its module is imported now."""
        if not isinstance(self.function, str):
            self.function(overrides, flags)
            return
        translate = translate_when_needed if issubclass(self.settings, TrainConfig) else None
        config: Any = parse_config(self.settings, overrides, flags, translate=translate)
        module, _, name = self.function.partition(":")
        getattr(import_module(f"pretraining.tools.{module}"), name)(config)


_STARTS_AGAIN = "nothing was written; the same command starts again"
COMMANDS = {
    "train": Command(
        TrainConfig,
        train_command,
        "train a model",
        "the same command resumes from the newest checkpoint, if there is one",
    ),
    "prepare": Command(
        PrepareConfig,
        prepare_command,
        "turn text into token files; trains a tokenizer where none is given",
        "the same command resumes after the token files that are complete",
    ),
    "inspect": Command(
        InspectConfig, inspect_command, "show what steps train on, from the settings of a run or a checkpoint"
    ),
    "list": Command(ListConfig, "list_checkpoints:list_checkpoints", "show the checkpoints of a run"),
    "report": Command(PageConfig, "report:report", "write a page about a run, or several: curves, events, settings"),
    "sample": Command(SampleConfig, sample_command, "continue a prompt with a trained model"),
    "export": Command(
        ExportConfig,
        "export:export",
        "write a checkpoint for Hugging Face's transformers, or as .pt files",
        _STARTS_AGAIN,
    ),
    "import": Command(
        ImportConfig, "import_weights:import_weights", "make a run of a Hugging Face Llama", _STARTS_AGAIN
    ),
    "plan": Command(PlanConfig, "plan:plan", "say what a run takes of GPUs, and how fast it is, before it is started"),
    "sweep": Command(
        SweepConfig,
        sweep_command,
        "train every combination of the values that settings are given",
        "the same command resumes the run that was under way",
    ),
    "translate": Command(
        TranslateConfig, "translate.translate:translate", "turn another system's file of settings into a recipe"
    ),
    "verify": Command(VerifyConfig, verify_command, "read checkpoints or token files wholly and name every fault"),
    "doctor": Command(DoctorConfig, doctor_command, "measure devices, disk and links, and name what is slow"),
}

REMOVED_COMMANDS = {"completion": "`pretrain COMMAND --help` lists the flags"}

HEAD_START = 3.0
"""Seconds that a process which says nothing leaves to the one that does: as one ends, a launcher kills the others."""


def run_console_script() -> NoReturn:
    """The program `pretrain`: run the command of this process's arguments, and end the process."""
    run_as_program(main)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and returns; `arguments` without the program's name, by default those of this process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    helps = [argument for argument in arguments if argument in ("--help", "-h") or argument.startswith("--help=")]
    wants_help = bool(helps)
    name = arguments[0] if arguments else ""
    if name == "--version":
        import platform
        from importlib.metadata import version

        _print(f"pretraining {__version__}, torch {version('torch')}, Python {platform.python_version()}")
        return
    if name not in COMMANDS:
        _explain_commands(name, wants_help)
    command = COMMANDS[name]
    if wants_help:
        _print_help(command.settings, name, command.purpose, helps[0].partition("=")[2] or None)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a file's name need not be UTF-8; it is printed as it is
    layout = _layout()
    log_to_terminal(layout.rank if layout else 0)
    try:
        _check_working_folder()
        _check_words(arguments[1:])
        import fire  # here: `--help` does without, and answers at once

        fire.Fire(_taking_text(command.run), command=arguments[1:], name=f"pretrain {name}")
    except PretrainError as error:
        _fail(error)
    except OSError as error:
        if error.filename is None:  # of no path that a user could mend
            if (of_output := output_failure()) is not None:
                _end_without_output(of_output)
            raise
        failure = path_error(error)
        failure.rank = layout.rank if layout and layout.world_size > 1 else None  # the others do not know of it
        _fail(failure)
    except KeyboardInterrupt:
        if _speaks(for_all_nodes=True):
            print(_interrupted(name), file=sys.stderr)
        sys.exit(INTERRUPTED)


def _print_help(settings: type, name: str, purpose: str, topic: str | None) -> None:
    try:
        _print(help_text(settings, f"pretrain {name}", purpose, topic=topic))
    except PretrainError as error:
        _fail(error)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        _end_without_output(error)


def _end_without_output(error: OSError) -> NoReturn:
    """Ends where nothing can be printed any more: quietly where the reader has gone, as head does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to complain about at the exit
    if not isinstance(error, BrokenPipeError):
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
    sys.exit(FAILED)


def _check_working_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise PathError(
            f"the folder that this command was started in is gone ({error.strerror}): change to one that is there"
        ) from None


def _check_words(words: Sequence[str]) -> None:
    """Refuses words of dashes alone, behind which fire would drop all others, or take them for flags of its own."""
    for word in words:
        if word.startswith("-") and not word.partition("=")[0].strip("-"):
            raise ConfigError(
                f"{word!r} is no setting, and what stands behind it would not be read: leave it out, or write "
                "--name=value in one word where it is a value"
            )


def _interrupted(name: str) -> str:
    return f"interrupted; {COMMANDS[name].when_interrupted}"


def _taking_text(command: Callable[[Sequence[str], dict[str, str]], None]) -> Callable[..., None]:
    """The command as fire calls it: every value as the text that was typed."""

    def run(*overrides: str, **flags: Any) -> None:
        command(overrides, flags)

    from fire.decorators import SetParseFn

    as_typed: Callable[..., None] = SetParseFn(str)(run)
    return as_typed


def _explain_commands(name: str, wants_help: bool) -> NoReturn:
    lines = "\n".join(f"  pretrain {command:10} {row.purpose}" for command, row in COMMANDS.items())
    text = f"Commands:\n{lines}\n`pretrain COMMAND --help` explains every flag, --help=FLAG one."
    if not name or (wants_help and name.startswith("-")):
        _print(text)
        sys.exit(0)
    removed = f": it is gone, {REMOVED_COMMANDS[name]}" if name in REMOVED_COMMANDS else ""
    print(f"error: unknown command {name!r}{removed}. {text}", file=sys.stderr)
    sys.exit(FAILED)


def _fail(error: PretrainError) -> NoReturn:
    """Prints an error, where no other process prints the same one, and ends this process."""
    if isinstance(error, Preempted) and error.is_out_of_time:
        tell_launcher_that_time_is_over()
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
    """Whether this process is the one that speaks, for the job or for its node; without a place it is."""
    layout = _layout()
    return layout is None or (layout.rank if for_all_nodes else layout.local_rank) == 0


def _layout() -> ProcessLayout | None:
    """Of this process; None where nobody can read it, which is an error later, of the commands that need one."""
    try:
        return resolve_layout(os.environ)
    except LaunchError:
        return None
