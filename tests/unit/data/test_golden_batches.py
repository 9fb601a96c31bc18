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
from pretraining.data.batch_reader import BatchReader
from pretraining.data.dataset import build_loader
from pretraining.data.samples import stored_samples

# A change here changes the data of every resumed run: it needs a new version of the order, and a reason in the commit.
DIGESTS = {
    "train": "31d4647c1233 551b6dca6e15 8719d7dc2343 9dd40334172a 88354d12ea8a 7faafb02226a",
    "held_out": "56ffeb7ac044 bd46a4068a4b fd3702f847ab 127c0c70b5f0 1f9d502f4b76 2a8cafbe19e3",
    "train, skipped": "31d4647c1233 551b6dca6e15 b709f7cf88b2 babe3a237831 c24c89ce65c5 b9c98cfacf5d",
    "dummy": "a1e82cf33d95 61e1ef8e8051 146d718b3e8d bf46e63d7fb2 7a6a8cbb0a18 99485fce1561",
    "ends": "76f1e06d4e4c 7ecd6010e2aa e52eb69c2d38 a557a87d941e 32407cd863b4 463677da7bc5",
    "greedy": "5712816d96dd b56785be3da7 a5829a0015ca 2834b230514b 06bfe82bb5c8 6918ad87542c",
    "first_fit": "7284ef830fed 4475e29c53fc f5a0461b62fe c02b282cf9b8 2b494f98de34 abbe6fbea375",
    "best_fit": "fb5842072e3a e5b17286e71d b212cc4d19eb 6b2703d283ff 327319ed436c cbe05be1903f",
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
    **{kind: {} for kind in ("train", "held_out", "train, skipped")},
    "dummy": {"use_dummy_dataset": True},
    "ends": {"bos_token": 902, "strip_tokens": (31, 38), "min_length": 3},
    "greedy": {"packing": "greedy"},
    "first_fit": {"packing": "first_fit"},
    "best_fit": {"packing": "best_fit"},
}


def golden_reader(root: Path, kind: str) -> BatchReader:
    config = DataConfig(
        data_path=str(root),
        datasets=("web", "code", "books"),  # the weights go with these names, in whatever order
        weights=(0.6, 0.3, 0.1),
        seq_length=32,
        sep_token=901,
        held_out_fraction=0.2,
        logical_shards=6,
        num_workers=0,
        skip_samples=("40-55",) if kind == "train, skipped" else (),
        **KINDS[kind],
    )
    datasets = None if config.use_dummy_dataset else opened(config)
    training = build_loader(datasets, config, plan(16), 0, 1234, 1000).reader
    if kind != "held_out" or datasets is None:
        return training
    held_out = [stored_samples(dataset, datasets, config, 1234, "held_out", 1000) for dataset in datasets.datasets]
    return BatchReader(held_out, training.mixture, plan(16), 0, config, 1000)


def digest_of_step(reader: BatchReader, step: int) -> str:
    """A digest of samples, their places in files, and their tokens, in the order in which ranks take them."""
    digest = hashlib.blake2b(digest_size=6)
    slots = reader.slots(step)
    for values in (slots.samples, slots.datasets, slots.shards, slots.numbers):
        digest.update(values.astype("<i8").tobytes())
    for slot, dataset in enumerate(slots.datasets.tolist()):
        spans = reader.sources[dataset].spans(slots.shards[slot : slot + 1], slots.numbers[slot : slot + 1])
        digest.update(np.stack([spans.documents, spans.starts, spans.lengths]).astype("<i8").tobytes())
    digest.update(np.array(rows(reader.read(step)), dtype="<i8").tobytes())
    return digest.hexdigest()


def golden_digests(root: Path) -> dict[str, str]:
    """By kind of data, the digests of `STEPS`."""
    readers = {kind: golden_reader(root, kind) for kind in KINDS}
    return {kind: " ".join(digest_of_step(reader, step) for step in STEPS) for kind, reader in readers.items()}


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
