"""`pretrain translate`: conversion of another system's settings into a recipe; also used wherever a recipe is read.

file -> parse -> detect the system -> rules of its table -> recipe, and a table with a line per key
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretraining.config.assignments import TRANSLATED, Assignment, Reader, setting_named
from pretraining.config.command_line import is_bare_path, read_arguments, resolve_config
from pretraining.config.fields import settings_of
from pretraining.config.recipes import FOREIGN_SUFFIXES, Recipe, is_of_ours
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw
from pretraining.errors import ConfigError
from pretraining.files import check_replaceable, exists, output_errors, write_atomic
from pretraining.launch.terminal import print_text
from pretraining.tools.commands import TranslateConfig
from pretraining.tools.translate import composed, deepspeed, guide, nanogpt, stub
from pretraining.tools.translate.compose import Composition
from pretraining.tools.translate.parse import flatten, read_tree
from pretraining.tools.translate.translation import (
    ACCEPT_LLAMA,
    ACCEPT_UNKNOWN,
    ARGUMENT,
    DEFAULT,
    Given,
    Translation,
    rule_for,
)

YAML = (".yaml", ".yml")
FIRST_WORDS = "# Translated from "
"""First words of a translated recipe; only such a file may be overwritten."""
COMMAND_LINE = "the command line"
_PLAIN = re.compile(r"[\w./+-]*\w([\w./+,:%-]*[\w./%])?")
"""Scalars that need no quotes in YAML."""

SYSTEMS = {
    "stub": stub.SYSTEM,
    "guide": guide.SYSTEM,
    "deepspeed": deepspeed.SYSTEM,
    "composed": composed.SYSTEM,
    "nanogpt": nanogpt.SYSTEM,
}


def owners_of(key: str) -> list[str]:
    """Return the systems that have a key, by name or else by its section."""
    names = {kind: system.name_of(key) for kind, system in SYSTEMS.items()}
    exact = [kind for kind, name in names.items() if name in SYSTEMS[kind].rules]
    return exact or [kind for kind, name in names.items() if rule_for(name, SYSTEMS[kind].rules)]


def detect(keys: Collection[str], name: str, enough: int = 2) -> str | None:
    """Return the system that the keys belong to, by keys that only one system has; None if these are not `enough`.

    Raises:
        ConfigError: the keys are those of several systems.
    """
    if "defaults" in keys:
        return "composed"
    signs = _signs(keys)
    found = [kind for kind in SYSTEMS if signs.count(kind) >= enough]
    if len(found) > 1:
        raise ConfigError(f"{name} may be {' or '.join(found)}. Choose: {_choice_of(name, found[0])}")
    return next(iter(found), None)


def _signs(keys: Collection[str]) -> list[str]:
    """Return a system's name for each key that only this system has."""
    owners = [owners_of(key) for key in keys if setting_named(key) is None]
    return [each[0] for each in owners if len(each) == 1]


def _choice_of(name: str, kind: str) -> str:
    return f"pretrain translate {shlex.quote(name)} --from={kind} --output_path=mine.yaml; then train with that recipe"


def _is_only_ours(key: str) -> bool:
    return setting_named(key) is not None and all(
        system.name_of(key) not in system.rules for system in SYSTEMS.values()
    )


def _hints(values: Mapping[str, str | None], name: str, is_ours: bool) -> dict[str, str]:
    """Return what to write instead of each key of another system in a recipe of this project."""
    hints: dict[str, str] = {}
    owners = {key: owners for key in values if setting_named(key) is None and (owners := owners_of(key))}
    for kind, system in SYSTEMS.items():
        keys = [key for key, found in owners.items() if found[0] == kind]
        given = {system.name_of(key): Given(key, values[key], name) for key in keys}
        translation = Translation(given, {}, ())
        translation.add_defaults(system.defaults(translation), f"{kind} for {name}")
        translation.apply_rules(system.combine, system.rules)
        for key, each in given.items():
            made = [f"{name}={text}" for name, (text, source) in translation.settings.items() if source is each]
            remark = translation.notes[key].remark.partition(". --")[0] if key in translation.notes else ""
            hints[each.key] = " ".join(made) or ": ".join(filter(None, ("delete it", remark)))
    signs = [] if is_ours else _signs(values)
    more = f"; or, if the file is another system's: {_choice_of(name, signs[0])}" if signs else ""
    return {key: f"{hint}{more}" for key, hint in hints.items()}


def translate_recipe(
    path: Path | None, name: str, arguments: Mapping[str, Raw], accepts: Collection[str], kind: str | None = None
) -> Recipe | None:
    """Return the recipe of another system's file and of the arguments that set its keys.

    Args:
        path: None for dotted words of a composed config without a file.
        name: name of the file in messages.
        arguments: arguments of the command line, by name.
        accepts: ACCEPT_LLAMA, ACCEPT_UNKNOWN, or both.
        kind: system of the file; None = detected from its keys.

    Returns:
        The recipe; None if the file has no key of a known system; a recipe with `hints` alone if it is this project's,
        or has too few of such keys.

    Raises:
        ConfigError: every problem of the file.
    """
    tree = {} if path is None else read_tree(path)
    values, is_foreign = flatten(tree), path is not None and path.suffix in FOREIGN_SUFFIXES
    if path is None:
        kind = "composed"
    elif kind is None:
        is_ours = not is_foreign and "defaults" not in values and any(map(_is_only_ours, values))
        kind = None if is_ours else detect(values, name, enough=1 if is_foreign else 2)
        if kind is None and is_foreign:
            raise _unknown_system(name)
        if kind is None:
            hints = _hints(values, name, is_ours)
            return Recipe(name, [], hints=hints) if hints else None
    translation, used = _translate(path, name, tree, kind, arguments, accepts)
    lines, notes = translation.table(), translation.notes.values()
    recipe = Recipe(
        name,
        [],
        used=frozenset(used),
        names=tuple(key.removesuffix(".*") for key in SYSTEMS[kind].rules),
        system=kind if translation.notes else "",
        table=tuple(lines),
        given_table=tuple(line for line, note in zip(lines, notes, strict=True) if note.given.level != DEFAULT),
        prepare=translation.prepare,
    )
    for setting, (text, given) in translation.settings.items():
        is_argument = given.level == ARGUMENT and setting == next(iter(translation.note_of(setting).settings))
        source = f"command line, {given.key}" if given.level == ARGUMENT else f"{TRANSLATED}{given.key} of {name}"
        from_file = recipe.defaults if given.level == DEFAULT else recipe.assignments
        target = recipe.from_arguments if is_argument else from_file
        target.append(Assignment(setting, text, where=given.quote, flag=given.place, source=source))
    return recipe


def _translate(
    path: Path | None,
    name: str,
    tree: Mapping[str, Any],
    kind: str,
    arguments: Mapping[str, Raw],
    accepts: Collection[str],
) -> tuple[Translation, set[str]]:
    """Return the translation, and the names of arguments that set keys of the other system."""
    system = SYSTEMS[kind]
    given, problems, used = dict[str, Given](), list[str](), set[str]()
    values = [Given(key, text, name) for key, text in flatten(tree).items()]
    if kind == "composed" and path is not None:
        composition = Composition(path, {argument: _text_of(raw) for argument, raw in arguments.items()})
        values, used = list(composition.values.values()), set(composition.choices)
    for value in values:
        before = given.setdefault(system.name_of(value.key), value)
        if before.text != value.text:
            problems.append(f"two values for {system.name_of(value.key)}: {before.quote} and {value.quote}: keep one")
    flags = dict[str, str]()
    for argument in [argument for argument in arguments if argument not in used]:
        key, ours = system.name_of(argument.replace("-", "_")), setting_named(argument)
        is_theirs = ours is None or (path is not None and key in system.rules)
        if is_theirs and rule_for(key, system.rules) not in (None, f"{key}.*"):  # a section alone sets nothing
            given[key] = Given(argument, _text_of(arguments[argument]), COMMAND_LINE, ARGUMENT)
            used.add(argument)
        elif ours is not None:
            flags[ours] = _text_of(arguments[argument]) or "none"
    translation = Translation(given, flags, accepts)
    translation.problems += problems
    if path is not None or len(used) + ("optimizer" in flags) > 1:  # one word alone is an alias
        translation.add_defaults(system.defaults(translation), f"{kind} for {name}")
    translation.apply_rules(system.combine, system.rules)
    translation.finish()
    return translation, used


def _text_of(raw: Raw) -> str | None:
    """Return the value of an argument as in a file; None for null."""
    text = f"[{', '.join(raw)}]" if isinstance(raw, list) else raw
    return None if text is None or text.strip().lower() in ("null", "none") else text


def translate_command(overrides: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Translate a file with the arguments that `pretrain train` takes beside it; raises as `translate`."""
    own: Reader[TranslateConfig] = Reader(TranslateConfig)

    def is_own(word: str) -> bool:
        name = word.partition("=")[0].lstrip("-")
        return is_bare_path(word) or own.find(Assignment(name, "", where=word, flag=word)) is not None

    words = [word for word in overrides if is_own(word)]
    given = {name: value for name, value in flags.items() if is_own(f"{name}=")}
    rest, problems = read_arguments(
        [word for word in overrides if word not in words],
        {name: value for name, value in flags.items() if name not in given},
        reads_recipes=False,
    )
    if problems:
        raise ConfigError(problems)
    translate(resolve_config(TranslateConfig, words, given).config, rest)


def translate(config: TranslateConfig, arguments: Sequence[Assignment] = ()) -> None:
    """Print a table with a line per key, then print or write the recipe.

    Args:
        arguments: settings of the other system or of this project that win over the file.

    Raises:
        ConfigError: the file belongs to no known system or cannot be translated, or the recipe's name is not YAML.
        PathError: the recipe cannot be written.
    """
    name, path = config.input_path, Path(config.input_path)
    if config.output_path is not None and Path(config.output_path).suffix not in YAML:
        raise ConfigError(f"--output_path={config.output_path}: the name of a recipe must end in {' or '.join(YAML)}")
    if not exists(path):
        raise ConfigError(f"{name}: there is no such file")
    if config.kind is None and is_of_ours(read_tree(path)):
        raise ConfigError(f"{name} is already a recipe of this project: train with --recipe={name}")
    accepts = [accepted for accepted in (ACCEPT_LLAMA, ACCEPT_UNKNOWN) if getattr(config, accepted)]
    recipe = translate_recipe(path, name, {given.name: given.raw for given in arguments}, accepts, config.kind)
    if recipe is None:
        raise _unknown_system(name)
    if recipe.hints:
        raise ConfigError([f"{name}: {key} is not known: {hint}" for key, hint in recipe.hints.items()])
    on_top = [*recipe.from_arguments, *(given for given in arguments if given.name not in recipe.used)]
    reader = Reader(TrainConfig, recipe.names)
    for source in (recipe.defaults, recipe.assignments, on_top):
        reader.read(source)
    if reader.problems:
        raise ConfigError(reader.problems)
    print_text("\n".join([f"{name}: {SYSTEMS[recipe.system].title}\n", *recipe.table]))
    text = recipe_text(recipe, on_top)
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


def _unknown_system(name: str) -> ConfigError:
    known = [f"  {kind}: {each.title}" for kind, each in SYSTEMS.items()]
    return ConfigError("\n".join([f"{name} belongs to no known system. Known are:", *known]))


def recipe_text(recipe: Recipe, on_top: Sequence[Assignment] = ()) -> str:
    """Return a recipe by sections, under its table; settings `on_top` win."""
    values = {given.name: str(given.raw) for given in (*recipe.defaults, *recipe.assignments)}
    values |= {setting_named(given.name) or given.name: _text_of(given.raw) or "null" for given in on_top}
    title = f"{FIRST_WORDS}{recipe.name} ({SYSTEMS[recipe.system].title}):"
    lines = [title, *(f"#{line}" for line in recipe.table)]
    section = None
    for setting in settings_of(TrainConfig).values():
        if setting.name in values:
            if setting.section != section:
                section = setting.section
                lines.append(f"{section}:")
            lines.append(f"  {setting.name}: {_as_yaml(values[setting.name])}")
    return "\n".join(lines) + "\n"


def _as_yaml(text: str) -> str:
    """Return a text as a YAML scalar; the reader of recipes takes every scalar but null as text."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
