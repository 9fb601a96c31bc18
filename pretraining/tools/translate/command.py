"""`pretrain translate`: another system's settings file becomes a recipe, with a line per key."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from pretraining.config.assignments import Assignment, Reader
from pretraining.config.command_line import assign
from pretraining.config.read import read, read_values
from pretraining.config.recipe_files import dump_config
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.files import check_replaceable, output_errors, write_atomic
from pretraining.launch.terminal import print_text
from pretraining.tools.command_settings import TranslateConfig
from pretraining.tools.translate.engine import ACCEPT_LLAMA, ACCEPT_UNKNOWN
from pretraining.tools.translate.systems import translate_all

_YAML = (".yaml", ".yml")
_FIRST_WORDS = "# Translated from "
"""First words of a translated recipe; only such a file may be overwritten."""


def translate_command(given: Sequence[Assignment]) -> None:
    """Translate a file with the arguments that `pretrain train` takes beside it; raises as `translate_file`."""
    reader = Reader(TranslateConfig)
    of_command = [word for word in given if reader.find(word) is not None or not word.name]
    translate_file(read(TranslateConfig, of_command).config, [word for word in given if word not in of_command])


def translate_file(config: TranslateConfig, arguments: Sequence[Assignment] = ()) -> None:
    """Print a table with a line per key, then print or write the recipe.

    Args:
        arguments: settings of the other system or of this project that win over the file.

    Raises:
        ConfigError: the file belongs to no known system or cannot be translated, or the recipe's name is not YAML.
        PathError: the recipe cannot be written.
    """
    name = config.input_path
    if config.output_path is not None and Path(config.output_path).suffix not in _YAML:
        raise ConfigError(f"--output_path={config.output_path}: the name of a recipe must end in {' or '.join(_YAML)}")
    accepts = {flag: True for flag in (ACCEPT_LLAMA, ACCEPT_UNKNOWN) if getattr(config, flag)}
    translated = translate_all([*assign({"recipe": [name], **accepts}), *arguments], config.kind)
    reader = read_values(TrainConfig, translated.assignments)
    if reader.problems:
        raise ConfigError(reader.problems)
    if not translated.translations:
        raise ConfigError(f"{name} is already a recipe of this project: train with --recipe={name}")
    file = translated.translations[0]
    table = [*file.table(), *(f" {line}" for line in translated.not_given())]
    print_text("\n".join([f"{name}: {file.system.title}\n", *table]))
    comments = [f"{_FIRST_WORDS}{name} ({file.system.title}):", *(f"#{line}" for line in table)]
    recipe = "\n".join([*comments, dump_config(reader.build(), reader.chosen)])
    if config.output_path is None:
        print_text(f"\n{recipe}".rstrip())
        return
    output = Path(config.output_path)
    with output_errors(output):
        check_replaceable(output, beginning=_FIRST_WORDS.encode())
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, recipe)
    command = shlex.join(["pretrain", "train", f"--recipe={output}"])
    print_text(f"\nwritten to {output}. Train with it:\n  {command}")
