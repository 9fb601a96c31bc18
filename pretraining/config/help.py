"""The text of `--help`, generated from the dataclasses of settings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator

from pretraining.config.assignments import ALIASES
from pretraining.config.fields import Setting, sections_of, settings_of
from pretraining.config.recipe_files import shipped_recipes
from pretraining.config.training import TrainConfig
from pretraining.config.values import describe_type, did_you_mean, format_value
from pretraining.durations import Duration
from pretraining.errors import ConfigError

_WIDEST = 110
"""Columns; longer lines of prose are hard to read."""
_NARROWEST = 60
_INDENT = 34
_DURATION = "1000 (steps), 5Btok (tokens; k, M, B, T multiply), 2ep (epochs); intervals also 90s, 30min, 2h, 1h30min"


def help_text(root: type, command: str, purpose: str, width: int | None = None, topic: str | None = None) -> str:
    """Return the text of `--help`: the command's usage, then every setting with its meaning, values and default.

    The command's own groups of settings come before those of training.

    Args:
        root: the command's dataclass of settings.
        command: as typed: `pretrain train`.
        purpose: what the command does, in a few words.
        width: columns; None = the terminal's.
        topic: section or setting to show, as in `--help=optimizer` or `--help=seed`, or a word in names and texts of
            settings, as in `--help=clip`; None = all.

    Raises:
        ConfigError: no section or setting has the word.
    """
    word = (topic or "").lstrip("-").replace("-", "_").lower().rpartition(".")[2]
    word = ALIASES[word].target if word in ALIASES else word
    columns = max(_NARROWEST, min(shutil.get_terminal_size().columns if width is None else width, _WIDEST))
    settings, sections = settings_of(root), list(sections_for_readers(root))
    groups = {name: subject for name, subject, _ in sections if name}
    lines: list[str] = []
    if not word or word in groups:
        lines += [] if word else _introduction(root, command, purpose, groups, columns)
        for name, subject, members in sections:
            if word in ("", name):
                lines += ["", *textwrap.wrap(f"{name}: {subject}" if name else subject, columns)]
                lines += [line for setting in members for line in _format_setting(setting, columns)]
    elif word in settings:
        section = settings[word].section
        lines += textwrap.wrap(f"of {section}: {groups[section]}", columns) if section else []
        lines += _format_setting(settings[word], columns)
        if not settings[word].choices:  # the explanation has them
            lines += _format_entry("", f"Values: {describe_type(settings[word])}", columns)
    elif about := _settings_about(word, settings.values()):
        lines += [line for setting in about for line in _format_setting(setting, columns)]
    else:
        hint = did_you_mean(word, [*groups, *settings], "did you mean {}? ")
        known = ", ".join(groups) or "none"
        raise ConfigError(f"--help={topic}: no such flag or group. {hint}Groups of {command}: {known}")
    if any(setting.base is Duration for setting in settings.values()):
        lines += ["", *_format_entry("DURATION", _DURATION, columns)]
    return "\n".join(lines).lstrip("\n")


def _settings_about(word: str, settings: Iterable[Setting]) -> list[Setting]:
    """Return the settings with a word in their names or texts, those with it in the name first."""
    text = word.replace("_", " ")
    about = [setting for setting in settings if word in setting.name or text in setting.help.lower().replace("-", " ")]
    return sorted(about, key=lambda setting: word not in setting.name)


def _introduction(root: type, command: str, purpose: str, groups: Iterable[str], columns: int) -> list[str]:
    text = "--help=FLAG explains one flag, --help=WORD those that have the word" + (
        f", --help=GROUP one of {', '.join(groups)}" if groups else ""
    )
    lines = [f"{command}: {purpose}", f"usage: {command} [--NAME=VALUE ...]", "", *textwrap.wrap(text, columns)]
    if issubclass(root, TrainConfig):
        shipped = ", ".join(shipped_recipes())
        text = f"settings files (YAML or JSON) or {shipped}; later recipes win, flags win over all"
        lines += ["", *_format_entry("--recipe=A,B", text, columns)]
    return lines


def sections_for_readers(root: type) -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield name, subject and settings of each section; a flat root is one section without a name."""
    sections = sections_of(root) or {"": root}
    shared = sections_of(TrainConfig) if root is not TrainConfig else {}
    for section, section_type in sorted(sections.items(), key=lambda item: item[0] in shared):
        subject = (section_type.__doc__ or "").strip().splitlines()[0]
        yield section, subject, [setting for setting in settings_of(root).values() if setting.section == section]


def _format_entry(flag: str, text: str, columns: int) -> list[str]:
    """Format a flag and its text in two columns."""
    return textwrap.wrap(text, columns, initial_indent=f"  {flag:{_INDENT - 4}}  ", subsequent_indent=" " * _INDENT)


def _format_setting(setting: Setting, columns: int) -> list[str]:
    """Format a flag with a placeholder of its value, and what `_explain` says."""
    placeholders = {int: "N", float: "X", bool: "BOOL", Duration: "DURATION", str: "TEXT"}
    placeholder = "A,B" if setting.many else placeholders[setting.base]
    return _format_entry(f"--{setting.name}={placeholder}", _explain(setting), columns)


def _explain(setting: Setting) -> str:
    """Return a setting's help, its choices if the help does not name them, and its default."""
    words = [setting.help]
    if any(choice not in setting.help for choice in setting.choices):
        words.append(f"({describe_type(setting)})")
    if setting.default is not None:  # the help explains none
        words.append(f"[{describe_default(setting)}]")
    return " ".join(words)


def describe_default(setting: Setting) -> str:
    """Return the default as text."""
    return "must be given" if setting.required else format_value(setting.default) or "empty"
