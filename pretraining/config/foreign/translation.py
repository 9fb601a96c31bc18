"""What every reader of a foreign form works with: the file, and a record of what became of each of its settings.

    Source -> Translating (a reader sets, leaves out or refuses each key) -> Translation (settings, notes)

A system whose users change its files from the command line merges those arguments into the source first
(`Source.overridden`), or composes several files into one (`Translating.take`); each key knows where it comes from. A
reader accounts for every key. What it does not know is a note, never silence; what would make another model than the
file says is a problem, unless the user accepts a Llama in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.settings_files import read_yaml
from pretraining.config.values import Raw, format_value
from pretraining.errors import ConfigError

ACCEPT_LLAMA = "accept_llama"
"""The flag with which a user takes a Llama of the same shape where a file describes another model."""

COMMAND_LINE = "the command line"
"""The name of the source whose keys are arguments."""

WIDEST_COLUMN = 48
"""Of a translation's table; longer entries push what follows to the right."""

_WORDS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


@dataclass(frozen=True)
class Source:
    """A file of settings as it was read.

    Attributes:
        name: what messages call it.
        path: where it is; None where the settings come from a command line.
        content: its text.
        tree: mappings, lists, texts and None (`settings_files.parse_tree`).
        overrides: what the command line gives besides, by name as written.
        origins: of keys that another source gives: that source, and the key in it. What is below such a key comes from
            there, too.
    """

    name: str
    path: Path | None
    content: str
    tree: Mapping[str, Any]
    overrides: Mapping[str, Raw] = field(default_factory=dict)
    origins: Mapping[str, tuple[Source, str]] = field(default_factory=dict)

    def flattened(self) -> dict[str, Any]:
        """Returns the values by dotted key; a list that holds mappings stays as it is, as does an empty mapping."""
        return dict(_flatten(self.tree, ""))

    def origin_of(self, key: str) -> tuple[Source, str]:
        """Returns the source that gives a dotted key, and what the key is called in it."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            above = ".".join(parts[:length])
            if above in self.origins:
                source, name = self.origins[above]
                return source, ".".join([name, *parts[length:]])
        return self, key

    def overridden(self, key_of: Callable[[str], str | None]) -> tuple[Source, list[str]]:
        """Merges arguments of the command line into the tree.

        Args:
            key_of: the dotted key that an argument sets; None where it is not about this file.

        Returns:
            The source with them, and their names as written.
        """
        tree, origins, used = copy_tree(self.tree), dict(self.origins), []
        arguments = Source(COMMAND_LINE, None, "", {})
        for name, raw in self.overrides.items():
            key = key_of(name)
            if key is not None:
                put(tree, key, parse_override(name, raw))
                origins = {each: origin for each, origin in origins.items() if not each.startswith(f"{key}.")}
                origins[key] = (arguments, key)
                used.append(name)
        return replace(self, tree=tree, origins=origins), used

    def line_of(self, key: str) -> int | None:
        """Returns the line that a dotted key stands on, by a search for its parts in order; None if not found."""
        origin, key = self.origin_of(key)
        if origin is not self:
            return origin.line_of(key)
        start, found = 0, None
        for part in key.split("."):
            match = re.compile(rf"(?m)^.*?(?<![\w.])[\"']?{re.escape(part)}[\"']?\s*[:=\].]").search(
                self.content, start
            )
            if match is not None:
                found = start = match.end() - 1
        return None if found is None else self.content.count("\n", 0, found) + 1


def copy_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree whose mappings may be changed."""
    return {key: copy_tree(value) if isinstance(value, dict) else value for key, value in tree.items()}


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key of a tree, and makes the mappings above it."""
    *above, last = key.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def parse_override(name: str, raw: Raw) -> Any:
    """Returns the value of an argument as a tree has it: [1, 2] is a list, {a: 1} a mapping, null nothing.

    Raises:
        ConfigError: brackets or quotes do not match.
    """
    text = raw.strip() if isinstance(raw, str) else raw
    if not isinstance(text, str) or not text.startswith(("[", "{", "'", '"')):
        return None if text is None or text in ("null", "None", "none") else text
    try:
        return read_yaml(text)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{name}={text}: brackets or quotes do not match") from None


def _flatten(tree: Mapping[str, Any], above: str) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@dataclass(frozen=True)
class Note:
    """What became of one foreign setting.

    Attributes:
        key: dotted, as its system writes it.
        value: as written.
        settings: of this project, by name; empty where it has no equivalent, or where nothing had to be set.
        remark: why there is none, or what is different.
        line: of the file.
        origin: the name of the source that gives it; COMMAND_LINE for an argument.
    """

    key: str
    value: str
    settings: Mapping[str, str]
    remark: str
    line: int | None
    origin: str = ""

    @property
    def told(self) -> str:
        """The place and the value in one, for a message."""
        return f"{self.key}={self.value}" if self.origin == COMMAND_LINE else f"{self.place}: {self.value}"

    @property
    def place(self) -> str:
        """File, line and key; of an argument its name."""
        if self.origin == COMMAND_LINE:
            return self.key
        return f"{self.origin}{f':{self.line}' if self.line else ''}: {self.key}"

    @property
    def became(self) -> str:
        """The settings as they would be typed."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Translation:
    """A foreign file as settings of this project.

    Attributes:
        kind: the name of its form.
        settings: values as text by setting; a note holds each of them.
        notes: one for each key of the file, in its order.
        used_overrides: names of the command line's arguments that were read with the file.
    """

    kind: str
    settings: Mapping[str, str]
    notes: tuple[Note, ...]
    used_overrides: frozenset[str] = frozenset()

    def table(self) -> list[str]:
        """Returns a line for each key: what it says, what it became, and why or what is different.

        Where keys come from several files, each line names its own.
        """
        several = len({note.origin for note in self.notes}) > 1
        rows = [
            (
                f"{note.key}: {note.value}",
                note.became or "-",
                f"{note.remark} [{note.origin}]".strip() if several else note.remark,
            )
            for note in self.notes
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        widths = [min(width, WIDEST_COLUMN) for width in widths]
        return [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]

    def note_of(self, setting: str) -> Note:
        """Returns the note of the key that a setting comes from."""
        return next(note for note in reversed(self.notes) if setting in note.settings)


class TranslationError(ConfigError):
    """Carries every problem of a file, and the names of the command line's arguments that were read with it."""

    def __init__(self, problems: list[str], used_overrides: frozenset[str]) -> None:
        super().__init__(problems)
        self.used_overrides = used_overrides


class Translating:
    """A translation in progress: the reader takes each key and says what becomes of it.

    Texts of values are as the file has them; `text` gives None for a key that is missing or null. Each method that
    settles a key may be called once for it.
    """

    def __init__(self, kind: str, source: Source, accept_llama: bool = False) -> None:
        self.take(source)
        self._kind, self._accept_llama = kind, accept_llama
        self._settings: dict[str, str] = {}
        self._notes: dict[str, Note] = {}
        self._problems: list[str] = []
        self._used: set[str] = set()

    def take(self, source: Source) -> None:
        """Puts a source in place of the one that was read: the file with all that belongs to it."""
        self.source = source
        self.values: dict[str, Any] = source.flattened()

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def is_settled(self, key: str) -> bool:
        """Whether it is said what becomes of a key."""
        return key in self._notes

    def text(self, key: str) -> str | None:
        """Returns a key's value; a list as a comma list.

        Raises:
            ConfigError: it is a mapping, or a list of such.
        """
        value = self.values.get(key)
        if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
            return ",".join("none" if item is None else item for item in value)
        if isinstance(value, (dict, list)):
            raise ConfigError(f"{self.place(key)}: a plain value is needed")
        return value

    def is_true(self, key: str) -> bool | None:
        """Returns a switch; None where it is missing or null.

        Raises:
            ConfigError: it is neither true nor false.
        """
        text = self.text(key)
        if text is None:
            return None
        if text.lower() not in _WORDS:
            raise ConfigError(f"{self._told(key)}: true or false is needed")
        return _WORDS[text.lower()]

    def number(self, key: str) -> float | None:
        """Returns a number; None where it is missing or null.

        Raises:
            ConfigError: it is none.
        """
        text = self.text(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise ConfigError(f"{self._told(key)}: a number is needed") from None

    def set(self, key: str, remark: str = "", **settings: str | float | None) -> None:
        """Says what a key became; no settings mean that the default here is the same. None is no value.

        Of an argument of the command line, the first setting is what the user asked for; others follow from it, and
        give way to what the user says about them.
        """
        given = {name: format_value(value) for name, value in settings.items() if value is not None}
        for name, value in given.items():
            if self._settings.get(name, value) != value:
                other = next(note for note in self._notes.values() if name in note.settings)
                self._problems.append(f"{self._told(key)}: {other.told} says another {name} already: keep one")
        self._settings |= given
        self._note(key, given, remark)

    def leave_out(self, key: str, reason: str) -> None:
        """Says that a key has no equivalent, and why that does not matter or what to do."""
        self._note(key, {}, reason)

    def refuse(self, key: str, problem: str) -> None:
        """Says that a key's value cannot be translated."""
        self._problems.append(f"{self._told(key)}: {problem}")
        self._note(key, {}, problem)

    def refuse_unless_accepted(self, key: str, reason: str) -> None:
        """Says that a key makes the model no Llama."""
        if self._accept_llama:
            self._note(key, {}, f"{reason}; left out, as accept_llama says")
        else:
            self.refuse(key, f"{reason}. --{ACCEPT_LLAMA}=true trains a Llama of the same shape without it")

    def use_override(self, name: str) -> None:
        """Says that an argument of the command line was read with the file."""
        self._used.add(name)

    def place(self, key: str) -> str:
        """Returns file, line and key for a message."""
        return self._note_for(key).place

    def apply(self, table: Mapping[str, Rule]) -> None:
        """Settles the keys of a table that are there and not settled yet; null means that nothing was given."""
        for key, rule in table.items():
            if key in self and key not in self._notes:
                try:
                    rule(self, key)
                except ConfigError as error:
                    self._problems += [problem for problem in error.problems if problem not in self._problems]
                    self._note(key, {}, "cannot be read")

    def finish(self) -> Translation:
        """Returns the translation; keys that nothing has settled are left out, with a note each.

        Raises:
            TranslationError: carries every problem of the file.
        """
        for key, value in self.values.items():
            if key not in self._notes:
                reason = (
                    "not given" if value is None or value == {} else f"not known to the reader of {self._kind} files"
                )
                self._note(key, {}, reason)
        if self._problems:
            raise TranslationError(self._problems, frozenset(self._used))
        notes = tuple(self._notes[key] for key in sorted(self._notes, key=list(self.values).index))
        return Translation(self._kind, self._settings, notes, frozenset(self._used))

    def _note(self, key: str, settings: Mapping[str, str], remark: str) -> None:
        assert key in self.values and key not in self._notes, key
        self._notes[key] = self._note_for(key, settings, remark)

    def _note_for(self, key: str, settings: Mapping[str, str] | None = None, remark: str = "") -> Note:
        origin = self.source.origin_of(key)[0].name
        return Note(key, _shown(self.values.get(key)), settings or {}, remark, self.source.line_of(key), origin)

    def _told(self, key: str) -> str:
        return self._note_for(key).told


Rule = Callable[[Translating, str], None]


def becomes(setting: str, convert: Callable[[str], str] = str, remark: str = "") -> Rule:
    """A key that is a setting under another name; a ValueError of `convert` says what is wrong with its value."""

    def settle(translating: Translating, key: str) -> None:
        text = translating.text(key)
        assert text is not None  # `apply` passes over what is not given
        try:
            translating.set(key, remark, **{setting: convert(text)})
        except ValueError as error:
            translating.refuse(key, str(error))

    return settle


def one_of(setting: str, words: Mapping[str, str]) -> Rule:
    """A key whose words mean values of a setting; case does not matter."""

    def convert(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)} is needed")
        return words[text.lower()]

    return becomes(setting, convert)


def betas(translating: Translating, key: str) -> None:
    """A key that holds both decays of Adam's moments."""
    items = (translating.text(key) or "").split(",")
    if len(items) == 2:
        translating.set(key, adam_beta1=items[0], adam_beta2=items[1])
    else:
        translating.refuse(key, "two numbers are needed")


def left_out(reason: str) -> Rule:
    """A key without an equivalent that changes nothing about what is learned."""
    return lambda translating, key: translating.leave_out(key, reason)


def only(*values: str, reason: str) -> Rule:
    """A key of which a Llama has only these values."""

    def settle(translating: Translating, key: str) -> None:
        if plain(translating.text(key)) in {plain(value) for value in values}:
            translating.set(key, "as in every Llama")
        else:
            translating.refuse_unless_accepted(key, reason)

    return settle


def plain(text: str | None) -> object:
    """Returns a text so that 0, 0.0 and 0e0, or True and true, are equal."""
    text = (text or "").strip().lower()
    if text in ("true", "false"):
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    """Writes a value of the tree on a line."""
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value)
