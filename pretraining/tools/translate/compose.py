"""One mapping made of a main file, the files that its `defaults:` name, and choices on the command line.

    conf/config.yaml            defaults: [optimizer: adamw, model: small, train, logging]
    conf/optimizer/adamw.yaml   lands under `optimizer`; may have defaults of its own
    conf/train.yaml             lands under `train`, with or without that word above its lines
    optimizer=sgdm              chooses conf/optimizer/sgdm.yaml

Files are merged in the order of `defaults:`, later ones over earlier ones; a file's own lines come where `_self_`
stands, or last. These are the rules of Hydra 1.1 and later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretraining.config.assignments import setting_named
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.errors import ConfigError
from pretraining.files import entries_of, is_file, is_folder
from pretraining.tools.translate.parse import flatten
from pretraining.tools.translate.translation import Given

_MOST_FILES = 100
"""Of a folder; a composition has a dozen."""
_SECTIONS = ("optimizer", "train", "dataset", "model", "logging", "checkpoint", "experimental", "test")
"""A plain file that is called like one lands under it."""
_NAMED = {"optimizer": "optimizer.name", "optimizer/lr_config": "optimizer.lr_config.schedule"}
"""By group, the key that says what is chosen where the file does not."""
_CHOICE = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
_PACKAGE = re.compile(r"(?:^#.*\n|^\s*\n)*?#\s*@package:?\s+(\S+)")


class Composition:
    """The settings of all files, in the order in which they win over each other.

    Args:
        path: of the main file.
        arguments: of the command line; those that choose a group's file are `choices`.

    Raises:
        ConfigError: a file is missing or not valid, or an argument chooses one that is not there.
    """

    def __init__(self, path: Path, arguments: Mapping[str, str | None]) -> None:
        self.values: dict[str, Given] = {}
        self._folder = path.parent
        self._read, self._met = 0, set[str]()
        self.choices = {name: value for name, value in arguments.items() if self._is_choice(name, value)}
        self._add(path, group="", package="", above=())
        for name in sorted(self.choices.keys() - self._met):
            raise ConfigError(
                f"{name}={self.choices[name]}: no `defaults:` of {path} choose from {self._folder / name}"
            )

    def _is_choice(self, name: str, value: str | None) -> bool:
        """Return whether an argument chooses a group's file; others, and settings of this project, choose none."""
        if not _CHOICE.fullmatch(name) or not is_folder(self._folder / name):
            return False
        is_there = value is None or self._path_of(f"{name}/{value}") is not None
        if not is_there and setting_named(name) is None:
            raise ConfigError(f"{name}={value}: {self._missing(f'{name}/{value}')}")
        return is_there

    def _add(self, path: Path, group: str, package: str, above: tuple[Path, ...]) -> None:
        """Merge a file and what its `defaults:` name.

        Args:
            group: the folder that it is in, from the main file's.
            package: the dotted key that its content lands under.
            above: the files whose defaults lead to it.
        """
        self._read += 1
        if path in above or self._read > _MOST_FILES:
            raise ConfigError(f"{path}: defaults lead to more than {_MOST_FILES} files, or back to the same file")
        content = read_text(path, str(path))
        tree = parse_tree(content, str(path)) or {}
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} holds no settings: write name: value on each line")
        header = _PACKAGE.match(content)
        if header:
            package = header[1].replace("_group_", group.replace("/", ".")).removeprefix("_global_").lstrip(".")
        elif above and not group and not package and path.stem in _SECTIONS and path.stem not in tree:
            package = path.stem
        entries = tree.pop("defaults", None) or []
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: defaults: a list is needed, `- optimizer: adamw` on each line")
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            if entry == "_self_":
                for key, text in flatten(tree).items():
                    self._put(Given(f"{package}.{key}" if package else key, text, str(path)))
                continue
            name, chosen = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, "")
            if isinstance(name, str) and name.removeprefix("override ").lstrip("/").startswith("hydra/"):
                continue
            if not isinstance(name, str) or re.search(r"\boverride |@", name):
                raise ConfigError(f"{path}: defaults: {entry}: write `- group: name` or `- name`")
            self._add_entry(path, name, chosen, (group, package), (*above, path))
        if group in _NAMED and _NAMED[group] not in self.values:
            self._put(Given(_NAMED[group], path.stem, str(path)))

    def _add_entry(self, path: Path, name: str, chosen: Any, inside: tuple[str, str], above: tuple[Path, ...]) -> None:
        """Merge the file that a line of `defaults:` names, or the command line chooses for it."""
        is_optional, name = name.startswith("optional "), name.removeprefix("optional ")
        group, package = inside if not name.startswith("/") else ("", "")
        name = name.lstrip("/")
        place = f"{group}/{name}" if group else name
        if chosen == "":  # a file beside, without a group of its own
            files = {place: (group, package)}
        else:
            self._met.add(place)
            chosen = self.choices.get(place, chosen)
            target = ".".join(filter(None, [package if group else "", *name.split("/")]))
            names = chosen if isinstance(chosen, list) else [chosen]
            files = {f"{place}/{each}": (place, target) for each in names if each is not None}
        if chosen == "???":
            raise ConfigError(f"{path}: defaults: {name} must be chosen: write {place}=… on the command line")
        for file, (of_group, lands) in files.items():
            found = self._path_of(file)
            if found is not None:
                self._add(found, of_group, lands, above)
            elif not is_optional:
                raise ConfigError(f"{path}: defaults: {file}: {self._missing(file)}")

    def _put(self, given: Given) -> None:
        """Set a key; a value takes the place of a section, and a section of a value."""
        others = self.values.items()
        kept = {name: value for name, value in others if not f"{name}.".startswith(f"{given.key}.")}
        self.values = {name: value for name, value in kept.items() if not given.key.startswith(f"{name}.")}
        self.values[given.key] = given

    def _path_of(self, place: str) -> Path | None:
        if not _CHOICE.fullmatch(place) or ".." in place:
            return None
        paths = (self._folder / f"{place.removesuffix('.yaml')}{suffix}" for suffix in (".yaml", ".yml"))
        return next((path for path in paths if is_file(path)), None)

    def _missing(self, place: str) -> str:
        path = self._folder / f"{place}.yaml"
        names = sorted(file.stem for file in entries_of(path.parent) if file.suffix in (".yaml", ".yml"))
        return f"{path} is not there; {path.parent} has {', '.join(names) or 'no files'}"
