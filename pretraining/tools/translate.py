"""`pretrain translate`: a file of settings of another system, as a recipe of this one."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from pretraining.config.assignments import Reader
from pretraining.config.commands import TranslateConfig
from pretraining.config.fields import settings_of
from pretraining.config.foreign.kinds import KINDS, YAML
from pretraining.config.foreign.translation import NOT_UNDERSTOOD, Note, Translation
from pretraining.config.recipes import translate_file
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.files import check_replaceable, output_errors, write_atomic
from pretraining.launch.terminal import print_text

FIRST_WORDS = "# Translated from "
"""Of a recipe that is written here, by which an earlier one is known."""


def translate(config: TranslateConfig) -> None:
    """Prints what became of each setting, then the recipe, or writes it where the user wants it.

    Raises:
        ConfigError: the file is of no known kind, or holds what cannot be translated; or the recipe's name is not that
            of a YAML file.
        PathError: the recipe cannot be written.
    """
    if config.output_path is not None and Path(config.output_path).suffix not in YAML:
        raise ConfigError(f"--output_path={config.output_path}: a recipe is YAML: end its name in {' or '.join(YAML)}")
    recipe = translate_file(config.input_path, config.kind, config.accept_llama)
    assert recipe.translation is not None
    reader = Reader(TrainConfig)
    reader.read(recipe.assignments)
    if reader.problems:
        raise ConfigError(reader.problems)
    translation = recipe.translation
    print_text(f"{config.input_path}: {KINDS[translation.kind].what}\n")
    print_text("\n".join(translation.table()))
    text = recipe_text(config.input_path, translation)
    if config.output_path is None:
        print_text(f"\n{text}", end="")
        return
    with output_errors(Path(config.output_path)):
        check_replaceable(Path(config.output_path), beginning=FIRST_WORDS.encode())
        Path(config.output_path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(config.output_path), text)
    command = shlex.join(["pretrain", "train", f"--recipe={config.output_path}"])
    print_text(f"\nwritten to {config.output_path}. Train with it:\n  {command}")


def recipe_text(name: str, translation: Translation) -> str:
    """Returns a recipe by sections, each setting with what it was made of behind it."""
    lines = [f"{FIRST_WORDS}{name} ({KINDS[translation.kind].what})."]
    section = None
    explained: list[Note] = []
    for setting in settings_of(TrainConfig).values():
        if setting.name not in translation.settings:
            continue
        if setting.section != section:
            section = setting.section
            lines.append(f"{section}:")
        note = translation.note_of(setting.name)
        value = _as_yaml(translation.settings[setting.name])
        lines.append(f"  {setting.name}: {value}  # {_explained(note, with_remark=note not in explained)}")
        explained.append(note)
    without = [note for note in translation.known if not note.settings]
    for heading, notes in (("Without a setting here:", without), (NOT_UNDERSTOOD, translation.unknown)):
        if notes:
            lines += [f"# {heading}", *(f"#   {_explained(note)}" for note in notes)]
    return "\n".join(lines) + "\n"


def _explained(note: Note, with_remark: bool = True) -> str:
    text = note.given + (f" ({note.remark})" if note.remark and with_remark else "")
    return " ".join(text.split())  # a line of comment, whatever the value holds


def _as_yaml(text: str) -> str:
    written: str = yaml.dump(text, Dumper=_PlainDumper, width=10**6, allow_unicode=True)
    return written.removesuffix("...\n").strip()


class _PlainDumper(yaml.SafeDumper):
    """YAML for the reader of recipes, to which every scalar but null is text: numbers stand without quotes."""


_PlainDumper.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
    for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
