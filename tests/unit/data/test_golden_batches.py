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
from unit.data.golden_data import digest_of_step, golden_digests, golden_loader, write_golden

# Whatever changes these changes the data of every run that goes on: a new STATE_VERSION, and a reason in the commit.
DIGESTS = {
    "train": "47f27216ab1ad6a9 38a72e4af12f64d4 991ef8d2c8f23c34 ab190e9370cd0f68 1777b1d76c6d3559 b2e74b12a3de7dbc",
    "held_out": "81fdd1c8aea22165 b6560b57597b8ddc 433456594f71bc1e 4516ad97ff4828dc 921ead6ff94d3d0a e3ce2f3958be0f8d",
    "dummy": "97243832659e7e96 a8d166dc4173c8a2 ef05ed756bfef7c1 174e7ea0c5bece02 94d4e7d2302f2db0 dbf0eb84db24a194",
    "ends": "9e5921df14e9de03 c5a919420c7cce05 03b1f7f7b56b7765 6f7999c9d68a5e91 8041afe784d63c28 1af9c4e5518872c6",
    "greedy": "090c040c02115208 ff6e3de88cc12ae4 2b7d79261cc5ba0b 8d0a50f025484b4c f5149173d385147a fa9fc3e7499385b9",
    "first_fit": "f3477a64a0305396 166bc893087d9996 43851c376ad80baf e4c0b2c784ea069b 4c71892addc3eb82 65405966343f8942",
    "best_fit": "2ef578db2d639f5d cb0f33ce7401d471 809c662d6294b598 a5992794a8bdda17 0545beea48a3ac78 5a8b8d339aff2977",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden")
    write_golden(root)
    return root


def test_the_first_batch_is_the_same_in_every_release(folder: Path) -> None:
    """The same as the digests, for the eye: (sample, dataset, shard, number), and where the first two of web are."""
    reader = golden_loader(folder).reader
    slots = reader.slots(0)
    names = [reader.sources[dataset].name for dataset in slots.datasets]
    columns = (slots.samples.tolist(), names, slots.shards.tolist(), slots.numbers.tolist())
    assert list(zip(*columns, strict=True)) == [
        (13, "books", 0, 0),
        (1, "code", 0, 0),
        (9, "web", 0, 0),
        (11, "code", 1, 0),
        (2, "web", 1, 0),
        (5, "web", 2, 0),
        (10, "web", 2, 1),
        (4, "web", 3, 0),
        (14, "web", 3, 1),
        (3, "books", 2, 0),
        (8, "code", 4, 0),
        (7, "web", 4, 0),
        (15, "web", 4, 1),
        (6, "code", 5, 0),
        (0, "web", 5, 0),
        (12, "web", 5, 1),
    ]
    web = np.flatnonzero(slots.datasets == 2)[:2]
    spans = reader.sources[2].spans(slots.shards[web], slots.numbers[web])
    assert spans.first_spans.tolist() == [0, 3, 4]
    assert spans.documents.tolist() == [38, 230, 204, 700]
    assert spans.starts.tolist() == [0, 0, 0, 0] and spans.lengths.tolist() == [11, 17, 5, 33]


def joined(digests: dict[str, list[str]]) -> dict[str, str]:
    return {kind: " ".join(parts) for kind, parts in digests.items()}


def test_global_batches_are_the_same_in_every_release(folder: Path) -> None:
    assert joined(golden_digests(folder)) == DIGESTS


def test_a_change_anywhere_changes_the_digest(folder: Path) -> None:
    digests = [digest_of_step(golden_loader(folder), step) for step in range(20)]
    assert len(set(digests)) == 20


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
