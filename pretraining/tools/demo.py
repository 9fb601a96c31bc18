"""The demo that `scripts/train.sh` trains unless a flag chooses a recipe, a model or data.

Its data are the sources of Python's standard library. The first process to start prepares them, under a lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pretraining.config.assignments import RECIPE_NAMES, Assignment
from pretraining.config.command_line import assign
from pretraining.errors import Preempted
from pretraining.launch.layout import LAUNCHERS
from pretraining.launch.signals import PREEMPTION_SIGNALS

DEMO_FOLDER = "PRETRAINING_DEMO"
"""Variable with the folder of the demo's data and run, which train.sh sets."""
log = logging.getLogger(__name__)

_CHOICES = {*RECIPE_NAMES, "model_variant", "data_path", "datasets", "use_dummy_dataset"}
_PATHS = {"data_path": "data/demo", "tokenizer_path": "data/demo/tokenizer.json", "ckpt_save_path": "runs/demo"}


def settings_beside(given: Sequence[Assignment]) -> list[Assignment]:
    """Return the settings of the demo; none if it is not offered, or if another run is chosen."""
    names = {each.section_and_name[1] for each in given}
    if DEMO_FOLDER not in os.environ or names & _CHOICES:
        return []
    paths = {name: str(Path(os.environ[DEMO_FOLDER], path)) for name, path in _PATHS.items() if name not in names}
    return assign({RECIPE_NAMES[0]: "demo", **paths})


def prepare() -> None:
    """Prepare the data of the demo, unless they are there; exit with the code of a `pretrain prepare` that fails.

    Raises:
        Preempted: a signal stopped the preparation.
    """
    log.info("no recipe, model or data chosen: this is the demo (bash scripts/train.sh --help lists the flags)")
    data = Path(os.environ[DEMO_FOLDER], "data")
    done = data / "demo" / "stdlib" / "prepare.json"
    if done.exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    with (data / ".demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes and machines that start at the same time prepare it once
        if not done.exists():
            command = ["prepare", "--source=stdlib", "--vocab_size=4096", f"--output_path={data / 'demo'}"]
            of_this_job = {"RANK", "WORLD_SIZE", *(launcher.sign for launcher in LAUNCHERS)}
            alone = {name: value for name, value in os.environ.items() if name not in of_this_job}
            ended = subprocess.run([sys.executable, "-m", "pretraining", *command], env=alone, stdout=2, check=False)
            if -ended.returncode in PREEMPTION_SIGNALS:
                raise Preempted("stopped in the preparation of the demo: the same command resumes it")
            if ended.returncode:
                sys.exit(ended.returncode % 256)
