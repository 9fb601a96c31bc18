"""Hook that the command line and `Trainer` pass to the reader of recipes; it imports the tables lazily."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pretraining.config.recipes import Recipe
from pretraining.config.values import Raw


def translate_when_needed(
    path: Path | None, name: str, arguments: Mapping[str, Raw], accepts: Collection[str]
) -> Recipe | None:
    """Call `translate_recipe`, which is imported on first use."""
    from pretraining.tools.translate.translate import translate_recipe

    return translate_recipe(path, name, arguments, accepts)
