"""The batches of a run are the same in every release, on every machine.

As a script it prints the digests of a folder, for comparison with another process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT, run_command
from unit.data.token_files import opened, plan, rows, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.dataset import build_loader
from pretraining.data.loader import Loader
from pretraining.data.samples import SplitName

# A change here changes the data of every resumed run: it needs a new version of the order, and a reason in the commit.
DIGESTS = {
    "train": "31d4647c1233 551b6dca6e15 8c423b25023e a8c36981c526 5faf59dbe67f e26b82cc6e3c",
    "held_out": "56ffeb7ac044 bd46a4068a4b fd3702f847ab 127c0c70b5f0 1f9d502f4b76 2a8cafbe19e3",
    "train, order 1": "4eba7d0407c7 de86c6766ef7 49cd7a9645ce e03d190c0b64 2e2dbe93eaa8 2a744df9c372",
    "held_out, order 1": "944c8ed1ba51 681a7d2875e0 41f100b57af0 ac00ee4e4e29 80423081e0d1 18b2bd4c7158",
    "ends, order 1": "203c52f04101 8fd41830f333 9c0a673326f3 68eedd578fde 325528e682ce 662704029d15",
    "dummy": "a1e82cf33d95 61e1ef8e8051 8db4c3807c63 c5bdcd56eede 253db51be362 2cec59d76c0b",
    "ends": "76f1e06d4e4c 7ecd6010e2aa c39bdff797e0 7d4904ee9bf5 be89bb0e4550 fa3c7ddceb0c",
    "greedy": "5712816d96dd b56785be3da7 52b77c5dad21 c27d71adcde3 1580c70915bd f17eacf7aba3",
    "first_fit": "7284ef830fed 4475e29c53fc 64b33648e15c 92bb1331ee93 d38726a5bae1 ac54ec6967d6",
    "best_fit": "fb5842072e3a e5b17286e71d 28ef42944065 320dab9457ad 01df3f9758d7 2d8dce27a410",
}
FILES = {"web": ("b.arrow", "a/z.arrow", "a.arrow"), "code": ("x.arrow",), "books": ("é.arrow", "Z.arrow")}
STEPS = (0, 1, 2, 50, 10**4, 10**9)


def golden_documents(number: int, count: int) -> list[list[int]]:
    """Documents of 1 to 90 tokens, most of them short."""
    lengths = [1 + (7 * row * row + 13 * number) % (90 if row % 5 == 0 else 12) for row in range(count)]
    return [[(31 * row + 7 * at + number) % 900 for at in range(length)] for row, length in enumerate(lengths)]


def write_golden(root: Path) -> None:
    for name, paths in FILES.items():
        for number, path in enumerate(paths):
            documents = golden_documents(number + len(name), {"web": 900, "code": 400, "books": 30}[name])
            write_documents(root / name / path, documents, batch_documents=100)


KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("train", "held_out", "train, order 1", "held_out, order 1")},
    "ends, order 1": {"bos_token": 902, "strip_tokens": (31, 38), "min_length": 3},
    "dummy": {"use_dummy_dataset": True},
    "ends": {"bos_token": 902, "strip_tokens": (31, 38), "min_length": 3},
    "greedy": {"packing": "greedy"},
    "first_fit": {"packing": "first_fit"},
    "best_fit": {"packing": "best_fit"},
}


def golden_loader(root: Path, kind: str) -> Loader:
    config = DataConfig(
        data_path=str(root),
        datasets=("web", "code", "books"),  # the weights go with these names, in whatever order
        weights=(0.6, 0.3, 0.1),
        seq_length=32,
        sep_token=901,
        held_out_fraction=0.2,
        logical_shards=6,
        num_workers=0,
        skip_samples=("40-55",),
        **KINDS[kind],
    )
    datasets = None if config.use_dummy_dataset else opened(config)
    split: SplitName = "held_out" if kind.startswith("held_out") else "train"
    loader = build_loader(datasets, config, plan(16), 0, 1234, 1000, split=split)
    if kind.endswith("order 1"):  # as in runs that earlier releases began
        loader.reader = loader.reader.with_order(loader.reader.mixture, 1)
    return loader


def digest_of_step(loader: Loader, step: int) -> str:
    """A digest of samples, their places in files, and their tokens, in the order in which ranks take them."""
    digest = hashlib.blake2b(digest_size=6)
    slots = loader.reader.slots(step)
    for values in (slots.samples, slots.datasets, slots.shards, slots.numbers):
        digest.update(values.astype("<i8").tobytes())
    for slot, dataset in enumerate(slots.datasets.tolist()):
        spans = loader.reader.sources[dataset].spans(slots.shards[slot : slot + 1], slots.numbers[slot : slot + 1])
        digest.update(np.stack([spans.documents, spans.starts, spans.lengths]).astype("<i8").tobytes())
    digest.update(np.array(rows(loader.reader.read(step)), dtype="<i8").tobytes())
    return digest.hexdigest()


def golden_digests(root: Path) -> dict[str, str]:
    """By kind of data, the digests of `STEPS`."""
    loaders = {kind: golden_loader(root, kind) for kind in KINDS}
    return {kind: " ".join(digest_of_step(loader, step) for step in STEPS) for kind, loader in loaders.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden")
    write_golden(root)
    return root


def test_global_batches_are_the_same_in_every_release(folder: Path) -> None:
    assert golden_digests(folder) == DIGESTS


def test_the_host_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """Another locale, hash seed, working folder, time zone and processor, with a new index."""
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
    done = run_command([sys.executable, __file__, tmp_path / "elsewhere"], environment, cwd=tmp_path)
    assert json.loads(done.stdout) == DIGESTS


if __name__ == "__main__":
    print(json.dumps(golden_digests(Path(sys.argv[1]))))
