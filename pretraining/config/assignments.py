"""The reader that turns settings from several sources into one dataclass.

Assignments of raw text stand in one list, in order of precedence: later sources (recipes, the command line) win.
`Reader` finds the setting behind each name or alias, parses the text, and collects all problems, so that a user sees
every mistake at once. Rules over several settings run afterwards, and skip settings that could not be parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretraining.config.fields import Setting, build, settings_of
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, did_you_mean, parse_value
from pretraining.durations import MULTIPLIERS

T = TypeVar("T")

RECIPE_NAMES = ("recipe", "config")
"""Flags that name recipes; both mean the same."""

# `python -m torch.distributed.launch` passes every process its local rank as a flag. The launch package reads the
# environment instead.
IGNORED_NAMES = ("local_rank",)


@dataclass(frozen=True)
class Source:
    """The place of assignments that may not contradict each other: a recipe, or the command line.

    Attributes:
        name: shown after values.
        run: real path of the folder of a run, if the recipe is its config.yaml.
    """

    name: str
    run: Path | None = None


COMMAND_LINE = Source("command line")
"""Source of the settings that a user typed or passed to a `Trainer`."""


@dataclass(frozen=True)
class Alias:
    """Another name for a setting.

    `translate` converts the alias's text into the setting's text; a ValueError gives the reason if it cannot.
    """

    target: str
    help: str
    translate: Callable[[str], str] = str


ALWAYS_NONE = ("bol_token", "eol_token")
"""Names that are accepted only as none: tokens around every sequence are not supported."""

NOT_SUPPORTED = {
    r"drop_?out|drop_?path|_pdrop$|stochastic_depth": "dropout is",
    r"label_smooth": "label smoothing is",
    r"freez|frozen": "frozen parameters are",
    r"layer_?wise_(lr|learning)|lr_layer|layer_(lr_)?decay": "learning rates per layer are",
    r"^(tp|tensor_(model_)?parallel)(_|$)": "tensor parallelism is",
    r"^(pp|pipeline_(model_)?parallel)(_|$)": "pipeline parallelism is",
    r"expert|(^|_)moe(_|$)": "mixtures of experts are",
    r"(^|_)q?lora(_|$)": "LoRA is",
}
"""Features that users look for and do not find, by patterns of their names."""
REMOVED = {
    "disk_mib": "the doctor's sizes are fixed: measure disks with fio",
    "message_mib": "the doctor's sizes are fixed: measure links with nccl-tests",
    "slow_factor": "the doctor names ranks that are 1.3 times slower than the others",
    "search": "plan searches for no layout: plan each that you consider, and measure the best ones",
}
"""Settings that were removed, and what to do instead."""
_NONE_TEXTS = (None, "", "none", "None", "null")


@dataclass(frozen=True)
class Assignment:
    """A value given to a name in one source.

    Attributes:
        name: as written, in any case, with dashes or underscores, with or without its section
            (`optimizer.learning_rate`); "" for a word that assigns nothing.
        raw: text; in a recipe also a list of texts, or None.
        where: text for messages: `--learning_rate=abc` or `a.yaml: learning_rate: abc`.
        flag: name for messages: `--learning_rate` or `a.yaml: learning_rate`.
        valueless: whether the name stood alone; `raw` is then "True" or "False", which only boolean settings take.
        is_typed: whether a user wrote it for this project, so that `$` in a path begins a variable.
    """

    name: str
    raw: Raw
    where: str
    flag: str
    valueless: bool = False
    source: Source = COMMAND_LINE
    is_typed: bool = True

    @property
    def section_and_name(self) -> tuple[str, str]:
        """Section ("" if none is written) and name, in lower case and with underscores."""
        section, _, name = self.name.replace("-", "_").lower().rpartition(".")
        return section, name


class Reader(Generic[T]):
    """Collects the settings of one root from assignments.

    Attributes:
        values: parsed values by name.
        chosen: assignments that the values come from, by name.
        problems: one sentence each.
        unreadable: names of settings with a value that could not be parsed.
    """

    def __init__(self, root: type[T]) -> None:
        self.root = root
        self.settings = settings_of(root)
        self.aliases = {
            name: alias
            for name, alias in ALIASES.items()
            if alias.target in self.settings and name not in self.settings
        }
        self.values: dict[str, Any] = {}
        self.chosen: dict[str, Assignment] = {}
        self.problems: list[str] = []
        self.unreadable: set[str] = set()

    def read(self, given: Iterable[Assignment]) -> None:
        """Read assignments; values of a later source replace those of earlier sources."""
        for _, assignments in groupby(given, key=lambda assignment: assignment.source):
            self._read_source(assignments)

    def _read_source(self, assignments: Iterable[Assignment]) -> None:
        seen: dict[str, tuple[Assignment, Any]] = {}
        for assignment in assignments:
            setting = self.find(assignment)
            if setting is None:
                if not assignment.name:
                    more = ", --recipe=<file>, or the folder of a run (there is no such one)"
                    remedy = "name=value or --name=value" + more * issubclass(self.root, TrainConfig)
                    self.problems.append(f"{assignment.where} sets nothing: write {remedy}")
                elif assignment.section_and_name[1] not in ALWAYS_NONE or assignment.raw not in _NONE_TEXTS:
                    self.problems.append(f"{assignment.flag} is not known: {self._hint(assignment)}")
                continue
            if assignment.valueless and setting.base is not bool:
                self._refuse(setting, f"{assignment.flag} has no value: write {assignment.flag}=…")
                continue
            try:
                value = self._parse(setting, assignment)
            except ValueError as error:
                self._refuse(setting, f"{assignment.where}: {error}")
                continue
            if setting.name in seen and seen[setting.name][1] != value:
                what = "two run lengths" if setting.name == "num_steps" else f"two values for {setting.name}"
                self._refuse(setting, f"{what}, {seen[setting.name][0].where} and {assignment.where}: keep one")
            seen[setting.name] = (assignment, value)
            self.values[setting.name], self.chosen[setting.name] = value, assignment

    def build(self) -> T | None:
        """Build the root; None, with a problem per missing setting, if required settings are missing."""
        missing = [known for known in self.settings.values() if known.required and known.name not in self.values]
        self.problems += [
            f"--{known.name} is missing: {known.help}" for known in missing if known.name not in self.unreadable
        ]
        return None if missing else build(self.root, self.values)

    def _refuse(self, setting: Setting, problem: str) -> None:
        self.problems.append(problem)
        self.unreadable.add(setting.name)

    def find(self, assignment: Assignment) -> Setting | None:
        """Return the setting that an assignment's name means; None if the name is unknown."""
        section, name = assignment.section_and_name
        setting = self.settings.get(self.aliases[name].target if name in self.aliases else name)
        return setting if setting is not None and section in ("", setting.section) else None

    def _hint(self, assignment: Assignment) -> str:
        name = assignment.section_and_name[1]
        if missing := next((what for pattern, what in NOT_SUPPORTED.items() if re.search(pattern, name)), None):
            return f"{missing} not supported"
        if name in REMOVED:
            return REMOVED[name]
        known = [*self.settings, *self.aliases, *(RECIPE_NAMES if issubclass(self.root, TrainConfig) else ())]
        return did_you_mean(name, known, "did you mean {}?") or "--help lists every setting"

    def _parse(self, setting: Setting, assignment: Assignment) -> Any:
        """Parse an assignment's text, after the translation of an alias."""
        alias, raw = self.aliases.get(assignment.section_and_name[1]), assignment.raw
        raw = alias.translate(raw) if alias is not None and isinstance(raw, str) else raw
        return parse_value(setting, raw, is_typed=assignment.is_typed)


def setting_named(key: str) -> str | None:
    """Return the setting of training that a key names, by name or alias, with or without its section."""
    setting = Reader(TrainConfig).find(Assignment(key, "", where=key, flag=key))
    return None if setting is None else setting.name


def _add_token_unit(text: str) -> str:
    """Convert a number of tokens to a duration: 5B becomes 5Btok."""
    text = text.strip()
    if text.lower().endswith(("tok", "token", "tokens")):
        return text
    if text[-1:].isalpha() and text[-1:] not in MULTIPLIERS:
        raise ValueError("it counts tokens, so write 5_000_000_000 or 5B")
    return text + "tok"


ALIASES: dict[str, Alias] = {
    "max_tokens": Alias("num_steps", "num_steps in tokens: --max_tokens=5B is --num_steps=5Btok", _add_token_unit),
    "sharding_group_size": Alias("hsdp_group_size", "the same as hsdp_group_size"),
    "eos_token": Alias("sep_token", "the same as sep_token"),
    "report_to": Alias("tracker", "the same as tracker"),
    "from": Alias("kind", "translate: the same as kind"),
    "save_total_limit": Alias("keep_last", "the same as keep_last"),
    "resume_from_checkpoint": Alias("ckpt_load_path", "commands other than train: the same as ckpt_load_path"),
}
