"""What every reader of a foreign form works with: the file, and a record of what became of each of its settings.

    Source -> Translating (a reader sets, leaves out or refuses each key) -> Translation (settings, notes)

A system whose users change its files from the command line merges those arguments into the source first
(`Source.overridden`), or composes several files into one (`Translating.take`); each key knows where it comes from. A
reader accounts for every key. What it does not know is a note, never silence; what would make another model than the
file says is a problem, unless the user accepts a Llama in its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.plugins import TRACKERS
from pretraining.config.settings_files import read_yaml
from pretraining.config.values import BOOL_WORDS, NONE_WORDS, Raw, did_you_mean, format_value
from pretraining.errors import ConfigError
from pretraining.progress import parse_number

ACCEPT_LLAMA = "accept_llama"
"""The flag with which a user takes a Llama of the same shape where a file describes another model."""

FILLED_IN = "its default, not in the file"
"""Remark about a key that a reader has filled in."""
COMMAND_LINE = "the command line"
"""The name of the source whose keys are arguments."""

NOT_UNDERSTOOD = "Not understood, and not applied:"
"""The heading over keys that a reader does not know."""

WIDEST_COLUMN = 48
"""Of a translation's table; longer entries push what follows to the right."""

_SECRET = re.compile(
    r"(?:^|\.)(?:token|\w*(?:api_key|access_token|auth_token|hub_token|password|secret))$", re.IGNORECASE
)
"""Keys whose values are nobody else's: notes are logged, and written into recipes."""


@dataclass(frozen=True)
class Source:
    """A file of settings as it was read.

    Attributes:
        name: what messages call it.
        path: where it is; None where the settings come from a command line.
        content: its text.
        tree: mappings, lists, texts and None (`settings_files.parse_tree`).
        overrides: what the command line gives besides, by name as written.
        above: of a part of a file, the keys that it stands under, each with its dot.
        origins: of keys that another source gives: that source, and the key in it. What is below such a key comes from
            there, too.
    """

    name: str
    path: Path | None
    content: str
    tree: Mapping[str, Any]
    overrides: Mapping[str, Raw] = field(default_factory=dict)
    above: str = ""
    origins: Mapping[str, tuple[Source, str]] = field(default_factory=dict)

    def part(self, key: str) -> Source:
        """Returns the mapping under a dotted key as a source of its own."""
        tree: Any = self.tree
        for name in key.split("."):
            tree = tree[name]
        return replace(self, tree=tree, above=f"{self.above}{key}.")

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
        for part in f"{self.above}{key}".split("."):
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
        line: of the file; None = it does not stand there.
        origin: the name of the source that gives it; COMMAND_LINE for an argument.
        is_included: whether that is another file, which a key of the translated one names.
        is_known: whether the reader knows the key.
    """

    key: str
    value: str
    settings: Mapping[str, str]
    remark: str
    line: int | None
    origin: str = field(default="", compare=False)
    is_included: bool = False
    is_known: bool = True

    @property
    def given(self) -> str:
        """Key and value as they stand in the file, behind the name of one that is included."""
        return f"{f'{self.origin}: ' if self.is_included else ''}{self.key}: {self.value}"

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
        notes: one for each key of the file, in its order, then those of files that it names and of what is not given.
        used_overrides: names of the command line's arguments that were read with the file.
    """

    kind: str
    settings: Mapping[str, str]
    notes: tuple[Note, ...]
    used_overrides: frozenset[str] = frozenset()

    def table(self) -> list[str]:
        """Returns a line for each key: what it says, what it became, and why or what is different.

        Keys that the reader does not know come last, under a heading of their own. Where keys come from several files
        that make one tree, each line names its own.
        """
        known, unknown = self.known, self.unknown
        several = len({note.origin for note in self.notes if not note.is_included}) > 1
        rows = [
            (
                note.given,
                note.became or "-",
                f"{note.remark} [{note.origin}]".strip() if several else note.remark,
            )
            for note in (*known, *unknown)
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        widths = [min(width, WIDEST_COLUMN) for width in widths]
        lines = [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]
        return [*lines[: len(known)], *([NOT_UNDERSTOOD] if unknown else []), *lines[len(known) :]]

    @property
    def unknown(self) -> list[Note]:
        """The notes of keys that the reader does not know."""
        return [note for note in self.notes if not note.is_known]

    @property
    def known(self) -> list[Note]:
        """The notes of all other keys."""
        return [note for note in self.notes if note.is_known]

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
        self._filled_in: set[str] = set()
        self._known: dict[str, None] = {}

    def take(self, source: Source) -> None:
        """Puts a source in place of the one that was read: the file with all that belongs to it."""
        self.source = source
        self.values: dict[str, Any] = source.flattened()

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def has(self, key: str) -> bool:
        """Whether a key is given, as a value or as a mapping."""
        return key in self or any(name.startswith(f"{key}.") for name in self.values)

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
        if text.lower() not in BOOL_WORDS:
            raise ConfigError(f"{self.told(key)}: true or false is needed")
        return BOOL_WORDS[text.lower()]

    def number(self, key: str) -> float | None:
        """Returns a number; None where it is missing or null.

        Raises:
            ConfigError: it is none.
        """
        text = self.text(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise ConfigError(f"{self.told(key)}: a number is needed") from None

    def set(self, key: str, remark: str = "", **settings: str | float | None) -> None:
        """Says what a key became; no settings mean that the default here is the same. None is no value.

        Of an argument of the command line, the first setting is what the user asked for; others follow from it, and
        give way to what the user says about them.
        """
        given = {name: format_value(value) for name, value in settings.items() if value is not None}
        self._settings |= given
        self._note(key, given, remark)

    def leave_out(self, key: str, reason: str) -> None:
        """Says that a key has no equivalent, and why that does not matter or what to do."""
        self._note(key, {}, reason)

    def refuse(self, key: str, problem: str, *settings: str) -> None:
        """Says that a key's value cannot be translated.

        Args:
            settings: that the key would have set. Where the command line gives one of them, it wins over the file, and
                the key is left out.
        """
        if self.is_overridden(*settings) and self.source.origin_of(key)[0].name != COMMAND_LINE:
            self.leave_out(key, f"the command line says {' or '.join(settings)}")
            return
        self.add_problem(key, problem)
        self._note(key, {}, problem)

    def add_problem(self, key: str, problem: str) -> None:
        """Says what is wrong with a key beside what became of it."""
        self._problems.append(f"{self.told(key)}: {problem}")

    def assume(self, key: str, remark: str, **settings: str | float) -> None:
        """Says what holds where the file does not give a key: its system's own default, or what the user is to give.

        Nothing is assumed where another key has set one of the settings: it is called after everything else.
        """
        if not self.has(key) and self._settings.keys().isdisjoint(settings):
            given = {name: format_value(value) for name, value in settings.items()}
            self._settings |= given
            self._notes[key] = Note(f"{self.source.above}{key}", "(not given)", given, remark, None, self.source.name)

    def refuse_unless_accepted(self, key: str, reason: str) -> None:
        """Says that a key makes the model no Llama."""
        if self._accept_llama:
            self._note(key, {}, f"{reason}; left out, as accept_llama says")
        else:
            self.refuse(key, f"{reason}. --{ACCEPT_LLAMA}=true trains a Llama of the same shape without it")

    def leave_out_groups(self, groups: Mapping[str, str]) -> None:
        """Leaves out every key under these, or equal to one, that is given and not settled, with the group's reason."""
        self.know(groups)
        for group, reason in groups.items():
            for key in self.values:
                if (key == group or key.startswith(f"{group}.")) and key in self and key not in self._notes:
                    self.leave_out(key, reason)

    def include(self, part: Translating) -> None:
        """Takes over what became of a part of the file, or of another file that a key of it names."""
        try:
            done = part.finish()
        except ConfigError as error:
            self._problems += error.problems
            return
        self._settings |= done.settings
        for note in done.notes:
            if part.source.above:
                self._notes[note.key.removeprefix(self.source.above)] = note
            else:
                self._notes[f"{note.origin}: {note.key}"] = replace(note, is_included=True)

    def is_overridden(self, *settings: str) -> bool:
        """Whether the command line gives one of these settings, which then wins over the file."""
        names = {name.replace("-", "_").lower().rpartition(".")[2] for name in self.source.overrides}
        return not names.isdisjoint(settings)

    def in_force(self, setting: str, key: str) -> str | None:
        """Returns what the command line gives as a setting, or else a key of the file."""
        for written, raw in self.source.overrides.items():
            if written.replace("-", "_").lower().rpartition(".")[2] == setting:
                return str(raw)
        return self.text(key)

    def use_override(self, name: str) -> None:
        """Says that an argument of the command line was read with the file."""
        self._used.add(name)

    def fill_in(self, defaults: Mapping[str, str]) -> None:
        """Adds keys that the file leaves out, with what its system takes for them; their notes say so."""
        for key, text in defaults.items():
            if key not in self.values:
                self.values[key] = text
                self._filled_in.add(key)

    def place(self, key: str) -> str:
        """Returns file, line and key for a message; of an argument its name."""
        return self._note_for(key).place

    def know(self, keys: Iterable[str]) -> None:
        """Says which keys a file may have, for a misspelt one is asked whether it means one of them."""
        self._known |= dict.fromkeys(keys)

    def apply(self, table: Mapping[str, Rule]) -> None:
        """Settles the keys of a table that are there and not settled yet; null means that nothing was given."""
        self.know(table)
        for key, rule in table.items():
            if key in self and key not in self._notes:
                try:
                    rule(self, key)
                except ConfigError as error:
                    self._problems += [each for each in error.problems if each not in self._problems]
                    self._note(key, {}, "cannot be read")

    def finish(self) -> Translation:
        """Returns the translation; keys that nothing has settled are left out, with a note each.

        Raises:
            TranslationError: carries every problem of the file.
        """
        for key, value in self.values.items():
            if key not in self._notes:
                if value is None or value == {}:
                    self._note(key, {}, "not given")
                else:
                    self._note(key, {}, f"not known to the reader of {self._kind} files{self._nearest(key)}")
                    self._notes[key] = replace(self._notes[key], is_known=False)
        positions = {key: position for position, key in enumerate(self.values)}
        notes = tuple(
            self._notes[key] for key in sorted(self._notes, key=lambda key: positions.get(key, len(positions)))
        )
        problems = dict.fromkeys((*self._problems, *self._contradictions(notes)))  # two rules may read one bad value
        if problems:
            raise TranslationError(list(problems), frozenset(self._used))
        return Translation(self._kind, self._settings, notes, frozenset(self._used))

    def understands_nothing(self) -> bool:
        """Whether a finished translation has keys of files or arguments, and knows none of them."""
        given = [
            key
            for key, value in self.values.items()
            if value not in (None, {}) and key not in self._filled_in and self._is_from_a_user(key)
        ]
        return bool(given) and not any(self._notes[key].is_known for key in given)

    def _is_from_a_user(self, key: str) -> bool:
        origin = self.source.origin_of(key)[0]
        return origin is self.source or origin.path is not None or origin.name == COMMAND_LINE

    def _nearest(self, key: str) -> str:
        """Returns a question about the known key that an unknown one may mean, of its own section or else of any."""
        section, _, name = key.rpartition(".")
        siblings = [each for each in self._known if each.rpartition(".")[0] == section]
        for known in (siblings, self._known):
            by_name = {each.rpartition(".")[2]: each for each in known}
            nearest = did_you_mean(name, by_name, "{}")
            if nearest:
                return f": did you mean {by_name[nearest]}?"
        return ""

    def _contradictions(self, notes: Iterable[Note]) -> Iterable[str]:
        """Says which settings two keys give different values."""
        first: dict[str, Note] = {}
        for note in notes:
            for setting, value in note.settings.items():
                other = first.setdefault(setting, note)
                if plain(other.settings[setting]) != plain(value):
                    places = f"{other.told} and {note.told}"
                    yield f"two values for {setting}, {other.settings[setting]} and {value}: {places}: keep one"

    def _note(self, key: str, settings: Mapping[str, str], remark: str) -> None:
        assert key in self.values and key not in self._notes, key
        if key in self._filled_in:
            remark = f"{FILLED_IN}; {remark}" if remark else FILLED_IN
        self._notes[key] = self._note_for(key, settings, remark)

    def _note_for(self, key: str, settings: Mapping[str, str] | None = None, remark: str = "") -> Note:
        value = "(not shown)" if _SECRET.search(key) and key in self else _shown(self.values.get(key))
        line = None if key in self._filled_in else self.source.line_of(key)
        origin = self.source.origin_of(key)[0].name
        return Note(f"{self.source.above}{key}", value, settings or {}, remark, line, origin)

    def told(self, key: str) -> str:
        """Returns place and value of a key for a message."""
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
            translating.refuse(key, str(error), setting)

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


def half_precision(dtype: str, other: str) -> Rule:
    """A switch for a type that is computed in; `other` is the switch of the other one."""

    def settle(translating: Translating, key: str) -> None:
        of_other = (translating.text(other) or "").lower()
        is_other = BOOL_WORDS.get(of_other, False)
        if translating.is_true(key) and is_other:
            translating.refuse(key, f"{other} is true, too: keep one")
        elif translating.is_true(key):
            translating.set(key, mixed_precision="true", mp_dtype=dtype)
        elif is_other or of_other == "auto":  # whoever fills that in decides; here the device does
            translating.set(key, "off")
        else:
            translating.set(key, mixed_precision="false")

    return settle


def trackers(translating: Translating, key: str) -> None:
    """A key that lists where reports go, as `report_to` of Hugging Face does."""
    words = (word.strip().lower() for word in (translating.text(key) or "").split(","))
    names = [word for word in words if word not in NONE_WORDS]
    known = [name for name in names if name in TRACKERS]
    others = [name for name in names if name not in (*known, "all")]
    remark = f"{', '.join(others)}: no tracker here, but a class of your own is one" if others else ""
    if "all" in names:
        translating.set(key, "tensorboard, as by default here; --tracker names others")
    elif known or not names:
        translating.set(key, remark, tracker=",".join(known) or "none")
    else:
        translating.leave_out(key, remark)


def of_services(translating: Translating, key: str, listed: str, **settings: str) -> None:
    """A key about names that only trackers with a service have; `listed` is the key that names the trackers."""
    chosen = (translating.text(listed) or "").lower().split(",")
    readers = [name for name in chosen if name in TRACKERS and TRACKERS[name].options]
    if readers or translating.is_overridden("tracker", "report_to"):
        translating.set(key, **settings)
    else:
        translating.leave_out(key, "of wandb and mlflow, and reports go to neither")


def lowest_rate(peak_key: str, default: str = "") -> Rule:
    """A key that is a learning rate, of which a share of the peak is made; `default` is its system's own peak."""

    def settle(translating: Translating, key: str) -> None:
        lowest = parse_number(translating.text(key) or "")
        peak = parse_number(translating.in_force("learning_rate", peak_key) or default)
        if lowest is None or not peak or not 0 <= lowest <= peak:
            translating.refuse(key, f"a learning rate from 0 to {peak_key.rpartition('.')[2]} is needed")
        else:
            translating.set(key, "of learning_rate", min_lr_ratio=decimal(lowest / peak))

    return settle


def resume_from(translating: Translating, key: str) -> None:
    """A key that names a checkpoint to go on from, or asks for the newest one."""
    text = translating.text(key) or ""
    if text.lower() in BOOL_WORDS:
        translating.set(key, "a run that is found in ckpt_save_path is continued anyway")
    else:
        translating.set(key, resume_from_checkpoint=text)


def checkpoints_kept(text: str) -> str:
    """Writes a number of checkpoints to keep; 0 and less are all of them."""
    number = parse_number(text)
    return "none" if number is not None and number <= 0 else text


def switch(setting: str, remark: str = "", on: str = "true") -> Rule:
    """A key that is a switch for a value of a setting; off, which is the default here, sets nothing."""

    def settle(translating: Translating, key: str) -> None:
        if translating.is_true(key):
            translating.set(key, remark, **{setting: on})
        else:
            translating.set(key, "off, as by default here")

    return settle


def share_of_run(text: str) -> str:
    """Writes a fraction of the run as a percentage: 0.03 is 3%.

    Raises:
        ValueError: it is no fraction.
    """
    number = parse_number(text)
    if number is None or not 0 <= number <= 1:
        raise ValueError("a number from 0 to 1 is needed")
    return f"{decimal(number * 100)}%"


def decimal(number: Fraction) -> str:
    """Writes a fraction as a decimal number, in as few digits as it takes, or as a float has."""
    return str(number.numerator) if number.denominator == 1 else repr(float(number))


def left_out(reason: str) -> Rule:
    """A key without an equivalent that changes nothing about what is learned."""
    return lambda translating, key: translating.leave_out(key, reason)


def only(*values: str, reason: str) -> Rule:
    """A key of which a Llama has only these values."""
    return _unless(
        values, "as in every Llama", lambda translating, key: translating.refuse_unless_accepted(key, reason)
    )


def as_here(*values: str, reason: str, remark: str = "as here", instead: str = "") -> Rule:
    """A key of which this project has only these values, and which would change what is learned.

    Args:
        instead: the setting that takes its place where the command line gives it.
    """
    settings = [instead] if instead else []
    return _unless(values, remark, lambda translating, key: translating.refuse(key, reason, *settings))


def _unless(values: tuple[str, ...], remark: str, otherwise: Rule) -> Rule:
    """A key that sets nothing where it has one of these values; `otherwise` settles it where it has another."""

    def settle(translating: Translating, key: str) -> None:
        if plain(translating.text(key)) in {plain(value) for value in values}:
            translating.leave_out(key, remark)
        else:
            otherwise(translating, key)

    return settle


def plain(text: str | None) -> object:
    """Returns a text so that 0, 0.0 and 0e0, or True and true, are equal."""
    text = (text or "").strip().lower()
    if text in ("true", "false"):
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    return text if math.isnan(number) else number  # NaN equals nothing, its text does


def _shown(value: Any) -> str:
    """Writes a value of the tree on a line."""
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value)
