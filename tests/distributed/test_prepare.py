"""Real launchers share out `pretrain prepare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers import run_command
from slurm_cluster import SlurmCluster

from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare.prepare import prepare

pytestmark = pytest.mark.thorough

PROGRAM = """\
import sys
from pretraining.cli import main
from pretraining.tools.prepare import units
units.UNIT_BYTES = 2000
main(["prepare", *sys.argv[1:]])
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The command with an input of several units, and as a script."""
    texts = [f"Document {n} for a launcher. " * 9 for n in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "prepare.py").write_text(PROGRAM)
    return [str(tmp_path / "prepare.py"), f"--input_path={tmp_path}/in.jsonl", f"--output_path={tmp_path}/out"]


def assert_prepared(output: str, folder: Path) -> None:
    """All is there, and one process said so."""
    assert output.count("Train on it with:") == 1
    files = sorted((folder / "out/in").glob("*.arrow"))
    assert len(files) > 5 and not list((folder / "out").glob(".*"))
    config = PrepareConfig(input_path=(str(folder / "in.jsonl"),), output_path=str(folder / "out"))
    assert prepare(config).documents == 60


def test_torchrun(program: list[str], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert_prepared(run_command([*launcher, *program]).stdout, tmp_path)


def test_srun(program: list[str], tmp_path: Path, slurm: SlurmCluster) -> None:
    assert_prepared(slurm.run(["srun", "-n", "2", sys.executable, *program]).stdout, tmp_path)
