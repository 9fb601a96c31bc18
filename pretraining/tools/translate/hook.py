"""What the command line and `Trainer` hand to the reader of recipes; the tables are imported when they are needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pretraining.config.recipes import Recipe
from pretraining.config.values import Raw


def translate_when_needed(
    path: Path | None, name: str, arguments: Mapping[str, Raw], accepts: Collection[str]
) -> Recipe | None:
    """Return the recipe that a file or words of another system make; arguments and errors as `translate_recipe`."""
    from pretraining.tools.translate.translate import translate_recipe

    return translate_recipe(path, name, arguments, accepts)
