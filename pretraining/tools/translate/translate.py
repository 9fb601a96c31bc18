"""`pretrain translate`, and the hook that reads another system's file or words where a recipe is expected.

file -> parse -> detect -> rules of one system's table -> recipe of this project, and a table of what became of each key
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.assignments import Assignment, Reader, setting_named
from pretraining.config.commands import TranslateConfig
from pretraining.config.fields import settings_of
from pretraining.config.recipes import Recipe, is_of_ours
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw
from pretraining.errors import ConfigError
from pretraining.files import check_replaceable, exists, output_errors, write_atomic
from pretraining.launch.terminal import print_text
from pretraining.tools.translate import composed, deepspeed, guide, nanogpt, stub
from pretraining.tools.translate.compose import Composition
from pretraining.tools.translate.parse import flatten, read_tree
from pretraining.tools.translate.translation import (
    ACCEPT_LLAMA,
    ACCEPT_UNKNOWN,
    ARGUMENT,
    DEFAULT,
    Given,
    Note,
    Translation,
    rule_for,
)

YAML = (".yaml", ".yml")
FIRST_WORDS = "# Translated from "
"""The beginning of a recipe that is written here; such a file may be replaced."""
COMMAND_LINE = "the command line"


SYSTEMS = {
    "stub": stub.SYSTEM,
    "guide": guide.SYSTEM,
    "deepspeed": deepspeed.SYSTEM,
    "composed": composed.SYSTEM,
    "nanogpt": nanogpt.SYSTEM,
}
_NO_LONGER_READ = (
    *("per_device_train_batch_size", "lr_scheduler_type"),  # TrainingArguments of Hugging Face's Trainer
    *("training.local_batch_size", "parallelism", "job"),  # torchtitan
)


def detect(keys: Collection[str], name: str) -> str | None:
    """Return the system that a file's keys are of; None where no key is a sign of one.

    Raises:
        ConfigError: there are signs of several, or of one whose files are no longer read.
    """

    def has(sign: str) -> bool:
        return any(key == sign or key.startswith(f"{sign}.") for key in keys)

    found = {system: signs for system in SYSTEMS if (signs := [sign for sign in SYSTEMS[system].signs if has(sign)])}
    removed = [sign for sign in _NO_LONGER_READ if has(sign)]
    if removed and not found:
        raise ConfigError(
            f"{name}: {removed[0]}: files of torchtitan and of Hugging Face's Trainer are not read: "
            "docs/coming-from.md has a table of their names and ours"
        )
    if len(found) > 1:
        shown = "; ".join(f"{system}: {', '.join(signs)}" for system, signs in found.items())
        raise ConfigError(
            f"{name} may be {' or '.join(found)} ({shown}): say which, pretrain translate {shlex.quote(name)} "
            f"--from={next(iter(found))} --output_path=mine.yaml, and train with that recipe"
        )
    return next(iter(found), None)


def translate_recipe(
    path: Path | None, name: str, arguments: Mapping[str, Raw], accepts: Collection[str]
) -> Recipe | None:
    """Read a file of another system, with the arguments that set its keys; without a file, arguments alone.

    Args:
        path: of the file; None for the dotted words of a composed config without any file.
        name: of the file in messages.
        arguments: of the command line, by name.
        accepts: ACCEPT_LLAMA, ACCEPT_UNKNOWN, or both.

    Returns:
        The settings; None where the file is of no system that is known.

    Raises:
        ConfigError: carries every problem of the file.
    """
    tree = {} if path is None else read_tree(path)
    kind = "composed" if path is None else detect(flatten(tree), name)
    if kind is None and path is not None and path.suffix in (".toml", ".py"):
        raise ConfigError(f"{name} is of no system that is known. There are:\n{_known_systems()}")
    if kind is None:
        return None
    translation, used = _translate(path, name, tree, kind, arguments, accepts)
    return _as_recipe(name, kind, translation, used)


def _translate(
    path: Path | None,
    name: str,
    tree: Mapping[str, Any],
    kind: str,
    arguments: Mapping[str, Raw],
    accepts: Collection[str],
) -> tuple[Translation, set[str]]:
    """Return the translation, and the names of the arguments that set keys of the other system."""
    system = SYSTEMS[kind]
    given, problems, used = dict[str, Given](), list[str](), set[str]()
    values = [Given(key, text, name) for key, text in flatten(tree).items()]
    if kind == "composed" and path is not None:
        composition = Composition(path, {argument: _text_of(raw) for argument, raw in arguments.items()})
        values, used = list(composition.values.values()), set(composition.choices)
    for value in values:
        before = given.setdefault(system.name_of(value.key), value)
        if before.text != value.text:
            problems.append(f"two values for {system.name_of(value.key)}: {before.told} and {value.told}: keep one")
    flags = dict[str, str]()
    for argument, raw in arguments.items():
        key, ours = system.name_of(argument.replace("-", "_")), setting_named(argument)
        is_theirs = ours is None or (path is not None and key in system.rules)
        if argument in used:
            continue
        if is_theirs and rule_for(key, system.rules) is not None:
            of_file = given[key].text if key in given else None
            given[key] = Given(argument, _text_of(raw), COMMAND_LINE, ARGUMENT, of_file or "")
            used.add(argument)
        elif ours is not None:
            flags[ours] = _text_of(raw) or "none"
    for key in given.keys() & system.nulls.keys():
        if given[key].text is None:
            given[key] = replace(given[key], text=system.nulls[key])
    translation = Translation(given, flags, accepts)
    translation.problems += problems
    if path is not None:
        translation.fill_in(system.defaults(translation))
    translation.settle(system.combine, system.rules)
    translation.finish()
    return translation, used


def _text_of(raw: Raw) -> str | None:
    """Return the value of an argument as a file would give it; null is nothing."""
    text = f"[{', '.join(raw)}]" if isinstance(raw, list) else raw
    return None if text is None or text.strip().lower() in ("null", "none") else text


def _as_recipe(name: str, kind: str, translation: Translation, used: Collection[str]) -> Recipe:
    recipe = Recipe(
        name,
        [],
        used=frozenset(used),
        names=tuple(key.removesuffix(".*") for key in SYSTEMS[kind].rules),
        system=kind if translation.notes else "",
        table=tuple(translation.table()),
    )
    for setting, (text, given) in translation.settings.items():
        was_asked_for = given.level == ARGUMENT and setting == next(iter(translation.note_of(setting).settings))
        source = f"command line, {given.key}" if given.level == ARGUMENT else f"translated from {given.key} of {name}"
        of_file = recipe.defaults if given.level == DEFAULT else recipe.assignments
        target = recipe.from_arguments if was_asked_for else of_file
        target.append(Assignment(setting, text, where=given.told, flag=given.place, source=source))
    return recipe


def translate(config: TranslateConfig) -> None:
    """Print what became of each key, then the recipe, or write the recipe where the user wants it.

    Raises:
        ConfigError: the file is of no known system, or cannot be translated; or the recipe's name is no YAML file's.
        PathError: the recipe cannot be written.
    """
    name, path = config.input_path, Path(config.input_path)
    if config.output_path is not None and Path(config.output_path).suffix not in YAML:
        raise ConfigError(f"--output_path={config.output_path}: a recipe is YAML: end its name in {' or '.join(YAML)}")
    if not exists(path):
        raise ConfigError(f"{name}: there is no such file")
    tree = read_tree(path)
    if config.kind is None and is_of_ours(tree):
        raise ConfigError(f"{name} is a recipe of this project already: train with --recipe={name}")
    kind = config.kind or detect(flatten(tree), name)
    if kind is None:
        raise ConfigError(f"{name} is of no system that is known. There are:\n{_known_systems()}")
    accepts = [accepted for accepted in (ACCEPT_LLAMA, ACCEPT_UNKNOWN) if getattr(config, accepted)]
    translation, used = _translate(path, name, tree, kind, {}, accepts)
    reader = Reader(TrainConfig)
    recipe = _as_recipe(name, kind, translation, used)
    reader.read([*recipe.defaults, *recipe.assignments])
    if reader.problems:
        raise ConfigError(reader.problems)
    print_text("\n".join([f"{name}: {SYSTEMS[kind].what}\n", *translation.table()]))
    text = recipe_text(name, kind, translation)
    if config.output_path is None:
        print_text(f"\n{text}", end="")
        return
    output = Path(config.output_path)
    with output_errors(output):
        check_replaceable(output, beginning=FIRST_WORDS.encode())
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, text)
    command = shlex.join(["pretrain", "train", f"--recipe={output}"])
    print_text(f"\nwritten to {output}. Train with it:\n  {command}")


def _known_systems() -> str:
    return "\n".join(f"  {kind}: {each.what}, with {', '.join(each.signs[:4])}" for kind, each in SYSTEMS.items())


def recipe_text(name: str, kind: str, translation: Translation) -> str:
    """Return a recipe by sections, each setting with what it was made of behind it."""
    lines = [f"{FIRST_WORDS}{name} ({SYSTEMS[kind].what})."]
    section, explained = None, list[Note]()
    for setting in settings_of(TrainConfig).values():
        if setting.name not in translation.settings:
            continue
        if setting.section != section:
            section = setting.section
            lines.append(f"{section}:")
        note = translation.note_of(setting.name)
        value = _as_yaml(translation.settings[setting.name][0])
        lines.append(f"  {setting.name}: {value}  # {_explained(note, with_remark=note not in explained)}")
        explained.append(note)
    if without := [note for note in translation.notes.values() if not note.settings]:
        lines += ["# Without a setting here:", *(f"#   {_explained(note)}" for note in without)]
    return "\n".join(lines) + "\n"


def _explained(note: Note, with_remark: bool = True) -> str:
    return " ".join((note.written + (f" ({note.remark})" if note.remark and with_remark else "")).split())


def _as_yaml(text: str) -> str:
    written: str = yaml.dump(text, Dumper=_PlainDumper, width=10**6, allow_unicode=True)
    return written.removesuffix("...\n").strip()


class _PlainDumper(yaml.SafeDumper):
    """YAML for the reader of recipes, to which every scalar but null is text: numbers stand without quotes."""


_PlainDumper.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
    for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
