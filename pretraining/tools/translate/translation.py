"""What every table of another system works with: their keys as given, and a record of what becomes of each one.

    values (their key -> Given) -> Translating (the rules of a table set, leave out or refuse each key) -> Translation

A rule accounts for one key. A key that no rule knows is an error, as is what would make another model than the file
says; `accept_unknown` and `accept_llama` leave these out. Of two levels (a system's own default < its file < an
argument of the command line) the higher one wins; two values of one level are an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from pretraining.config.assignments import setting_named
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TOKEN_SUFFIXES, TRACKERS
from pretraining.config.values import BOOL_WORDS, NONE_WORDS, did_you_mean, format_value
from pretraining.errors import ConfigError
from pretraining.files import entries_of, is_folder
from pretraining.progress import parse_number

DEFAULT, FILE, ARGUMENT = range(3)
"""Levels of what is given: the system's own default, its file, the command line."""
ACCEPT_LLAMA, ACCEPT_UNKNOWN = "accept_llama", "accept_unknown"
NOT_UNDERSTOOD = "Not understood, and not applied:"
_WIDEST_COLUMN = 48
_SECRET = re.compile(
    r"(?:^|\.)(?:token|\w*(?:api_key|access_token|auth_token|hub_token|password|secret))$", re.IGNORECASE
)
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
    is_known: bool = True

    @property
    def written(self) -> str:
        """Key and value on one line."""
        return " ".join(f"{self.given.key}: {self.given.shown}".split())


@dataclass(frozen=True)
class Translation:
    """A file of another system as settings of this project: text and origin of each, and a note per key."""

    settings: Mapping[str, tuple[str, Given]]
    notes: tuple[Note, ...]

    def note_of(self, setting: str) -> Note:
        """Return the note of the key that a setting comes from."""
        return next(note for note in self.notes if setting in note.settings)

    def table(self) -> list[str]:
        """Return a line per key: what it says, what it became, and why; keys that are not understood come last."""
        ordered = sorted(self.notes, key=lambda note: not note.is_known)
        several = len({note.given.source for note in ordered if note.given.level == FILE}) > 1
        rows = [
            (
                note.written,
                " ".join(f"{name}={text}" for name, text in note.settings.items()) or "-",
                f"{note.remark} [{note.given.source}]".strip() if several else note.remark,
            )
            for note in ordered
        ]
        widths = [min(max((len(row[at]) for row in rows), default=0), _WIDEST_COLUMN) for at in (0, 1)]
        lines = [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]
        known = sum(note.is_known for note in ordered)
        return lines[:known] + ([NOT_UNDERSTOOD, *lines[known:]] if known < len(lines) else [])


class Translating:
    """A translation in progress.

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
        """Return the value of a key; None where it is missing or null."""
        return self.values[key].text if key in self.values else None

    def word(self, key: str) -> str:
        """Return the value of a key in lower case, with underscores; "" where there is none."""
        return (self.text(key) or "").strip().lower().replace("-", "_")

    def is_on(self, key: str) -> bool | None:
        """Return a switch; None where it is missing, a ConfigError where it is none."""
        text = self.text(key)
        if text is not None and text.lower() not in BOOL_WORDS:
            raise ConfigError(f"{self.values[key].told}: true or false is needed")
        return None if text is None else BOOL_WORDS[text.lower()]

    def number(self, key: str, setting: str = "") -> Fraction | None:
        """Return a number, of the flag for `setting` if there is one; None where it is missing.

        Raises:
            ConfigError: the text is no number.
        """
        text = self.flags.get(setting) or self.text(key)
        number = parse_number(text or "")
        if text is not None and number is None:
            raise ConfigError(f"{self.values[key].told if key in self.values else key}: a number is needed")
        return number

    def count(self, key: str, setting: str = "", smallest: int = 1) -> int | None:
        """Return a whole number as `number` does; a ConfigError where it is none, or below the smallest."""
        number = self.number(key, setting)
        if number is not None and (number.denominator != 1 or number < smallest):
            place = (
                self.values[key].told if key in self.values and setting not in self.flags else f"--{setting}={number}"
            )
            raise ConfigError(f"{place}: a whole number from {smallest} on is needed")
        return None if number is None else int(number)

    def fill_in(self, defaults: Mapping[str, str]) -> None:
        """Add what the other system takes for keys that nobody gives."""
        for key, text in defaults.items():
            if key not in self:
                self.values[key] = Given(key, text, "", DEFAULT)

    def set(self, key: str, remark: str = "", **settings: object) -> None:
        """Say what a key becomes; None is no value. Without settings, this project does the same anyway."""
        given = self.values[key]
        texts = {name: format_value(value) for name, value in settings.items() if value is not None}
        self.notes[key] = Note(given, texts, "; ".join(filter(None, (self._of_default(given), remark))))
        for name, text in texts.items():
            self._put(name, text, given)

    def left(self, key: str, reason: str) -> None:
        """Say that a key has no equivalent, and why that does not matter or what to do."""
        self.set(key, reason)

    def refuse(self, key: str, problem: str, *settings: str) -> None:
        """Say that a value cannot be translated, unless a flag for one of these settings wins over it."""
        winner = next((name for name in settings if name in self.flags), None)
        if winner is not None and self.values[key].level != ARGUMENT:
            self.left(key, f"--{winner} wins")
        else:
            self.problems.append(f"{self.values[key].told}: {problem}")
            self.left(key, problem)

    def settle(self, combine: Callable[[Translating], None], rules: Mapping[str, Rule]) -> None:
        """Settle the keys that mean something together, then the others that have a rule, in the order of the rules."""
        try:
            combine(self)
        except ConfigError as error:
            self.problems += error.problems
        order = {name: position for position, name in enumerate(rules)}
        found = {key: rule_for(key, rules) for key in self.values}
        for key in sorted((key for key in found if found[key]), key=lambda key: order[found[key] or ""]):
            if key in self.notes:
                continue
            if key not in self:
                self.left(key, "not given")
                continue
            try:
                rules[found[key] or ""](self, key)
            except ConfigError as error:
                self.problems += error.problems
                self.left(key, "cannot be read")

    def include(self, part: Translating) -> None:
        """Take over what became of another file, which one of the keys names."""
        self.problems += part.problems
        self.notes |= {f"{note.given.source}: {key}": note for key, note in part.notes.items()}
        for name, (text, given) in part.settings.items():
            self._put(name, text, given)

    def reject_unknown(self, known: Iterable[str]) -> None:
        """Take keys that nothing has settled for settings of this project; others are not known."""
        for key, given in self.values.items():
            ours = setting_named(key)
            if key in self.notes:
                continue
            if given.text is None:
                self.left(key, "not given")
            elif ours is not None:
                self.set(key, **{ours: given.text})
            elif ACCEPT_UNKNOWN in self.accepts:
                self.notes[key] = Note(given, {}, "not known", is_known=False)
            else:
                hint = _nearest(key, known)
                self.problems.append(f"{given.told}: not known{hint}. --{ACCEPT_UNKNOWN}=true leaves such keys out")

    def finish(self, known: Iterable[str]) -> Translation:
        """Return the translation.

        Args:
            known: keys that an unknown one may mean.

        Raises:
            ConfigError: carries every problem.
        """
        self.reject_unknown(known)
        self._give_way()
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        notes = [
            replace(note, settings={name: text for name, text in note.settings.items() if self._owns(note, name)})
            for note in self.notes.values()
        ]
        positions = {id(given): position for position, given in enumerate(self.values.values())}
        notes.sort(key=lambda note: positions.get(id(note.given), len(positions)))
        return Translation(self.settings, tuple(notes))

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
        """Leave out what a flag of ours contradicts besides its own setting, and defaults that nothing reads."""
        changed = {flag: text for flag, text in self.flags.items() if plain(self._text_of(flag)) != plain(text)}
        for note in self.notes.values():
            text = note.given.text or ""
            if note.given.level == ARGUMENT and note.settings and plain(note.given.before) != plain(text):
                changed[next(iter(note.settings))] = text
        for flag, text in changed.items():
            for name in self._contradicted(flag, text):
                if name in self.settings and name not in self.flags and self.settings[name][1].level < ARGUMENT:
                    self._drop(name, f"{name} left out: {flag}={text} wins")
        schedule = self.flags.get("schedule") or self._text_of("schedule")
        for name in self._contradicted("schedule", schedule):
            if name in self.settings and self.settings[name][1].level == DEFAULT:
                self._drop(name, f"{schedule} does not read it")

    def _text_of(self, name: str) -> str:
        return self.settings[name][0] if name in self.settings else ""

    def _drop(self, name: str, reason: str) -> None:
        given = self.settings.pop(name)[1]
        key = next(key for key, note in self.notes.items() if note.given is given)
        remark = "; ".join(filter(None, (self.notes[key].remark, reason)))
        self.notes[key] = replace(self.notes[key], remark=remark)

    def _contradicted(self, flag: str, text: str) -> tuple[str, ...]:
        """Return the settings that make no sense any more with another value of a flag than the file's."""
        if flag == "use_dummy_dataset":
            is_endless = self._text_of("num_steps").endswith("ep")
            names = (*_GIVES_WAY[flag], *(("num_steps",) if is_endless else ()))
            return names if BOOL_WORDS.get(text.lower()) else ()
        if flag in ("device", "backend"):
            other = "backend" if flag == "device" else "device"
            return (other,) if {text, self._text_of(other)} in ({"cpu", "nccl"}, {"cuda", "gloo"}) else ()
        if flag == "ckpt_save_path":
            return _KEPT if text.lower() in NONE_WORDS else ()
        if flag == "optimizer" and flag not in self.settings:
            return ()
        if flag == "tracker" and any(name in text and entry.options for name, entry in TRACKERS.items()):
            return ()
        if flag == "schedule" and text.lower() in SCHEDULES:
            return tuple(option for option in _SCHEDULE_OPTIONS if option not in SCHEDULES[text.lower()].options)
        if flag == "num_steps":
            warmup, length = parse_number(self._text_of("warmup_steps")), parse_number(text)
            return _PHASES if warmup is not None and length is not None and warmup >= length else ()
        return _GIVES_WAY.get(flag, ())

    @staticmethod
    def _of_default(given: Given) -> str:
        return "default there, not in the file" if given.level == DEFAULT else ""


_OPTIMIZER_OPTIONS = (
    "weight_decay",
    "optimizer_options",
    *dict.fromkeys(o for e in OPTIMIZERS.values() for o in e.options),
)
_SCHEDULE_OPTIONS = tuple(dict.fromkeys(option for entry in SCHEDULES.values() for option in entry.options))
_DATA = ("datasets", "weights", "eval_datasets", "sep_token", "file_type", "token_dtype", "tokenizer_path")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_GIVES_WAY = {
    "training_stage": ("schedule", *_SCHEDULE_OPTIONS),
    "optimizer": _OPTIMIZER_OPTIONS,
    "grad_accum_steps": ("global_batch_size",),
    "global_batch_size": ("grad_accum_steps",),
    "tracker": ("tracker_project_name", "tracker_run_name", "tracker_run_id"),
    "mixed_precision": ("mp_dtype",),
    "sharding_strategy": ("hsdp_group_size",),
    "stable_steps": ("decay_steps",),
    "decay_steps": ("stable_steps",),
    "model_variant": _SIZES,
    "ckpt_load_path": ("resume_from_checkpoint", "init_from", *_SIZES, "vocab_size", "sep_token"),
    "resume_from_checkpoint": ("ckpt_load_path", "init_from"),
    "use_dummy_dataset": ("data_path", *_DATA),
    "data_path": ("use_dummy_dataset", *_DATA),
}
"""What a file says besides, by the flag with whose value it makes sense."""
_KEPT = (
    *("checkpoint_interval", "checkpoint_steps", "keep_last", "ckpt_format", "ckpt_name", "preempt_interval"),
    *("resume_from_checkpoint", "use_profiler", "tracker"),
)
_PHASES = ("warmup_steps", "stable_steps", "decay_steps")


def _nearest(key: str, known: Iterable[str]) -> str:
    """Return a question about the known key that an unknown one may mean, of its own section or else of any."""
    section, _, name = key.rpartition(".")
    names = [each.removesuffix(".*") for each in known]
    for among in ([each for each in names if each.rpartition(".")[0] == section], names):
        by_name = {each.rpartition(".")[2]: each for each in among}
        if nearest := did_you_mean(name, by_name, "{}"):
            return f": did you mean {by_name[nearest]}"
    return ""


Rule = Callable[[Translating, str], None]


def rule_for(key: str, rules: Mapping[str, Rule]) -> str | None:
    """Return the name under which a key has a rule: its own, or that of a section as `section.*`."""
    if key in rules:
        return key
    parts = key.split(".")
    sections = (f"{'.'.join(parts[:length])}.*" for length in range(len(parts), 0, -1))
    return next((section for section in sections if section in rules), None)


# Rules


def row(setting: str, convert: Callable[[str], str | Mapping[str, str]] = str, remark: str = "") -> Rule:
    """Make a rule: the key is a setting under another name; a ValueError of `convert` says what is wrong."""

    def apply(translating: Translating, key: str) -> None:
        try:
            made = convert(translating.text(key) or "")
        except ValueError as error:
            translating.refuse(key, str(error), setting)
        else:
            translating.set(key, remark, **(made if isinstance(made, Mapping) else {setting: made}))

    return apply


def left(reason: str) -> Rule:
    """Make a rule: the key has no equivalent, and that changes nothing about what is learned."""
    return lambda translating, key: translating.left(key, reason)


def context(translating: Translating, key: str) -> None:
    """Settle a key that is the length of sequences and the model's context."""
    translating.set(key, seq_length=translating.text(key), max_position_embeddings=translating.text(key))


def joint(*keys: str) -> dict[str, Rule]:
    """Return rules for keys that are settled together, before the rules."""
    return dict.fromkeys(keys, left(""))


def only(*values: str, reason: str) -> Rule:
    """Make a rule: the key may have these values, as here; another one would change what is learned."""
    allowed = {plain(value) for value in values}

    def apply(translating: Translating, key: str) -> None:
        if plain(translating.text(key) or "") in allowed:
            translating.set(key, "as here")
        else:
            translating.refuse(key, reason)

    return apply


def not_a_llama(*values: str, reason: str) -> Rule:
    """Make a rule: a Llama has only these values; with ACCEPT_LLAMA another one is left out."""
    allowed = {plain(value) for value in values}

    def apply(translating: Translating, key: str) -> None:
        if plain(translating.text(key) or "") in allowed:
            translating.set(key, "as in every Llama")
        else:
            refuse_model(translating, key, reason)

    return apply


def refuse_model(translating: Translating, key: str, reason: str) -> None:
    """Refuse what makes the model no Llama, unless a Llama is accepted in its place."""
    if ACCEPT_LLAMA in translating.accepts:
        translating.left(key, f"{reason}; left out, as {ACCEPT_LLAMA} says")
    else:
        translating.refuse(key, f"{reason}. --{ACCEPT_LLAMA}=true trains a Llama of the same shape without it")


def when(condition: Callable[[Translating], object], rule: Rule, otherwise: str) -> Rule:
    """Make a rule that holds on a condition; without it the key is left out with a reason."""
    return lambda translating, key: (rule if condition(translating) else left(otherwise))(translating, key)


# Conversions of a text


def choice(**words: str) -> Callable[[str], str]:
    """Make a conversion: words mean values of a setting; case and dashes do not matter, and a value means itself."""
    known = {value: value for value in words.values()} | words

    def convert(text: str) -> str:
        word = text.strip().lower().replace("-", "_")
        if word not in known:
            raise ValueError(f"one of {', '.join(words)} is needed")
        return known[word]

    return convert


def tokens(text: str) -> str:
    """Return a length that is counted in tokens."""
    return text if text.endswith("tok") else f"{text}tok"


def epochs(text: str) -> str:
    """Return a length that is counted in passes over the data."""
    return f"{text}ep"


def share(text: str) -> str:
    """Return a part of the run as a percentage: 0.03 is 3%."""
    number = parse_number(text)
    if number is None or not 0 <= number <= 1:
        raise ValueError("a number from 0 to 1 is needed")
    return f"{decimal(number * 100)}%"


def kept(text: str) -> str:
    """Return a number of checkpoints to keep; 0 and less are all of them."""
    number = parse_number(text)
    return "none" if number is not None and number <= 0 else text


def pair(text: str) -> Mapping[str, str]:
    """Return both decays of Adam's moments."""
    items = text.strip("[]()").split(",")
    if len(items) != 2:
        raise ValueError("two numbers are needed")
    return {"adam_beta1": items[0].strip(), "adam_beta2": items[1].strip()}


_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "bf16_mixed", "bf16_true", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half", "16", "16_mixed", "torch.float16"), "float16"),
    **dict.fromkeys(("float32", "fp32", "32", "32_true"), ""),
}


def dtype(text: str) -> Mapping[str, str]:
    """Return what is computed in: mixed precision in 16 bits, or float32."""
    word = text.strip().lower().replace("-", "_")
    if word not in _DTYPES:
        raise ValueError("one of bfloat16, float16, float32 is needed")
    return {"mixed_precision": "true", "mp_dtype": _DTYPES[word]} if _DTYPES[word] else {"mixed_precision": "false"}


def trackers(text: str) -> Mapping[str, str]:
    """Return where reports go; all are TensorBoard, as by default here."""
    names = [word for item in text.strip("[]").split(",") if (word := item.strip(" '\"").lower()) not in NONE_WORDS]
    if "all" in names:
        return {}
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ValueError(f"{unknown[0]} is no tracker here: there are {', '.join(TRACKERS)}, or a class of your own")
    return {"tracker": ",".join(names) or "none"}


def folder_of_data(text: str) -> Mapping[str, str]:
    """Return the settings for a folder that is a dataset, or holds datasets; a start refuses one that is not there."""
    folder = Path(text)
    if is_folder(folder) and any(path.suffix in TOKEN_SUFFIXES for path in entries_of(folder)):
        return {"data_path": str(folder.parent), "datasets": folder.name}
    return {"data_path": text}


# Numbers


def lowest_rate(peak_key: str) -> Rule:
    """Make a rule: the key is the learning rate at the end, a share of the peak here."""

    def apply(translating: Translating, key: str) -> None:
        lowest, peak = translating.number(key), translating.number(peak_key, "learning_rate")
        if lowest == 0:
            translating.set(key, min_lr_ratio="0")
        elif lowest is None or not peak or not 0 <= lowest <= peak:
            translating.refuse(
                key, f"a learning rate from 0 to {peak_key.rpartition('.')[2]} is needed", "min_lr_ratio"
            )
        else:
            translating.set(key, f"of {decimal(peak)}", min_lr_ratio=decimal(lowest / peak))

    return apply


def gated_width(width: Fraction | int, multiple: int) -> int:
    """Return the feed-forward width whose three matrices have the parameters of two of 4 x `width`: 8/3 of it."""
    return -int(-8 * width // (3 * multiple)) * multiple


def decimal(number: Fraction) -> str:
    """Return a fraction as a decimal number, in as few digits as a float needs."""
    return str(number.numerator) if number.denominator == 1 else repr(float(number))


def plain(text: str) -> object:
    """Return a text so that 0, 0.0 and 0e0, or True and true, are equal."""
    text = text.strip().lower()
    number = None if text in ("true", "false") else parse_number(text)
    return text if number is None else number
