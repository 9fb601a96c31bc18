"""Words and recipes of other systems become assignments of this project; nothing behind this knows another system.

    words -> read_words -> translate -> settings

The tables of the other systems are imported only if a word or a recipe is not of this project. docs/coming-from.md
names the systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pretraining.config.assignments import Assignment, setting_named
from pretraining.config.read import read_recipes
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError


def translate(root: type, given: Sequence[Assignment]) -> list[Assignment]:
    """Return what a user gave for a command with these settings as assignments of this project, in order of precedence.

    Recipes are read. A line per key of another system is logged.

    Raises:
        ConfigError: recipes that cannot be read or translated.
        DataError: training needs data that another system makes on the way; the message has the command.
    """
    if not issubclass(root, TrainConfig):  # without recipes
        return list(given)
    with suppress(ConfigError):  # another system's form of file; any other problem comes again
        assignments = read_recipes(given)
        if all(setting_named(assignment.name) for assignment in assignments if assignment.name):
            return assignments
    from pretraining.tools.translate.systems import translate_and_log

    return translate_and_log(root, given)
