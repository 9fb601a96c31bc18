"""`pretrain translate`: conversion of another system's settings into a recipe; also used wherever a recipe is read.

file -> parse -> detect the system -> rules of its table -> recipe, and a table with a line per key
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pretraining.config.assignments import COMMAND_LINE, Assignment, Reader, Source, setting_named
from pretraining.config.command_line import assign, read_given, recipe_names, resolve_config
from pretraining.config.fields import sections_of
from pretraining.config.recipes import FOREIGN_SUFFIXES, find_recipe, is_foreign, read_recipe
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, did_you_mean, format_value
from pretraining.errors import ConfigError
from pretraining.files import check_replaceable, output_errors, write_atomic
from pretraining.launch.terminal import print_text
from pretraining.tools.commands import TranslateConfig
from pretraining.tools.translate import composed, deepspeed, guide, nanogpt, stub
from pretraining.tools.translate.compose import Composition
from pretraining.tools.translate.parse import flatten, read_tree, text_of
from pretraining.tools.translate.translated import Translated
from pretraining.tools.translate.translation import (
    ACCEPT_LLAMA,
    ACCEPT_UNKNOWN,
    ARGUMENT,
    FILE,
    Given,
    Translation,
    rule_for,
)

YAML = (".yaml", ".yml")
FIRST_WORDS = "# Translated from "
"""First words of a translated recipe; only such a file may be overwritten."""
ARGUMENTS = "the command line"
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


def _hints(values: Mapping[str, str | None], name: str) -> dict[str, str]:
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
    signs = [] if any(map(_is_only_ours, values)) else _signs(values)
    more = f"; or, if the file is another system's: {_choice_of(name, signs[0])}" if signs else ""
    return {key: f"{hint}{more}" for key, hint in hints.items()}


def translate_sources(given: Sequence[Assignment], kind: str | None = None) -> Translated:
    """Translate the recipes and words of other systems; those of this project stay as they are.

    A file of another system takes words of that system, too. Dotted or positional words that are left and unknown may
    be settings of another system without a file, which win over all recipes. Another system's defaults apply only
    where no recipe of this project is overridden.

    Args:
        given: what the user gave, in any words.
        kind: system of the recipes; None = detected from their keys.

    Raises:
        ConfigError: recipes that cannot be read or translated.
    """
    accepts, given = _split_concessions(given)
    names, words = recipe_names(given)
    read, problems = list[Source | Translation](), list[str]()
    for name in names:
        try:
            recipe = _read_recipe(name, words, accepts, kind)
        except ConfigError as error:
            problems += error.problems
            continue
        read.append(recipe)
        if isinstance(recipe, Translation):
            words = [each for each in words if each.name not in recipe.used]
    if problems:
        raise ConfigError(problems)
    named = [each for each in words if "." in each.name or not each.flag.startswith("-") or setting_named(each.name)]
    arguments = {each.name: each.raw for each in named if each.name}
    if not all(map(setting_named, arguments)):
        alone = _translate(None, ARGUMENTS, "composed", arguments, accepts)
        words = [each for each in words if each.name not in alone.used]
        alone.brings_defaults = not read
        read.append(alone)
    return _merge(read, words, accepts)


def _merge(read: Sequence[Source | Translation], words: Sequence[Assignment], accepts: Sequence[str]) -> Translated:
    """Put recipes, translations and words that stay in the order in which they win."""
    sources, typed, translations = list[Source](), list[Assignment](), list[Translation]()
    for each in read:
        if isinstance(each, Source):
            sources.append(each)
            continue
        each.brings_defaults &= all(before.path is None for before in sources)
        sources.append(Source(each.name, each.assignments(FILE)))
        typed += each.assignments(ARGUMENT)
        translations.append(each)
    if accepts and not any(each.notes for each in translations):
        raise ConfigError(f"--{accepts[0]} is for recipes of other systems, and none is given")
    known = [key.removesuffix(".*") for each in translations for key in SYSTEMS[each.kind].rules]
    hinted = [replace(each, hint=each.hint or _hint(each, known)) for each in words]
    return Translated([*sources, Source(COMMAND_LINE, [*typed, *hinted])], translations)


def _split_concessions(given: Sequence[Assignment]) -> tuple[list[str], list[Assignment]]:
    """Return the names of `accept_…` flags that are set, and the other assignments."""
    flags = [each for each in given if each.section_and_name[1] in (ACCEPT_LLAMA, ACCEPT_UNKNOWN)]
    reader = Reader(TranslateConfig)
    reader.read(flags)
    if reader.problems:
        raise ConfigError(reader.problems)
    return [name for name, value in reader.values.items() if value], [each for each in given if each not in flags]


def _read_recipe(
    name: str, words: Sequence[Assignment], accepts: Collection[str], kind: str | None
) -> Source | Translation:
    """Return the translation of another system's file, or a recipe of this project with hints at foreign keys."""
    if kind is None and not is_foreign(name):
        return read_recipe(name)
    path = find_recipe(name)
    translation = translate_recipe(path, name, {each.name: each.raw for each in words if each.name}, accepts, kind)
    if translation is not None:
        return translation
    recipe, hints = read_recipe(name), _hints(flatten(read_tree(path)), name)
    return replace(recipe, assignments=[replace(each, hint=hints.get(each.name, "")) for each in recipe.assignments])


def _hint(given: Assignment, known: Sequence[str]) -> str:
    """Return the key of another system that a dotted name may have meant; "" for names in sections of this project."""
    section, name = given.section_and_name
    is_ours = section in ("", *sections_of(TrainConfig)) or setting_named(given.name)
    return "" if is_ours else did_you_mean(f"{section}.{name}", known, "did you mean {}?")


def translate_recipe(
    path: Path, name: str, arguments: Mapping[str, Raw], accepts: Collection[str], kind: str | None = None
) -> Translation | None:
    """Return the translation of another system's file and of the arguments that set its keys.

    Args:
        name: name of the file in messages.
        arguments: arguments of the command line, by name.
        accepts: ACCEPT_LLAMA, ACCEPT_UNKNOWN, or both.
        kind: system of the file; None = detected from its keys.

    Returns:
        The translation; None if the file is this project's, or has too few keys of a known system.

    Raises:
        ConfigError: every problem of the file.
    """
    values, has_own_form = flatten(read_tree(path)), path.suffix in FOREIGN_SUFFIXES
    if kind is None and (has_own_form or "defaults" in values or not any(map(_is_only_ours, values))):
        kind = detect(values, name, enough=1 if has_own_form else 2)
    if kind is None and has_own_form:
        known = [f"  {kind}: {each.title}" for kind, each in SYSTEMS.items()]
        raise ConfigError("\n".join([f"{name} belongs to no known system. Known are:", *known]))
    return None if kind is None else _translate(path, name, kind, arguments, accepts)


def _translate(
    path: Path | None,
    name: str,
    kind: str,
    arguments: Mapping[str, Raw],
    accepts: Collection[str],
) -> Translation:
    """Return the translation of a file, or of arguments alone if `path` is None."""
    system = SYSTEMS[kind]
    given, problems, used = dict[str, Given](), list[str](), set[str]()
    values = [Given(key, text, name) for key, text in (flatten(read_tree(path)) if path else {}).items()]
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
            given[key] = Given(argument, _text_of(arguments[argument]), ARGUMENTS, ARGUMENT)
            used.add(argument)
        elif ours is not None:
            flags[ours] = _text_of(arguments[argument]) or "none"
    translation = Translation(given, flags, accepts, name, kind, used)
    translation.problems += problems
    if path is not None or len(used) + ("optimizer" in flags) > 1:  # one word alone is an alias
        translation.add_defaults(system.defaults(translation), f"{kind} for {name}")
    translation.apply_rules(system.combine, system.rules)
    translation.finish()
    return translation


def _text_of(raw: Raw) -> str | None:
    """Return the value of an argument as in a file; None for null."""
    text = text_of(raw)
    return None if text is None or text.strip().lower() in ("null", "none") else text


def translate_command(given: Sequence[Assignment]) -> None:
    """Translate a file with the arguments that `pretrain train` takes beside it; raises as `translate`."""
    reader = Reader(TranslateConfig)
    own = [each for each in given if reader.find(each) is not None or not each.name]
    config = resolve_config(TranslateConfig, [Source(COMMAND_LINE, own)]).config
    translate(config, [each for each in given if each not in own])


def translate(config: TranslateConfig, arguments: Sequence[Assignment] = ()) -> None:
    """Print a table with a line per key, then print or write the recipe.

    Args:
        arguments: settings of the other system or of this project that win over the file.

    Raises:
        ConfigError: the file belongs to no known system or cannot be translated, or the recipe's name is not YAML.
        PathError: the recipe cannot be written.
    """
    name = config.input_path
    if config.output_path is not None and Path(config.output_path).suffix not in YAML:
        raise ConfigError(f"--output_path={config.output_path}: the name of a recipe must end in {' or '.join(YAML)}")
    accepts = {flag: True for flag in (ACCEPT_LLAMA, ACCEPT_UNKNOWN) if getattr(config, flag)}
    translated = translate_sources([*assign({"recipe": [name], **accepts}), *arguments], config.kind)
    reader = read_given(TrainConfig, translated.all_sources)
    if reader.problems:
        raise ConfigError(reader.problems)
    if not translated.translations:
        raise ConfigError(f"{name} is already a recipe of this project: train with --recipe={name}")
    title, table = SYSTEMS[translated.translations[0].kind].title, translated.translations[0].table()
    print_text("\n".join([f"{name}: {title}\n", *table]))
    lines = [f"{FIRST_WORDS}{name} ({title}):", *(f"#{line}" for line in table), *_recipe_lines(reader)]
    if config.output_path is None:
        print_text("\n".join(["", *lines]))
        return
    output = Path(config.output_path)
    with output_errors(output):
        check_replaceable(output, beginning=FIRST_WORDS.encode())
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, "\n".join([*lines, ""]))
    command = shlex.join(["pretrain", "train", f"--recipe={output}"])
    print_text(f"\nwritten to {output}. Train with it:\n  {command}")


def _recipe_lines(reader: Reader[TrainConfig]) -> Iterator[str]:
    """Yield the given settings as a recipe by sections, in their own words."""
    section = None
    for name, setting in reader.settings.items():
        if name not in reader.chosen:
            continue
        if setting.section != section:
            section = setting.section
            yield f"{section}:"
        given = reader.chosen[name]
        text = _text_of(given.raw) if given.section_and_name[1] == name else format_value(reader.values[name])
        yield f"  {name}: {_as_yaml('null' if text is None else text)}"


def _as_yaml(text: str) -> str:
    """Return a text as a YAML scalar; the reader of recipes takes every scalar but null as text."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
