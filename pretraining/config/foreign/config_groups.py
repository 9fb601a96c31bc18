"""One tree of settings made of a main file, the files that its `defaults:` name, and choices on the command line.

    conf/config.yaml            defaults: [optimizer: adamw, model: small, train, logging]
    conf/optimizer/adamw.yaml   lands under `optimizer`; may have defaults of its own
    conf/train.yaml             lands under `train`, with or without that word above its lines

    optimizer=sgdm              chooses conf/optimizer/sgdm.yaml

Files are merged in the order of `defaults:`, later ones over earlier ones; a file's own lines come where `_self_`
stands, or last. These are the rules of Hydra 1.1 and later.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretraining.config.assignments import names_setting
from pretraining.config.foreign.translation import Source, copy_tree, parse_override, put
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.config.values import Raw
from pretraining.errors import ConfigError
from pretraining.files import entries_of, is_file, is_folder

SELF = "_self_"
MOST_FILES = 100
"""Of a folder; a composition has a dozen."""
_NAME = re.compile(r"[\w-]+(/[\w-]+)*")
_CHOICE = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
_PACKAGE = re.compile(r"#\s*@package:?\s+(\S+)")


def compose(
    source: Source, sections: Collection[str], said_by_choice: Mapping[str, tuple[str, Collection[str]]]
) -> tuple[Source, list[str]]:
    """Merges the files that `defaults:` name, with the choices of the command line.

    Args:
        source: the main file.
        sections: of the system: a file beside the main one that is called like one lands under it.
        said_by_choice: by group, the field that says what is chosen where its file does not, and what it may say.

    Returns:
        One source with the arguments that chose nothing, and the names of those that did.

    Raises:
        ConfigError: a file is missing or not valid, or an argument chooses one that is not there.
    """
    composition = _Composition(source, sections, said_by_choice)
    composition.add(source, group="", package="", above=())
    composition.check_choices()
    others = {name: raw for name, raw in source.overrides.items() if name not in composition.choices}
    whole = replace(source, tree=composition.tree, overrides=others, origins=composition.origins)
    return whole, list(composition.choices)


class _Composition:
    """One tree made of files, in the order in which they win over each other.

    Attributes:
        tree: of all files.
        origins: of the keys: the file that gives each, and its name there.
        choices: the arguments that choose a group's file, by group; None chooses none.
    """

    def __init__(
        self, source: Source, sections: Collection[str], said_by_choice: Mapping[str, tuple[str, Collection[str]]]
    ) -> None:
        assert source.path is not None
        self.tree: dict[str, Any] = {}
        self.origins: dict[str, tuple[Source, str]] = {}
        self.choices: dict[str, str | None] = {}
        self._sections, self._said_by_choice = sections, said_by_choice
        self._folder = source.path.parent
        self._files = 0
        self._met: set[str] = set()
        for name, raw in source.overrides.items():
            self._read_choice(name, raw)

    def add(self, source: Source, group: str, package: str, above: tuple[Path, ...]) -> None:
        """Merges a file and what its `defaults:` name.

        Args:
            group: the folder that it is in, from the main file's.
            package: the dotted key that its content lands under.
            above: the files whose defaults lead to it.
        """
        self._files += 1
        if source.path in above or self._files > MOST_FILES:
            raise ConfigError(f"{source.name}: defaults lead to more than {MOST_FILES} files, or back to the same file")
        own = {key: value for key, value in source.tree.items() if key != "defaults"}
        entries = _entries_of(source)
        for entry in entries if SELF in entries else [*entries, SELF]:
            if entry == SELF:
                self._merge(source, own, package)
            elif isinstance(entry, str):
                self._add_plain(source, entry, group, package, above)
            else:
                self._add_chosen(source, entry, group, package, above)

    def check_choices(self) -> None:
        """Raises a ConfigError where an argument chooses from a group that no `defaults:` names."""
        for name in sorted(set(self.choices) - self._met):
            raise ConfigError(
                f"{name}={self.choices[name]}: no `defaults:` choose from {self._folder / name}: add "
                f"`- {name}: {self.choices[name]}` to those of the recipe"
            )

    def _read_choice(self, name: str, raw: Raw) -> None:
        """Notes an argument that chooses a group's file; others, and those that are settings here, are none."""
        if not _NAME.fullmatch(name) or not is_folder(self._folder / name):
            return
        value = parse_override(name, raw)
        if value is None:
            self.choices[name] = None
        elif isinstance(value, str) and self._file_of(f"{name}/{value}") is not None:
            self.choices[name] = value
        elif not names_setting(name):
            raise ConfigError(f"{name}={value}: {self._missing(f'{name}/{value}')}")

    def _add_plain(self, source: Source, name: str, group: str, package: str, above: tuple[Path, ...]) -> None:
        """Adds a file that is named without a group: one beside the file that names it."""
        if name.startswith("hydra/"):
            return
        place = name.lstrip("/") if name.startswith("/") or not group else f"{group}/{name}"
        self._load(source, place, name, package, above, is_plain=True)

    def _add_chosen(
        self, source: Source, entry: Mapping[str, Any], group: str, package: str, above: tuple[Path, ...]
    ) -> None:
        ((key, value),) = entry.items()
        *words, name = key.split()
        if "override" in words:
            raise ConfigError(
                f"{source.name}: defaults: {key}: {value}: a choice is changed where it is made: write "
                f"{name.lstrip('/')}={value} on the command line, or in the file that has it"
            )
        if "@" in name:
            raise ConfigError(
                f"{source.name}: defaults: {key}: {value}: a group's file lands under the group's name: write "
                f"{name.partition('@')[0]}: {value}"
            )
        if name.lstrip("/").startswith("hydra/"):
            return
        is_nested = group and not name.startswith("/")
        place = f"{group}/{name}" if is_nested else name.lstrip("/")
        target = ".".join(filter(None, [package if is_nested else "", *name.lstrip("/").split("/")]))
        self._met.add(place)
        chosen = self.choices.get(place, value)
        for each in chosen if isinstance(chosen, list) else [chosen]:
            if each == "???":
                raise ConfigError(
                    f"{source.name}: defaults: {name} must be chosen: write {place}=… on the command line "
                    f"({self._choices_in(self._folder / place)})"
                )
            if each is not None and ("optional" not in words or self._file_of(f"{place}/{each}") is not None):
                self._load(source, f"{place}/{each}", f"{name}: {each}", target, above, is_plain=False)

    def _load(
        self, source: Source, place: str, entry: str, package: str, above: tuple[Path, ...], is_plain: bool
    ) -> None:
        path = self._file_of(place)
        if path is None:
            raise ConfigError(f"{source.name}: defaults: {entry}: {self._missing(place)}")
        content = read_text(path, str(path))
        tree = parse_tree(content, str(path))
        if not isinstance(tree, dict | None):
            raise ConfigError(f"{path} holds no settings: write name: value on each line")
        loaded = Source(str(path), path, content, tree or {})
        group, _, stem = place.rpartition("/")
        header = _package_in(content)
        if header is not None:
            package = header.replace("_group_", group.replace("/", ".")).removeprefix("_global_").lstrip(".")
        elif is_plain and not package and stem in self._sections and stem not in loaded.tree:
            package = stem
        self.add(loaded, group, package, (*above, source.path or Path()))
        field, names = self._said_by_choice.get(group, ("", ()))
        if stem in names and field not in Source("", None, "", self.tree).flattened():
            put(self.tree, field, stem)
            self.origins[field] = (loaded, field.rpartition(".")[2])

    def _merge(self, source: Source, own: Mapping[str, Any], package: str) -> None:
        target = self.tree
        for part in package.split(".") if package else ():
            if not isinstance(target.get(part), dict):
                target[part] = {}
            target = target[part]
        _merge_into(target, copy_tree(own))
        for key in Source("", None, "", own).flattened():
            self.origins[f"{package}.{key}" if package else key] = (source, key)

    def _file_of(self, place: str) -> Path | None:
        if not _CHOICE.fullmatch(place) or ".." in place:
            return None
        paths = (self._folder / f"{place.removesuffix('.yaml')}{suffix}" for suffix in (".yaml", ".yml"))
        return next((path for path in paths if is_file(path)), None)

    def _missing(self, place: str) -> str:
        path = self._folder / f"{place}.yaml"
        return f"{path} is not there; {self._choices_in(path.parent)}"

    def _choices_in(self, folder: Path) -> str:
        names = sorted(path.stem for path in entries_of(folder) if path.suffix in (".yaml", ".yml"))
        return f"{folder} has {', '.join(names) or 'no files'}"


def _package_in(content: str) -> str | None:
    """Returns what the comments at the beginning of a file say about where it lands."""
    for line in content.splitlines():
        if line.strip() and not line.startswith("#"):
            return None
        if match := _PACKAGE.match(line):
            return match[1]
    return None


def _entries_of(source: Source) -> list[Any]:
    """Returns the defaults of a file: texts, and mappings of one key."""
    entries = source.tree.get("defaults")
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise ConfigError(f"{source.name}: defaults: a list is needed, `- optimizer: adamw` on each line")
    for entry in entries:
        if not (isinstance(entry, str) or (isinstance(entry, dict) and len(entry) == 1)):
            raise ConfigError(f"{source.name}: defaults: {entry}: write `- group: name` or `- name`")
    return entries


def _merge_into(target: dict[str, Any], own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        else:
            target[key] = value
