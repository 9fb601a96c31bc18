"""The door for words of other systems: what a user gave goes in, sources of this project alone come out.

The tables of the other systems are imported only if a word or a recipe is not of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pretraining.config.assignments import COMMAND_LINE, Assignment, Source, setting_named
from pretraining.config.command_line import read_sources
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.tools.translate.translated import Translated


def translate_given(root: type, given: Sequence[Assignment]) -> Translated:
    """Translate what a user gave for a command with these settings.

    Raises:
        ConfigError: recipes that cannot be read or translated.
    """
    if not issubclass(root, TrainConfig):  # without recipes
        return Translated([Source(COMMAND_LINE, given)])
    with suppress(ConfigError):  # another system's form of file; any other problem comes again
        sources = read_sources(given)
        if all(setting_named(each.name) for source in sources for each in source.assignments if each.name):
            return Translated(sources)
    from pretraining.tools.translate.translate import translate_sources

    return translate_sources(given)
