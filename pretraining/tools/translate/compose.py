"""Composition of a main file, the files in its `defaults:`, and choices on the command line into one mapping.

    conf/config.yaml            defaults: [optimizer: adamw, model: small, train, logging]
    conf/optimizer/adamw.yaml   goes to the section `optimizer`; may have its own defaults
    conf/train.yaml             goes to the section `train`, whether or not its lines stand under `train:`
    optimizer=sgdm              selects conf/optimizer/sgdm.yaml

Files are merged in the order of `defaults:`, and later files win. A file's own lines are merged at `_self_`, or last.
These are the rules of Hydra 1.1 and later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretraining.config.assignments import setting_named
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.errors import ConfigError
from pretraining.files import is_file, is_folder
from pretraining.tools.translate.parse import flatten
from pretraining.tools.translate.translation import Given

_SECTIONS = ("optimizer", "train", "dataset", "model", "logging", "checkpoint", "experimental", "test")
"""Sections that a plain file of the same name belongs to."""
_NAMED = {"optimizer": "optimizer.name", "optimizer/lr_config": "optimizer.lr_config.schedule"}
"""Per group, the key for the name of the chosen file, if no file sets it."""
_CHOICE = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
_PACKAGE = re.compile(r"(?:^#.*\n|^\s*\n)*?#\s*@package:?\s+(\S+)")


class Composition:
    """The merged settings of all files, as `values`.

    Args:
        path: main file.
        arguments: arguments of the command line; `choices` are those that select a group's file.

    Raises:
        ConfigError: a missing or invalid file, or an argument for a group that no `defaults:` name.
    """

    def __init__(self, path: Path, arguments: Mapping[str, str | None]) -> None:
        self.values: dict[str, Given] = {}
        self._folder, self._groups = path.parent, set[str]()
        self.choices = {name: value for name, value in arguments.items() if self._is_choice(name, value)}
        self._add(path, "", "", ())
        for name in sorted(self.choices.keys() - self._groups):
            raise ConfigError(f"{name}={self.choices[name]}: `defaults:` of {path} have no group {name}")

    def _is_choice(self, name: str, value: str | None) -> bool:
        """Return whether an argument selects a group's file, rather than a value or a setting of this project."""
        if not _CHOICE.fullmatch(name) or not is_folder(self._folder / name):
            return False
        return value is None or setting_named(name) is None or is_file(self._path_of(f"{name}/{value}"))

    def _add(self, path: Path, group: str, package: str, above: tuple[Path, ...]) -> None:
        """Merge a file and the files in its `defaults:`.

        Args:
            group: folder of the file, relative to the main file.
            package: dotted key of the section that the file sets.
            above: files whose defaults include this file.
        """
        if path in above:
            raise ConfigError(f"{path}: its defaults include the file itself")
        content = read_text(path, str(path))
        tree = parse_tree(content, str(path)) or {}
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} has no settings: write `name: value` on each line")
        header = _PACKAGE.match(content)
        if header:
            package = header[1].replace("_group_", group.replace("/", ".")).removeprefix("_global_").lstrip(".")
        elif above and not group and not package and path.stem in _SECTIONS and path.stem not in tree:
            package = path.stem
        entries = tree.pop("defaults", None) or []
        entries = entries if isinstance(entries, list) else [entries]
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            if entry != "_self_":
                self._add_entry(path, entry, (group, package), (*above, path))
                continue
            for key, text in flatten(tree).items():
                self._put(Given(f"{package}.{key}" if package else key, text, str(path)))
        if group in _NAMED and _NAMED[group] not in self.values:
            self._put(Given(_NAMED[group], path.stem, str(path)))

    def _add_entry(self, path: Path, entry: Any, inside: tuple[str, str], above: tuple[Path, ...]) -> None:
        """Merge the file of an entry of `defaults:`; a choice on the command line wins."""
        name, chosen = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, "")
        if isinstance(name, str) and "hydra/" in name:
            return
        if not isinstance(name, str) or not (chosen is None or isinstance(chosen, str)) or " " in name:
            raise ConfigError(f"{path}: defaults: {entry}: write `- group: name` or `- name`")
        group, package = inside
        place = f"{group}/{name}" if group else name
        if chosen == "":  # a file in the same folder, without a group
            self._add(self._path_of(place), group, package, above)
            return
        self._groups.add(place)
        chosen = self.choices.get(place, chosen)
        if chosen is not None:
            target = ".".join(filter(None, [package if group else "", *name.split("/")]))
            self._add(self._path_of(f"{place}/{chosen}"), place, target, above)

    def _put(self, given: Given) -> None:
        """Set a key; a value replaces a section, and a section replaces a value."""
        others = self.values.items()
        kept = {name: value for name, value in others if not f"{name}.".startswith(f"{given.key}.")}
        self.values = {name: value for name, value in kept.items() if not given.key.startswith(f"{name}.")}
        self.values[given.key] = given

    def _path_of(self, place: str) -> Path:
        return self._folder / f"{place.removesuffix('.yaml')}.yaml"
