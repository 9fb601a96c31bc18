"""A small dataset whose every token is written down here, and digests of the global batches that are made from it.

As a script it prints the digests of a folder, so that another process, as on another host, can be asked for them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from unit.data.token_files import opened, plan, rows, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.dataset import build_loader
from pretraining.data.loader import Loader
from pretraining.data.samples import SplitName

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
    "train": {},
    "held_out": {},
    "dummy": {"use_dummy_dataset": True},
    "ends": {"bos_token": 902, "strip_tokens": (31, 38), "min_length": 3},
    "greedy": {"packing": "greedy"},
    "first_fit": {"packing": "first_fit"},
    "best_fit": {"packing": "best_fit"},
}


def golden_loader(root: Path, kind: str = "train") -> Loader:
    config = DataConfig(
        data_path=str(root),
        datasets=("web", "code", "books"),
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
    split: SplitName = "held_out" if kind == "held_out" else "train"
    return build_loader(datasets, config, plan(16), 0, 1234, 1000, split=split)


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


def golden_digests(root: Path, steps: Sequence[int] = STEPS) -> dict[str, list[str]]:
    """By kind of data, the digests of steps."""
    loaders = {kind: golden_loader(root, kind) for kind in KINDS}
    return {kind: [digest_of_step(loader, step) for step in steps] for kind, loader in loaders.items()}


if __name__ == "__main__":
    print(json.dumps(golden_digests(Path(sys.argv[1]))))
