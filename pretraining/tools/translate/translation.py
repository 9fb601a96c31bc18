"""A translation in progress: the values that a file gives, and a record of what becomes of each one.

    values (their key -> Given) -> the rules of one system's table set, leave out or refuse each key -> settings, notes

A rule accounts for one key. A key that no rule knows is an error, as is what would make another model than the file
says; `accept_unknown` and `accept_llama` leave these out. Of two levels (a system's own default < its file < an
argument of the command line) the higher one wins; two values of one level are an error. Flags of this project replace
their own setting, as beside any recipe; `_GIVES_WAY` lists the few that replace more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from pretraining.config.assignments import setting_named
from pretraining.config.fields import settings_of
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TRACKERS, Entry
from pretraining.config.training import TrainConfig
from pretraining.config.values import BOOL_WORDS, NONE_WORDS, did_you_mean, format_value
from pretraining.errors import ConfigError
from pretraining.progress import parse_number
from pretraining.text import format_table

DEFAULT, FILE, ARGUMENT = range(3)
"""Levels of what is given: the system's own default, its file, the command line."""
ACCEPT_LLAMA, ACCEPT_UNKNOWN = "accept_llama", "accept_unknown"
_SECRET = re.compile(r"(?:^|\.)(?:token|\w*(?:api_key|access_token|auth_token|hub_token|password|secret))$", re.I)
"""Keys whose values are not shown: notes are logged, and written into recipes."""
_CHOICES: dict[str, Mapping[str, Entry]] = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "tracker": TRACKERS}
"""Tables of what is chosen by name, with the settings that each choice reads."""
_DATA = ("datasets", "weights", "eval_datasets", "sep_token", "file_type", "token_dtype", "tokenizer_path")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_GIVES_WAY = {
    "data_path": (NONE_WORDS, _DATA),
    "use_dummy_dataset": ([word for word, on in BOOL_WORDS.items() if not on], ("data_path", *_DATA)),
    "mixed_precision": ([word for word, on in BOOL_WORDS.items() if on], ("mp_dtype",)),
    "model_variant": (NONE_WORDS, _SIZES),
}
"""By flag: the words beside which a file stays as it is, and the settings that mean nothing beside another one."""


@dataclass(frozen=True)
class Given:
    """A value that somebody gives to one of their keys.

    Attributes:
        key: dotted, as written.
        text: None is null.
        source: the file's name.
        level: DEFAULT, FILE or ARGUMENT.
    """

    key: str
    text: str | None
    source: str
    level: int = FILE

    @property
    def shown(self) -> str:
        """The value, for messages and notes."""
        return "(not shown)" if _SECRET.search(self.key) and self.text else "null" if self.text is None else self.text

    @property
    def place(self) -> str:
        """File and key; of an argument its name."""
        return self.key if self.level == ARGUMENT else f"{self.source}: {self.key}"

    @property
    def told(self) -> str:
        """Place and value."""
        return f"{self.place}{'=' if self.level == ARGUMENT else ': '}{self.shown}"


@dataclass(frozen=True)
class Note:
    """What became of one of their keys: settings here, and why there are none or what is different."""

    given: Given
    settings: Mapping[str, str]
    remark: str


class Translation:
    """The settings here that a file of another system makes, and a note per key.

    Args:
        values: what is given, by the name that the rules have for a key.
        flags: settings of this project on the command line, as text by name.
        accepts: ACCEPT_LLAMA, ACCEPT_UNKNOWN, or both.
    """

    def __init__(self, values: Mapping[str, Given], flags: Mapping[str, str], accepts: Collection[str]) -> None:
        self.values, self.flags, self.accepts = dict(values), flags, accepts
        self.settings: dict[str, tuple[str, Given]] = {}
        self.notes: dict[str, Note] = {}
        self.problems: list[str] = []

    def __contains__(self, key: str) -> bool:
        return self.text(key) is not None

    def text(self, key: str) -> str | None:
        """Return the value of a key; None if it is missing or null."""
        return self.values[key].text if key in self.values else None

    def word(self, key: str) -> str:
        """Return the value of a key in lower case, with underscores; "" if there is none."""
        return (self.text(key) or "").strip().lower().replace("-", "_")

    def is_on(self, key: str) -> bool | None:
        """Return a switch; None if it is missing, a ConfigError if it is none."""
        text = self.text(key)
        if text is not None and text.lower() not in BOOL_WORDS:
            raise ConfigError(f"{self.values[key].told}: true or false is needed")
        return None if text is None else BOOL_WORDS[text.lower()]

    def number(self, key: str, setting: str = "") -> Fraction | None:
        """Return a number, of the flag for `setting` if there is one; None if it is missing.

        Raises:
            ConfigError: the text is no number.
        """
        text = self.flags.get(setting) or self.text(key)
        number = parse_number(text or "")
        if text is not None and number is None:
            raise ConfigError(f"{self.values[key].told if key in self.values else key}: a number is needed")
        return number

    def count(self, key: str, setting: str = "", smallest: int = 1) -> int | None:
        """Return a whole number as `number` does; a ConfigError if it is none, or below the smallest."""
        number = self.number(key, setting)
        if number is not None and (number.denominator != 1 or number < smallest):
            place = f"--{setting}={number}" if setting in self.flags else self.values[key].told
            raise ConfigError(f"{place}: a whole number from {smallest} on is needed")
        return None if number is None else int(number)

    def fill_in(self, defaults: Mapping[str, str]) -> None:
        """Add what the other system takes for keys that nobody gives."""
        self.values |= {key: Given(key, text, "", DEFAULT) for key, text in defaults.items() if key not in self}

    def set(self, key: str, remark: str = "", **settings: object) -> None:
        """Say what a key becomes; None is no value. Without settings, this project does the same anyway."""
        given = self.values[key]
        texts = {name: format_value(value) for name, value in settings.items() if value is not None}
        of_default = "default there, not in the file" if given.level == DEFAULT else ""
        self.notes[key] = Note(given, texts, "; ".join(filter(None, (of_default, remark))))
        for name, text in texts.items():
            self._put(name, text, given)

    def left(self, key: str, reason: str) -> None:
        """Say that a key has no equivalent, and why that does not matter or what to do; no key, no note."""
        if key in self.values:
            self.set(key, reason)

    def refuse(self, key: str, problem: str, *settings: str) -> None:
        """Say that a value cannot be translated, unless a flag for one of these settings wins over it."""
        winner = next((name for name in settings if name in self.flags), None)
        if winner is not None and self.values[key].level != ARGUMENT:
            self.left(key, f"--{winner} wins")
        else:
            self.problems.append(f"{self.values[key].told}: {problem}")
            self.left(key, problem)

    def settle(self, combine: Callable[[Translation], None], rules: Mapping[str, Rule]) -> None:
        """Settle the keys that mean something together, then each of the others by its rule."""
        try:
            combine(self)
        except ConfigError as error:
            self.problems += error.problems
        for key in [key for key in self.values if key not in self.notes]:
            rule = rule_for(key, rules)
            try:
                if key not in self:
                    self.left(key, "not given")
                elif rule is not None:
                    rules[rule](self, key)
                else:
                    self._settle_unknown(key, rules)
            except ConfigError as error:
                self.problems += error.problems

    def _settle_unknown(self, key: str, rules: Iterable[str]) -> None:
        """Take a key without a rule for a setting of this project, or refuse it."""
        ours = setting_named(key)
        if ours is not None:
            self.set(key, "", **{ours: self.text(key)})
        elif ACCEPT_UNKNOWN in self.accepts:
            self.left(key, "not known, and not applied")
        else:
            hint = did_you_mean(key, [name.removesuffix(".*") for name in rules], ": did you mean {}")
            self.refuse(key, f"not known{hint}. --{ACCEPT_UNKNOWN}=true leaves such keys out")

    def include(self, part: Translation) -> None:
        """Take over what became of another file, which one of the keys names."""
        self.problems += part.problems
        self.notes |= {f"{note.given.source}: {key}": note for key, note in part.notes.items()}
        for name, (text, given) in part.settings.items():
            self._put(name, text, given)

    def finish(self) -> None:
        """Leave out what flags replace and what nothing chosen reads, and put the notes in the order of the keys.

        Raises:
            ConfigError: carries every problem.
        """
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        for flag, (harmless, names) in _GIVES_WAY.items():
            if flag in self.flags and self.flags[flag].strip().lower() not in harmless:
                self._drop(names, f"--{flag} takes its place", FILE)
        for setting, table in _CHOICES.items():
            default = format_value(settings_of(TrainConfig)[setting].default)
            chosen = self.flags.get(setting) or self.settings.get(setting, (default,))[0]
            known = [name for name in chosen.lower().split(",") if name in table]
            read = {option for name in known for option in table[name].options}
            unread = {option for entry in table.values() for option in entry.options if known} - read
            # A schedule's own lengths change what is learned: those of a file are an error as beside any recipe.
            self._drop(unread, f"{chosen} does not read it", DEFAULT if setting == "schedule" else FILE)
        self.notes = {
            key: replace(note, settings={name: text for name, text in note.settings.items() if self._owns(note, name)})
            for key in dict.fromkeys((*self.values, *self.notes))
            if (note := self.notes.get(key))
        }

    def note_of(self, setting: str) -> Note:
        """Return the note of the key that a setting comes from."""
        return next(note for note in self.notes.values() if setting in note.settings)

    def table(self) -> list[str]:
        """Return a line per key: what it says, what it became, and why."""
        rows = []
        for note in self.notes.values():
            made = [f"{name}={text}" for name, text in note.settings.items()]
            cells = (
                f"{note.given.key}: {note.given.shown}",
                " ".join([*made, *[f"({note.remark})"] * bool(note.remark)]),
            )
            rows.append(["", *(" ".join(cell.split()) for cell in cells)])
        return format_table(rows)

    def _owns(self, note: Note, name: str) -> bool:
        return name in self.settings and self.settings[name][1] is note.given

    def _put(self, name: str, text: str, given: Given) -> None:
        before, owner = self.settings.get(name, (text, given))
        if owner.level > given.level:
            return
        if owner.level == given.level and plain(before) != plain(text):
            self.problems.append(f"two values for {name}, {before} and {text}: {owner.told} and {given.told}: keep one")
        self.settings[name] = text, given

    def _drop(self, names: Iterable[str], reason: str, level: int) -> None:
        """Leave settings of these names out that come from this level or a lower one."""
        for name in sorted(set(names) & self.settings.keys() - self.flags.keys()):
            given = self.settings[name][1]
            if given.level <= level:
                del self.settings[name]
                key = next(key for key, note in self.notes.items() if note.given is given)
                remark = "; ".join(filter(None, (self.notes[key].remark, f"{name} left out: {reason}")))
                self.notes[key] = replace(self.notes[key], remark=remark)


Rule = Callable[[Translation, str], None]


@dataclass(frozen=True)
class System:
    """A system whose files are understood.

    Attributes:
        what: its files are, in a few words.
        signs: keys or sections, one of which is in each of its files, and in no file of another system.
        rules: what becomes of each key.
        defaults: returns what the system takes for keys that are not given, if that decides on learning.
        combine: settles keys that mean something together, before the rules settle the others.
        name_of: returns the name that the rules have for a key as written.
    """

    what: str
    signs: tuple[str, ...]
    rules: Mapping[str, Rule]
    defaults: Callable[[Translation], Mapping[str, str]]
    combine: Callable[[Translation], None]
    name_of: Callable[[str], str] = str


def rule_for(key: str, rules: Mapping[str, Rule]) -> str | None:
    """Return the name under which a key has a rule: its own, or that of a section as `section.*`."""
    parts = key.split(".")
    sections = (f"{'.'.join(parts[:length])}.*" for length in range(len(parts), 0, -1))
    return next((name for name in (key, *sections) if name in rules), None)


def plain(text: str) -> object:
    """Return a text so that 0, 0.0 and 0e0, or True and true, are equal."""
    text = text.strip().lower()
    number = None if text in ("true", "false") else parse_number(text)
    return text if number is None else number
