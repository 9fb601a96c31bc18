"""State of a translation: the values of a file, and the settings and notes that the rules make of them.

    values (their key -> Given) --rules: set, leave out or refuse each key--> settings, notes

A rule handles one key. A key without a rule is an error, and so is a key that makes the model different from a Llama;
`accept_unknown` and `accept_llama` leave these out. A command line argument wins over the file, and the file over the
system's default; two values of one level are an error. A flag of this project replaces its setting, as with any recipe;
`_REPLACED_BY_FLAG` lists the flags that replace more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from pretraining.config.assignments import Assignment, setting_named
from pretraining.config.fields import settings_of
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TRACKERS, Entry
from pretraining.config.training import TrainConfig
from pretraining.config.values import BOOL_WORDS, NONE_WORDS, did_you_mean, format_value
from pretraining.errors import ConfigError
from pretraining.progress import parse_number
from pretraining.text import format_table

DEFAULT, FILE, ARGUMENT = range(3)
"""Levels of a value: the system's default, its file, the command line."""
ACCEPT_LLAMA, ACCEPT_UNKNOWN = "accept_llama", "accept_unknown"
_SECRET = re.compile(r"(?:^|\.)(?:token|\w*(?:api_key|access_token|auth_token|hub_token|password|secret))$", re.I)
"""Keys whose values are hidden, because notes are logged and written to recipes."""
_CHOICES: dict[str, Mapping[str, Entry]] = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "tracker": TRACKERS}
"""Tables of choices, with the settings that each choice reads."""
_DATA = ("datasets", "weights", "eval_datasets", "sep_token", "file_type", "token_dtype", "tokenizer_path")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_REPLACED_BY_FLAG = {
    "data_path": (NONE_WORDS, _DATA),
    "use_dummy_dataset": ([word for word, on in BOOL_WORDS.items() if not on], ("data_path", *_DATA)),
    "mixed_precision": ([word for word, on in BOOL_WORDS.items() if on], ("mp_dtype",)),
    "model_variant": (NONE_WORDS, _SIZES),
}
"""Per flag: values that replace nothing, and the settings of a file that any other value replaces."""


@dataclass(frozen=True)
class Given:
    """A value of one of the other system's keys.

    Attributes:
        key: dotted key, as written.
        text: None for null.
        source: name of the file; of a default, the system and the file.
        level: DEFAULT, FILE or ARGUMENT.
    """

    key: str
    text: str | None
    source: str
    level: int = FILE

    @property
    def display(self) -> str:
        """The value for messages and notes; secrets are hidden."""
        return "(not shown)" if _SECRET.search(self.key) and self.text else "null" if self.text is None else self.text

    @property
    def place(self) -> str:
        """File and key, or the name of an argument."""
        return self.key if self.level == ARGUMENT else f"{self.source}: {self.key}"

    @property
    def quote(self) -> str:
        """Place and value, for messages."""
        if self.level == DEFAULT:
            return f"{self.key}={self.display} is the default of {self.source}"
        return f"{self.place}{'=' if self.level == ARGUMENT else ': '}{self.display}"


@dataclass(frozen=True)
class Note:
    """The result of one of the other system's keys: our settings, and a remark about differences."""

    given: Given
    settings: Mapping[str, str]
    remark: str


class Translation:
    """The translation of another system's file into our settings, with a note per key.

    Args:
        values: given values, by the key's name in the rules.
        flags: our settings on the command line, text by name.
        accepts: ACCEPT_LLAMA, ACCEPT_UNKNOWN, or both.
        name: name of the file in messages.
        kind: name of the other system.
        used: names of command-line arguments that set keys of the other system.

    Attributes:
        prepare: folder of the data, and the command that fills it; None if the data is there.
        brings_defaults: whether the other system's defaults apply.
    """

    def __init__(
        self,
        values: Mapping[str, Given],
        flags: Mapping[str, str],
        accepts: Collection[str],
        name: str = "",
        kind: str = "",
        used: Collection[str] = (),
    ) -> None:
        self.values, self.flags, self.accepts = dict(values), flags, accepts
        self.name, self.kind, self.used = name, kind, used
        self.settings: dict[str, tuple[str, Given]] = {}
        self.notes: dict[str, Note] = {}
        self.problems: list[str] = []
        self.prepare: tuple[str, str] | None = None
        self.brings_defaults = True

    def __contains__(self, key: str) -> bool:
        return self.text(key) is not None

    def text(self, key: str) -> str | None:
        """Return the value of a key; None if it is missing or null."""
        return self.values[key].text if key in self.values else None

    def word(self, key: str) -> str:
        """Return the value of a key in lower case, with underscores; "" if there is none."""
        return (self.text(key) or "").strip().lower().replace("-", "_")

    def is_on(self, key: str) -> bool | None:
        """Return the value of a switch; None if it is missing; raise a ConfigError for other words."""
        text = self.text(key)
        if text is not None and text.lower() not in BOOL_WORDS:
            raise ConfigError(f"{self.values[key].quote}: must be true or false")
        return None if text is None else BOOL_WORDS[text.lower()]

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

    def count(self, key: str, setting: str = "", smallest: int = 1) -> int | None:
        """Return a whole number, as `number` does; raise a ConfigError for fractions and below `smallest`."""
        number = self.number(key, setting)
        if number is not None and (number.denominator != 1 or number < smallest):
            place = f"--{setting}={number}" if setting in self.flags else self.values[key].quote
            raise ConfigError(f"{place}: must be a whole number, at least {smallest}")
        return None if number is None else int(number)

    def add_defaults(self, defaults: Mapping[str, str], source: str) -> None:
        """Add the other system's defaults for keys that are not given; `source` names the system and the file."""
        self.values |= {key: Given(key, text, source, DEFAULT) for key, text in defaults.items() if key not in self}

    def set(self, key: str, remark: str = "", **settings: object) -> None:
        """Record the settings that a key becomes; None is no value."""
        given = self.values[key]
        texts = {name: format_value(value) for name, value in settings.items() if value is not None}
        of_default = "default there, not in the file" if given.level == DEFAULT else ""
        self.notes[key] = Note(given, texts, "; ".join(filter(None, (of_default, remark))))
        for name, text in texts.items():
            self._put(name, text, given)

    def skip(self, key: str, reason: str) -> None:
        """Record that a key has no equivalent, with the reason; do nothing if it is not given."""
        if key in self.values:
            self.set(key, reason)

    def refuse(self, key: str, problem: str, *settings: str) -> None:
        """Record that a value cannot be translated, unless a flag for one of these settings replaces it."""
        winner = next((name for name in settings if name in self.flags), None)
        if winner is not None and self.values[key].level != ARGUMENT:
            self.skip(key, f"--{winner} wins")
        else:
            self.problems.append(f"{self.values[key].quote}: {problem}")
            self.skip(key, problem)

    def apply_rules(self, combine: Callable[[Translation], None], rules: Mapping[str, Rule]) -> None:
        """Apply `combine` to keys that depend on each other, then its rule to each remaining key."""
        try:
            combine(self)
        except ConfigError as error:
            self.problems += error.problems
        for key in [key for key in self.values if key not in self.notes]:
            rule = rule_for(key, rules)
            try:
                if key not in self:
                    self.skip(key, "not given")
                elif rule is not None:
                    rules[rule](self, key)
                else:
                    self._translate_unknown(key, rules)
            except ConfigError as error:
                self.problems += error.problems

    def _translate_unknown(self, key: str, rules: Iterable[str]) -> None:
        """Use a key without a rule as a setting of this project, or refuse it."""
        ours = setting_named(key)
        if ours is not None:
            self.set(key, "", **{ours: self.text(key)})
        elif ACCEPT_UNKNOWN in self.accepts:
            self.skip(key, "unknown, and not applied")
        else:
            hint = did_you_mean(key, [name.removesuffix(".*") for name in rules], ": did you mean {}")
            self.refuse(key, f"unknown{hint}. --{ACCEPT_UNKNOWN}=true leaves such keys out")

    def include(self, part: Translation) -> None:
        """Add the translation of another file that one of the keys names."""
        self.problems += part.problems
        self.notes |= {f"{note.given.source}: {key}": note for key, note in part.notes.items()}
        for name, (text, given) in part.settings.items():
            self._put(name, text, given)

    def finish(self) -> None:
        """Drop settings that flags replace or that no choice reads, and sort the notes by key.

        Raises:
            ConfigError: all problems.
        """
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        self._shorten_default_warmup()
        for flag, (harmless, names) in _REPLACED_BY_FLAG.items():
            if flag in self.flags and self.flags[flag].strip().lower() not in harmless:
                self._drop(names, f"--{flag} replaces it", FILE)
        for setting, table in _CHOICES.items():
            default = format_value(settings_of(TrainConfig)[setting].default)
            chosen = self.flags.get(setting) or self.settings.get(setting, (default,))[0]
            known = [name for name in chosen.lower().split(",") if name in table]
            read = {option for name in known for option in table[name].options}
            unread = {option for entry in table.values() for option in entry.options if known} - read
            # The lengths of a schedule change what is learned, so unread lengths in a file stay an error.
            self._drop(unread, f"{chosen} does not read it", DEFAULT if setting == "schedule" else FILE)
        self.notes = {
            key: replace(note, settings={name: text for name, text in note.settings.items() if self._owns(note, name)})
            for key in dict.fromkeys((*self.values, *self.notes))
            if (note := self.notes.get(key))
        }

    def _shorten_default_warmup(self) -> None:
        """Shorten a warm-up that only the other system's default asks for, and that is longer than the run."""
        text, given = self.settings.get("warmup_steps", ("", None))
        length = parse_number(self.flags.get("num_steps") or self.settings.get("num_steps", ("",))[0])
        warmup = parse_number(text)
        if given is None or given.level != DEFAULT or length is None or warmup is None or warmup < length:
            return
        short = str(int(length) // 10)
        self.settings["warmup_steps"] = short, given
        note = self.note_of("warmup_steps")
        key = next(key for key, other in self.notes.items() if other is note)
        remark = f"{note.remark}; {text} is longer than the run: a tenth of it"
        self.notes[key] = replace(note, settings={**note.settings, "warmup_steps": short}, remark=remark)

    def note_of(self, setting: str) -> Note:
        """Return the note of the key that a setting comes from."""
        return next(note for note in self.notes.values() if setting in note.settings)

    @property
    def defaults(self) -> list[Assignment]:
        """The settings that the other system's defaults become."""
        return self.assignments(DEFAULT)

    def assignments(self, level: int) -> list[Assignment]:
        """Return the settings that come from values of a level.

        An argument may become several settings: the first ranks as the command line's, the others as the file's.
        """
        made = list[Assignment]()
        if level == DEFAULT and not self.brings_defaults:
            return made
        for setting, (text, given) in self.settings.items():
            is_argument = given.level == ARGUMENT
            is_first = setting == next(iter(self.note_of(setting).settings))
            if level == (FILE if is_argument and not is_first else given.level):
                source = f"command line, {given.key}" if is_argument else f"translated from {given.key} of {self.name}"
                made.append(Assignment(setting, text, given.quote, given.place, source=source, is_typed=is_argument))
        return made

    def table(self) -> list[str]:
        """Return a line per key: its value, the settings it became, and the remark."""
        rows = []
        for note in self.notes.values():
            if note.given.level == DEFAULT and not self.brings_defaults:
                continue
            made = [f"{name}={text}" for name, text in note.settings.items()]
            cells = (
                f"{note.given.key}: {note.given.display}",
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
            self.problems.append(f"two values for {name}, {before} and {text}: {owner.quote}, {given.quote}: keep one")
        self.settings[name] = text, given

    def _drop(self, names: Iterable[str], reason: str, level: int) -> None:
        """Drop settings of these names that come from this level or a lower one."""
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
    """A system whose files can be translated.

    Attributes:
        title: its files in a few words.
        rules: the rule of each key.
        defaults: returns the system's defaults for missing keys, if they change what is learned.
        combine: translates keys that depend on each other, before the rules are applied.
        name_of: returns the name in `rules` of a key as written.
    """

    title: str
    rules: Mapping[str, Rule]
    defaults: Callable[[Translation], Mapping[str, str]]
    combine: Callable[[Translation], None]
    name_of: Callable[[str], str] = str


def rule_for(key: str, rules: Mapping[str, Rule]) -> str | None:
    """Return the name in `rules` for a key: the key itself, or its section as `section.*`."""
    parts = key.split(".")
    sections = (f"{'.'.join(parts[:length])}.*" for length in range(len(parts), 0, -1))
    return next((name for name in (key, *sections) if name in rules), None)


def plain(text: str) -> object:
    """Return a comparable value: 0, 0.0 and 0e0 are equal, and so are True and true."""
    text = text.strip().lower()
    number = None if text in ("true", "false") else parse_number(text)
    return text if number is None else number
