"""A copy of the scripts in a folder of their own, with an environment whose programs note how they are called.

The scripts run unchanged, but for torchrun.py, which only notes its arguments unless the real one is asked for. Their
`python` answers questions as the real one does, but installs nothing; `main_training.py` notes its arguments and ends
as it is told.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from helpers import ROOT

PYTHON = """#!/usr/bin/env bash
if [[ $1 == -m ]]; then
    echo "python $*" >>"{calls}"
    exit 0
fi
exec {real} "$@"
"""

TORCHRUN = """
import sys
from pathlib import Path

with Path({calls!r}).open("a") as calls:
    calls.write(f"torchrun {{' '.join(sys.argv[1:])}}\\n")
"""

MAIN = """
import os, signal, sys
from pathlib import Path

from pretraining.launch.signals import terminate_with_launcher

def note(text):
    with Path({calls!r}).open("a") as calls:
        calls.write(text + "\\n")

def ended_by(number, frame):
    note(f"signal {{signal.Signals(number).name}}")
    sys.exit(7)

note(f"main {{' '.join(sys.argv[1:])}}")
note(f"in {{Path.cwd()}}")
if f"--killed={{os.environ.get('RANK')}}" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "--wait" in sys.argv:
    terminate_with_launcher()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, ended_by)
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    while True:
        signal.pause()
sys.exit(int(os.environ.get("EXIT_CODE", 0)))
"""

WHOLE_BLOCK = r"(?sm)(?<=FLAGS=\(\n).*?(?=^\)$)"


class StandIn:
    """A repository made of the scripts and programs that note their calls.

    Attributes:
        root: its folder.
        environment: the virtual environment that its scripts will use.
        torchrun: scripts/torchrun.py, to be written by tests that want another than the noting one.
    """

    def __init__(self, root: Path, real_torchrun: bool = False) -> None:
        self.root = root
        self.environment = root / "environment"
        self.torchrun = root / "scripts" / "torchrun.py"
        self._calls = root / "calls"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        shutil.copy(ROOT / "setup.py", root)
        (root / "main_training.py").write_text(MAIN.format(calls=str(self._calls)))
        if not real_torchrun:
            self.torchrun.write_text(TORCHRUN.format(calls=str(self._calls)))
        (self.environment / "bin").mkdir(parents=True)
        self.add_program("python", PYTHON.format(real=sys.executable, calls=self._calls))

    def add_program(self, name: str, text: str) -> None:
        """Puts a program into the environment."""
        path = self.environment / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def train_with(self, program: Path) -> None:
        """Has train.sh start this program."""
        text = f"import runpy\nrunpy.run_path({str(program)!r}, run_name='__main__')\n"
        (self.root / "main_training.py").write_text(text)

    def edit_block(self, pattern: str, replacement: str) -> None:
        """Edits the block of flags at the top of train.sh."""
        script = self.root / "scripts" / "train.sh"
        text, count = re.subn(pattern, lambda _: replacement, script.read_text(), count=1)
        assert count == 1
        script.write_text(text)

    def variables(self, **more: str) -> dict[str, str]:
        """What to run the scripts with: the environment active, no GPU."""
        return {"VIRTUAL_ENV": str(self.environment), "CUDA_VISIBLE_DEVICES": "", **more}

    def calls(self) -> list[str]:
        """What was called so far, a line a call; the set-up's calls of pip left out."""
        return [line for line in self.all_calls() if not line.startswith("python -m pip")]

    def all_calls(self) -> list[str]:
        """What was called so far, a line a call."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []
