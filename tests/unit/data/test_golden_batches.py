"""The batches of a run are the same in every release, on every machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, run_command
from unit.data.golden_data import golden_digests, write_golden

# Whatever changes these changes the data of every run that goes on: a new STATE_VERSION, and a reason in the commit.
DIGESTS = {
    "train": "4eba7d0407c7 de86c6766ef7 49cd7a9645ce e03d190c0b64 2e2dbe93eaa8 2a744df9c372",
    "held_out": "944c8ed1ba51 681a7d2875e0 41f100b57af0 ac00ee4e4e29 80423081e0d1 18b2bd4c7158",
    "dummy": "a1e82cf33d95 61e1ef8e8051 8db4c3807c63 c5bdcd56eede 253db51be362 2cec59d76c0b",
    "ends": "203c52f04101 8fd41830f333 9c0a673326f3 68eedd578fde 325528e682ce 662704029d15",
    "greedy": "5712816d96dd b56785be3da7 52b77c5dad21 c27d71adcde3 1580c70915bd f17eacf7aba3",
    "first_fit": "7284ef830fed 4475e29c53fc 64b33648e15c 92bb1331ee93 d38726a5bae1 ac54ec6967d6",
    "best_fit": "fb5842072e3a e5b17286e71d 28ef42944065 320dab9457ad 01df3f9758d7 2d8dce27a410",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden")
    write_golden(root)
    return root


def joined(digests: dict[str, list[str]]) -> dict[str, str]:
    return {kind: " ".join(parts) for kind, parts in digests.items()}


def test_global_batches_are_the_same_in_every_release(folder: Path) -> None:
    assert joined(golden_digests(folder)) == DIGESTS


def test_the_host_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """Another locale, hash seed, working folder, time zone and processor, and an index that is made there."""
    shutil.copytree(folder, tmp_path / "elsewhere", ignore=shutil.ignore_patterns(".index"))
    features = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONHASHSEED": "12345",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "TZ": "Asia/Kathmandu",
        "NPY_DISABLE_CPU_FEATURES": " ".join(features),
    }
    script = Path(__file__).with_name("golden_data.py")
    done = run_command([sys.executable, script, tmp_path / "elsewhere"], environment, cwd=tmp_path)
    assert joined(json.loads(done.stdout)) == DIGESTS
