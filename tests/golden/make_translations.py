"""Write the recipes that files of other systems make: `python tests/golden/make_translations.py`.

Each golden pair is a file of another system and the recipe, with its notes, that `pretrain translate` makes of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from pretraining.tools.command_settings import TranslateConfig
from pretraining.tools.translate.command import translate_file

FOLDER = Path(__file__).parent / "translate"
PAIRS = {
    "stub": "stub.yaml",
    "guide": "guide.json",
    "deepspeed": "deepspeed.json",
    "composed": "composed/config.yaml",
    "tokens": "tokens.py",
}

if __name__ == "__main__":
    os.chdir(FOLDER)
    for name, source in PAIRS.items():
        translate_file(TranslateConfig(source, output_path=f"{name}.recipe.yaml"))
