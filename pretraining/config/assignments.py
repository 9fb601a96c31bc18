"""Settings from several sources into one dataclass: later sources win, and every problem is kept.

Each source (a recipe, the command line) is a list of assignments of raw text. The reader finds the setting that each
name means, parses the text, and notes what it could not read instead of stopping there, so that a user sees all
mistakes at once. Rules over several fields come after it and leave out the fields that could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pretraining.config.fields import Setting, build, sections_of, settings_of
from pretraining.config.names import ALIASES, nearest
from pretraining.config.values import Raw, parse_value

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """A name given a value somewhere.

    Attributes:
        name: as written; dashes count as underscores, and a section may stand in front (`optimizer.learning_rate`).
        raw: the text, or from a recipe a list of texts or None.
        where: how the user finds it again: `--learning_rate=abc` or `a.yaml: learning_rate: abc`.
        flag: how the name alone looks in this source: `--learning_rate` or `a.yaml: learning_rate`.
        valueless: whether the name stood alone; `raw` is then "True" or "False", which only settings of that type take.
    """

    name: str
    raw: Raw
    where: str
    flag: str
    valueless: bool = False


class Reader(Generic[T]):
    """Collects the settings of one root.

    Args:
        root: the dataclass.
        also_known: names that are no settings and that a misspelt one may have meant.

    Attributes:
        values: what was read, by setting name.
        problems: what could not be read, a sentence each.
        unreadable: the settings that those sentences are about.
    """

    def __init__(self, root: type[T], also_known: Sequence[str] = ()) -> None:
        self.root = root
        self.also_known = also_known
        self.settings = settings_of(root)
        self.aliases = {
            name: alias
            for name, alias in ALIASES.items()
            if alias.target in self.settings and name not in self.settings
        }
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.unreadable: set[str] = set()

    def read(self, source: Sequence[Assignment]) -> None:
        """Take in one source; what it sets replaces what earlier sources set."""
        seen: dict[str, tuple[Assignment, Any]] = {}
        for assignment in source:
            setting = self._find(assignment)
            if setting is None:
                continue
            if assignment.valueless and setting.base is not bool:
                self._note(setting, f"{assignment.flag} is given no value: write {assignment.flag}=…")
                continue
            try:
                value = self._parse(setting, assignment)
            except ValueError as error:
                self._note(setting, f"{assignment.where}: {error}")
                continue
            if setting.name in seen and seen[setting.name][1] != value:
                what = "two run lengths" if setting.name == "num_steps" else f"two values for {setting.name}"
                self._note(setting, f"{what}, {seen[setting.name][0].where} and {assignment.where}: keep one")
            seen[setting.name] = (assignment, value)
            self.values[setting.name] = value

    def build(self) -> T | None:
        """Make the root; None, with a problem for each, where required settings are missing."""
        missing = [
            setting for setting in self.settings.values() if setting.required and setting.name not in self.values
        ]
        self.problems += [
            f"--{setting.name} is missing: {setting.help}" for setting in missing if setting.name not in self.unreadable
        ]
        return None if missing else build(self.root, self.values)

    def _note(self, setting: Setting, problem: str) -> None:
        """Keep a problem with what was given for a setting."""
        self.problems.append(problem)
        self.unreadable.add(setting.name)

    def _find(self, assignment: Assignment) -> Setting | None:
        """Return the setting that a name means; None, with a problem, where there is none."""
        section, _, name = assignment.name.replace("-", "_").rpartition(".")
        name = self.aliases[name].target if name in self.aliases else name
        setting = self.settings.get(name)
        if setting is not None and section in ("", setting.section):
            return setting
        self.problems.append(f"{assignment.flag} is not known: {self._hint(section, name, setting)}")
        return None

    def _hint(self, section: str, name: str, setting: Setting | None) -> str:
        """Say what an unknown name might have meant."""
        sections = sections_of(self.root)
        if setting is not None:
            return f"{name} is a setting of {setting.section}" if setting.section else f"write {name} without a section"
        if not section and name in sections:
            return f"it is a section; write {name}.<setting>"
        candidates = [
            known.name for known in self.settings.values() if section not in sections or known.section == section
        ]
        close = nearest(name, candidates if section in sections else [*candidates, *self.aliases, *self.also_known])
        return f"did you mean {close}?" if close else "--help lists every setting"

    def _parse(self, setting: Setting, assignment: Assignment) -> Any:
        """Parse an assignment's text, translated first where it was given under a foreign name.

        Raises:
            ValueError: it has no such value.
        """
        alias = self.aliases.get(assignment.name.replace("-", "_").rpartition(".")[2])
        raw = assignment.raw
        if alias is not None and isinstance(raw, str):
            raw = alias.translate(raw)
        return parse_value(setting, raw)
