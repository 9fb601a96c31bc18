"""A translation in progress: the values that a file gives, and a record of what becomes of each one.

    values (their key -> Given) -> the rules of one system's table set, leave out or refuse each key -> settings, notes

A rule accounts for one key. A key that no rule knows is an error, as is what would make another model than the file
says; `accept_unknown` and `accept_llama` leave these out. Of two levels (a system's own default < its file < an
argument of the command line) the higher one wins; two values of one level are an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from pretraining.config.assignments import setting_named
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TRACKERS
from pretraining.config.values import BOOL_WORDS, NONE_WORDS, did_you_mean, format_value
from pretraining.errors import ConfigError
from pretraining.progress import parse_number

DEFAULT, FILE, ARGUMENT = range(3)
"""Levels of what is given: the system's own default, its file, the command line."""
ACCEPT_LLAMA, ACCEPT_UNKNOWN = "accept_llama", "accept_unknown"
_WIDEST_COLUMN = 48
_SECRET = re.compile(r"(?:^|\.)(?:token|\w*(?:api_key|access_token|auth_token|hub_token|password|secret))$", re.I)
"""Keys whose values are not shown: notes are logged, and written into recipes."""


@dataclass(frozen=True)
class Given:
    """A value that somebody gives to one of their keys.

    Attributes:
        key: dotted, as written.
        text: None is null.
        source: the file's name.
        level: DEFAULT, FILE or ARGUMENT.
        before: of an argument, what the file says.
    """

    key: str
    text: str | None
    source: str
    level: int = FILE
    before: str = ""

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

    @property
    def written(self) -> str:
        """Key and value on one line."""
        return " ".join(f"{self.given.key}: {self.given.shown}".split())


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
        """Settle the keys that mean something together, then the others in the order of their rules.

        A key without a rule is a setting of this project, or is not known.
        """
        try:
            combine(self)
        except ConfigError as error:
            self.problems += error.problems
        order = {name: position for position, name in enumerate(rules)}
        found = {key: rule_for(key, rules) for key in self.values}
        for key in sorted(self.values, key=lambda key: order.get(found[key] or "", len(order))):
            if key in self.notes:
                continue
            if key not in self:
                self.left(key, "not given")
                continue
            try:
                rules.get(found[key] or "", _unknown(rules))(self, key)
            except ConfigError as error:
                self.problems += error.problems
                self.left(key, "cannot be read")

    def include(self, part: Translation) -> None:
        """Take over what became of another file, which one of the keys names."""
        self.problems += part.problems
        self.notes |= {f"{note.given.source}: {key}": note for key, note in part.notes.items()}
        for name, (text, given) in part.settings.items():
            self._put(name, text, given)

    def finish(self) -> None:
        """Let flags win, and put the notes in the order of the keys.

        Raises:
            ConfigError: carries every problem.
        """
        self._give_way()
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        positions = {id(given): position for position, given in enumerate(self.values.values())}
        ordered = sorted(self.notes.items(), key=lambda item: positions.get(id(item[1].given), len(positions)))
        self.notes = {
            key: replace(note, settings={name: text for name, text in note.settings.items() if self._owns(note, name)})
            for key, note in ordered
        }

    def note_of(self, setting: str) -> Note:
        """Return the note of the key that a setting comes from."""
        return next(note for note in self.notes.values() if setting in note.settings)

    def table(self) -> list[str]:
        """Return a line per key: what it says, what it became, and why; of several files, which one says it."""
        several = len({note.given.source for note in self.notes.values() if note.given.level == FILE}) > 1
        rows = []
        for note in self.notes.values():
            source = f"[{note.given.source}]" if several and note.given.source else ""
            made = " ".join(f"{name}={text}" for name, text in note.settings.items()) or "-"
            rows.append((note.written, made, f"{note.remark} {source}".strip()))
        widths = [min(max((len(row[at]) for row in rows), default=0), _WIDEST_COLUMN) for at in (0, 1)]
        return [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]

    def _owns(self, note: Note, name: str) -> bool:
        return name in self.settings and self.settings[name][1] is note.given

    def _put(self, name: str, text: str, given: Given) -> None:
        before, owner = self.settings.get(name, (text, given))
        if owner.level > given.level:
            return
        if owner.level == given.level and plain(before) != plain(text):
            self.problems.append(f"two values for {name}, {before} and {text}: {owner.told} and {given.told}: keep one")
        self.settings[name] = text, given

    def _give_way(self) -> None:
        """Leave out what a changed flag replaces besides its own setting, and what nothing chosen reads."""
        changed = {flag: text for flag, text in self.flags.items() if plain(self._text_of(flag)) != plain(text)}
        for note in self.notes.values():
            text = note.given.text or ""
            if note.given.level == ARGUMENT and note.settings and plain(note.given.before) != plain(text):
                changed[next(iter(note.settings))] = text
        for flag, text in changed.items():
            self._drop(self._replaced(flag, text), f"{flag}={text} wins", FILE)
        for setting, options in _OPTIONS.items():
            chosen = self.flags.get(setting) or self._text_of(setting)
            names = [name for name in chosen.lower().split(",") if name in options]
            read = {option for name in names for option in options[name]}
            unread = [option for each in options.values() for option in each if names and option not in read]
            self._drop(unread, f"{chosen} does not read it", FILE if setting in changed else DEFAULT)

    def _replaced(self, flag: str, text: str) -> tuple[str, ...]:
        """Return the settings of the file that make no sense with a flag's value."""
        names, is_replaced = _GIVES_WAY.get(flag, ()), True
        if flag == "use_dummy_dataset":
            is_replaced = BOOL_WORDS.get(text.lower(), False)
            names += ("num_steps",) if self._text_of("num_steps").endswith("ep") else ()
        elif flag == "ckpt_save_path":
            is_replaced = text.lower() in NONE_WORDS
        elif flag == "num_steps":
            warmup, length = parse_number(self._text_of("warmup_steps")), parse_number(text)
            is_replaced = warmup is not None and length is not None and warmup >= length
        elif flag == "optimizer":
            is_replaced = flag in self.settings
        return names if is_replaced else ()

    def _text_of(self, name: str) -> str:
        return self.settings[name][0] if name in self.settings else ""

    def _drop(self, names: Iterable[str], reason: str, level: int) -> None:
        """Leave settings of these names out that come from this level or a lower one."""
        for name in dict.fromkeys(names):
            if name in self.flags or name not in self.settings or self.settings[name][1].level > level:
                continue
            given = self.settings.pop(name)[1]
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
        nulls: what a null means, by key.
    """

    what: str
    signs: tuple[str, ...]
    rules: Mapping[str, Rule]
    defaults: Callable[[Translation], Mapping[str, str]]
    combine: Callable[[Translation], None]
    name_of: Callable[[str], str] = str
    nulls: Mapping[str, str] = field(default_factory=dict)


_OPTIONS = {
    "optimizer": {name: entry.options for name, entry in OPTIMIZERS.items()},
    "schedule": {name: entry.options for name, entry in SCHEDULES.items()},
    "tracker": {name: entry.options for name, entry in TRACKERS.items()},
}
"""The settings that each choice reads."""
_DATA = ("datasets", "weights", "eval_datasets", "sep_token", "file_type", "token_dtype", "tokenizer_path")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_GIVES_WAY: dict[str, tuple[str, ...]] = {
    "training_stage": ("schedule", *(option for each in _OPTIONS["schedule"].values() for option in each)),
    "optimizer": (
        *("weight_decay", "optimizer_options"),
        *(option for each in _OPTIONS["optimizer"].values() for option in each),
    ),
    "num_steps": ("warmup_steps", "stable_steps", "decay_steps"),
    "device": ("backend",),
    "backend": ("device",),
    "grad_accum_steps": ("global_batch_size",),
    "global_batch_size": ("grad_accum_steps",),
    "mixed_precision": ("mp_dtype",),
    "sharding_strategy": ("hsdp_group_size",),
    "stable_steps": ("decay_steps",),
    "decay_steps": ("stable_steps",),
    "model_variant": _SIZES,
    "ckpt_load_path": ("resume_from_checkpoint", "init_from", *_SIZES, "vocab_size", "sep_token"),
    "resume_from_checkpoint": ("ckpt_load_path", "init_from"),
    "ckpt_save_path": (
        *("checkpoint_interval", "checkpoint_steps", "keep_last", "ckpt_format", "ckpt_name", "preempt_interval"),
        *("resume_from_checkpoint", "use_profiler", "tracker"),
    ),
    "use_dummy_dataset": ("data_path", *_DATA),
    "data_path": ("use_dummy_dataset", *_DATA),
}
"""What a file says besides, by the flag with whose value it makes sense."""


def rule_for(key: str, rules: Mapping[str, Rule]) -> str | None:
    """Return the name under which a key has a rule: its own, or that of a section as `section.*`."""
    parts = key.split(".")
    sections = (f"{'.'.join(parts[:length])}.*" for length in range(len(parts), 0, -1))
    return next((name for name in (key, *sections) if name in rules), None)


def _unknown(rules: Iterable[str]) -> Rule:
    """Make the rule of keys that have none."""

    def apply(translation: Translation, key: str) -> None:
        given, ours = translation.values[key], setting_named(key)
        if ours is not None:
            translation.set(key, **{ours: given.text or ""})
        elif ACCEPT_UNKNOWN in translation.accepts:
            translation.left(key, "not known, and not applied")
        else:
            hint = did_you_mean(key, [name.removesuffix(".*") for name in rules], ": did you mean {}")
            problem = f"{given.told}: not known{hint}. --{ACCEPT_UNKNOWN}=true leaves such keys out"
            translation.problems.append(problem)

    return apply


def plain(text: str) -> object:
    """Return a text so that 0, 0.0 and 0e0, or True and true, are equal."""
    text = text.strip().lower()
    number = None if text in ("true", "false") else parse_number(text)
    return text if number is None else number
