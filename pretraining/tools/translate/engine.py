"""Engine of translations: a table per system, and a function for keys that decide something together.

    values (their key -> KeyValue)   of a file, or of words
        combine                   keys that depend on each other
        rows                      every other key: (our setting, conversion); a key without a row is refused
    notes (their key -> Note)     our settings, and a remark about differences

A typed key replaces the file's. The first setting of a key has the key's rank; the others are implied, and anything
that is said about them wins. A typed setting of this project (a flag) also wins, as it does over any recipe;
`_REPLACED_BY_FLAG` lists the flags that replace more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from pretraining.config.assignments import COMMAND_LINE, Assignment, Source, setting_named
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.values import BOOL_WORDS, NONE_WORDS, did_you_mean, format_value
from pretraining.durations import parse_number
from pretraining.errors import ConfigError
from pretraining.text import format_table
from pretraining.tools.translate.rows import Key, NotALlamaError

ACCEPT_LLAMA, ACCEPT_UNKNOWN = "accept_llama", "accept_unknown"
_SECRET = re.compile(r"(?:^|\.)(?:token|\w*(?:api_key|access_token|auth_token|hub_token|password|secret))$", re.I)
"""Keys whose values are hidden, because notes are logged and written to recipes."""
_DATA = frozenset({"datasets", "weights", "eval_datasets", "sep_token", "file_type", "token_dtype", "tokenizer_path"})
_SIZES = frozenset(
    {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
)
_REPLACED_BY_FLAG = {
    "data_path": (NONE_WORDS, _DATA),
    "use_dummy_dataset": ([word for word, on in BOOL_WORDS.items() if not on], _DATA | {"data_path"}),
    "mixed_precision": ([word for word, on in BOOL_WORDS.items() if on], frozenset({"mp_dtype"})),
    "model_variant": (NONE_WORDS, _SIZES),
    "held_out_fraction": ((), frozenset({"eval_datasets"})),
    "eval_datasets": ((), frozenset({"held_out_fraction"})),
}
"""Per flag: values that replace nothing, and the settings of a file that any other value replaces."""


class KeyValue(NamedTuple):
    """A value of a key: dotted key as written, text (None for null), and name of the file ("" if it was typed)."""

    key: str
    text: str | None
    file: str = ""

    @property
    def display(self) -> str:
        """The value for messages and notes; secrets are hidden."""
        return "(not shown)" if _SECRET.search(self.key) and self.text else "null" if self.text is None else self.text

    @property
    def place(self) -> str:
        """File and key, or the typed key."""
        return f"{self.file}: {self.key}" if self.file else self.key

    @property
    def quote(self) -> str:
        """Place and value, for messages."""
        return f"{self.place}{': ' if self.file else '='}{self.display}"


@dataclass
class Note:
    """The result of a key: our settings by name, in text, and a remark about differences."""

    given: KeyValue
    settings: dict[str, str]
    remark: str


@dataclass(frozen=True)
class System:
    """A system whose settings can be translated.

    Attributes:
        kind: its name for `pretrain translate`.
        title: its files in a few words.
        rows: the table, by key.
        combine: translates keys that depend on each other, before the table is applied.
        name_of: returns the name in `rows` of a key as written.
        defaults: returns settings that the system's words imply if nothing sets them.
    """

    kind: str
    title: str
    rows: Mapping[str, Key]
    combine: Callable[[Translation], None]
    name_of: Callable[[str], str] = str
    defaults: Callable[[Translation], Mapping[str, str]] = lambda translation: {}


@dataclass
class Translation:
    """The translation of a file, or of words alone, with a note per key.

    Attributes:
        system: the other system.
        name: name of the file in messages.
        values: given values, by the key's name in the table.
        flags: typed settings of this project, text by name.
        accepts: ACCEPT_LLAMA, ACCEPT_UNKNOWN, or both.
        used: names of typed words that set keys of the other system.
        prepare: folder of the data, and the command that fills it; None if the data is there.
    """

    system: System
    name: str
    values: Mapping[str, KeyValue]
    flags: Mapping[str, str]
    accepts: Collection[str]
    used: Collection[str] = ()
    notes: dict[str, Note] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    prepare: tuple[str, str] | None = None

    def __contains__(self, key: str) -> bool:
        return self.text(key) is not None

    def text(self, key: str) -> str | None:
        """Return the value of a key; None if it is missing or null."""
        return self.values[key].text if key in self.values else None

    def word(self, key: str) -> str:
        """Return the value of a key in lower case; "" if there is none."""
        return (self.text(key) or "").strip().lower()

    def is_on(self, key: str) -> bool | None:
        """Return the value of a switch; None if it is missing; raise a ConfigError for other words."""
        if key in self and self.word(key) not in BOOL_WORDS:
            raise ConfigError(f"{self.values[key].quote}: must be true or false")
        return BOOL_WORDS[self.word(key)] if key in self else None

    def number(self, key: str, setting: str = "") -> Fraction | None:
        """Return a number, from the flag for `setting` if given; None if it is missing.

        Raises:
            ConfigError: the text is not a number.
        """
        text = self.flags.get(setting) or self.text(key)
        number = parse_number(text or "")
        if text is not None and number is None:
            raise ConfigError(f"{self.values[key].quote if key in self.values else key}: must be a number")
        return number

    def count(self, key: str, setting: str = "") -> int | None:
        """Return a whole number of at least 1, as `number` does; raise a ConfigError for other numbers."""
        number = self.number(key, setting)
        if number is not None and (number.denominator != 1 or number < 1):
            place = f"--{setting}={number}" if setting in self.flags else self.values[key].quote
            raise ConfigError(f"{place}: must be a whole number, at least 1")
        return None if number is None else int(number)

    def set(self, key: str, remark: str = "", **settings: object) -> None:
        """Record the settings that a key becomes, its own first; None is no value. Do nothing if it is not given."""
        if key in self.values:
            texts = {name: format_value(value) for name, value in settings.items() if value is not None}
            self.notes[key] = Note(self.values[key], texts, remark)

    def skip(self, reason: str, *keys: str) -> None:
        """Record that keys set nothing, with the reason; do nothing for those that are not given."""
        for key in keys:
            self.set(key, reason)

    def refuse(self, key: str, problem: str, *settings: str) -> None:
        """Record that a value cannot be translated, unless a flag for one of these settings replaces it."""
        winner = next((name for name in settings if name in self.flags and self.values[key].file), None)
        if winner is None:
            self.problems.append(f"{self.values[key].quote}: {problem}")
        self.set(key, problem if winner is None else f"--{winner} wins")

    def run(self) -> Translation:
        """Translate every key, and return this translation; a ConfigError has all problems."""
        self.translate_keys()
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        for flag, (harmless, names) in _REPLACED_BY_FLAG.items():
            if flag in self.flags and self.flags[flag].strip().lower() not in harmless:
                self._leave_out(names, f"--{flag} replaces it")
        optimizer = self.flags.get("optimizer") or self.made().get("optimizer", "adamw")
        if optimizer in OPTIMIZERS:
            unread = {option for entry in OPTIMIZERS.values() for option in entry.options}
            self._leave_out(unread - set(OPTIMIZERS[optimizer].options), f"{optimizer} does not read it")
        self.notes = {key: self.notes[key] for key in dict.fromkeys((*self.values, *self.notes)) if key in self.notes}
        return self

    def translate_keys(self) -> None:
        """Apply `combine`, then the table to each remaining key."""
        try:
            self.system.combine(self)
        except ConfigError as error:
            self.problems += error.problems
        for key in [key for key in self.values if key not in self.notes]:
            if key not in self:
                self.set(key, "not given")
            elif key in self.system.rows:
                self._apply(self.system.rows[key], key)
            else:
                self._translate_unknown(key)

    def _apply(self, row: Key, key: str) -> None:
        try:
            made = row.convert(self.values[key].text or "")
        except NotALlamaError as error:
            if ACCEPT_LLAMA in self.accepts:
                self.set(key, f"{error}; left out because of {ACCEPT_LLAMA}")
            else:
                self.refuse(key, f"{error}. --{ACCEPT_LLAMA}=true trains a Llama of the same shape without it")
        except ValueError as error:
            self.refuse(key, str(error), row.setting)
        else:
            named = made if isinstance(made, Mapping) else {row.setting: made} if row.setting else {}
            self.set(key, row.remark, **named)

    def _translate_unknown(self, key: str) -> None:
        """Use a key without a row as a setting of this project, or refuse it."""
        ours = setting_named(key)
        if ours is not None:
            self.set(key, "", **{ours: self.text(key)})
        elif ACCEPT_UNKNOWN in self.accepts:
            self.set(key, "unknown, and not applied")
        else:
            hint = did_you_mean(key, self.system.rows, ": did you mean {}")
            self.refuse(key, f"unknown{hint}. --{ACCEPT_UNKNOWN}=true leaves such keys out")

    def made(self) -> dict[str, str]:
        """Return the settings that the translated keys become."""
        return {name: text for note in self.notes.values() for name, text in note.settings.items()}

    def _leave_out(self, names: Collection[str], reason: str) -> None:
        """Remove settings of these names that a file's keys become."""
        for note in [note for note in self.notes.values() if note.given.file]:
            gone = [name for name in note.settings if name in names and name not in self.flags]
            note.settings = {name: text for name, text in note.settings.items() if name not in gone}
            if gone:
                note.remark = "; ".join(filter(None, [note.remark, f"{', '.join(gone)} left out: {reason}"]))

    def defaults(self) -> list[Assignment]:
        """Return the settings that the system's words imply if nothing sets them."""
        source = Source(f"default of {self.system.kind}")
        return [
            Assignment(name, text, where=f"{name}={text} is the {source.name}", flag=name, source=source)
            for name, text in self.system.defaults(self).items()
        ]

    def assignments(self) -> tuple[list[Assignment], list[Assignment], list[Assignment]]:
        """Return the settings with their places: implied ones, those of the file, and typed ones."""
        implied, file = Source(f"implied by {self.name}"), Source(f"translated from {self.name}")
        by_source: dict[Source, list[Assignment]] = {implied: [], file: [], COMMAND_LINE: []}
        for note in self.notes.values():
            given = note.given
            for number, (name, text) in enumerate(note.settings.items()):
                source = implied if number else file if given.file else COMMAND_LINE
                made = Assignment(name, text, given.quote, given.place, source=source, is_typed=not given.file)
                by_source[source].append(made)
        return by_source[implied], by_source[file], by_source[COMMAND_LINE]

    def table(self) -> list[str]:
        """Return a line per key: its value, the settings it became, and the remark."""
        rows = []
        for note in self.notes.values():
            won = [name for name in note.settings if note.given.file and name in self.flags]
            made = [f"{name}={text}" for name, text in note.settings.items() if name not in won]
            remarks = [note.remark] if note.remark and (made or not won) else []
            made += [f"({each})" for each in (*remarks, *(f"--{name} wins" for name in won))]
            cells = f"{note.given.key}: {note.given.display}", " ".join(made)
            rows.append(["", *(" ".join(cell.split()) for cell in cells)])
        return format_table(rows)
