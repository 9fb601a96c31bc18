"""Speed of the loader on data in an object store, beside the same data on a disk.

    python -m scripts.benchmark.measure.store
    python -m scripts.benchmark.measure.store --objects=10000     the start on so many small objects, too

A server of ranges (range_server.py) in a process of its own serves the files from the page cache. In turns: the disk, a
cache folder that holds the data, an empty cache folder, and sequential reads of whole objects from the same server. The
first round, one sample of each logical shard, opens all blocks, and is timed apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pretraining.config.training import DataConfig
from pretraining.data.dataset import build_indices, open_datasets, working_set_bytes
from pretraining.data.samples import OpenedDatasets
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.document_records import write_record
from pretraining.object_store import Store, StorePath, location
from scripts.benchmark.common import Number, announce, flag_parser, print_table, spread
from scripts.benchmark.documents import SEQ_LENGTH, write_documents
from scripts.benchmark.measure.loader import open_loader, settings_of

BATCH = 64
DATASET = "mean600"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder; yield the address of its root."""
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ.update(keys)
    command = [sys.executable, "-m", "scripts.benchmark.range_server", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as server:
        assert server.stdout is not None
        try:
            yield f"s3://bucket/?scheme=http&endpoint_override=127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


class Rounds(NamedTuple):
    """The first round of samples, or all others: M tokens/s, bytes fetched per byte needed, fetches per M tokens."""

    rate: float
    fetched: float
    fetches: float


def read_rounds(config: DataConfig, opened: OpenedDatasets, rounds: int) -> list[Rounds]:
    """Read the first round of samples, then the others."""
    loader, steps, found = open_loader(config, opened, BATCH), config.logical_shards // BATCH, []
    chunks = opened.chunks
    assert chunks is not None
    with loader:
        for count in (1, rounds - 1):
            began, size, fetches = time.perf_counter(), chunks.fetched_bytes, chunks.fetches
            for _ in range(count * steps):
                next(loader)
            tokens, seconds = count * steps * BATCH * SEQ_LENGTH, time.perf_counter() - began
            needed = tokens * opened.datasets[0].index.token_bytes[0]
            found.append(
                Rounds(
                    tokens / 1e6 / seconds,
                    (chunks.fetched_bytes - size) / needed,
                    (chunks.fetches - fetches) / tokens * 1e6,
                )
            )
    return found


def measure_reading(folder: Path, shards: int, rounds: int, turns: int) -> None:
    """Print tokens/s by place of the data, bytes fetched per byte needed, and requests."""
    disk = replace(settings_of(folder, DATASET), logical_shards=shards, num_workers=1)
    rates: dict[str, list[list[Rounds]]] = {}
    with serving(folder) as address, tempfile.TemporaryDirectory(prefix="benchmark-cache-") as caches:
        stored = replace(disk, data_path=address, index_path=f"{caches}/index", data_cache_size="1TB")
        listing = build_indices(list_datasets(stored), stored)
        on_disk = open_datasets(build_indices(list_datasets(disk), disk), disk)
        place = location(address)
        assert isinstance(place, StorePath)
        sequential = []
        for turn in range(turns + 1):
            warm, cold = (replace(stored, data_cache_path=f"{caches}/{name}") for name in ("warm", f"cold{turn}"))
            for name, config in (("disk", disk), ("cold", cold), ("warm", warm), ("memory", stored)):
                opened = on_disk if name == "disk" else open_datasets(listing, config)
                found = read_rounds(config, opened, rounds)
                if turn:  # the first turn is a warm-up, and fills the warm cache
                    rates.setdefault(name, []).append(found)
            began, size = time.perf_counter(), 0
            first = place / DATASET / on_disk.datasets[0].files.paths[0]
            for piece in Store(address).read_pieces(first.key):
                size += len(piece)
            sequential.append(size / 2e6 / (time.perf_counter() - began))
        held = working_set_bytes(open_datasets(listing, stored), stored)
    total = sum(on_disk.datasets[0].files.sizes)
    print(f"\n{total / 1e9:.2f} GB of documents of 600 tokens, {shards} shards, {BATCH} samples per step, one thread")
    print(f"working set {held / 1e6:.0f} MB; sequential reads from the server {median(sequential):.0f} M tokens/s")
    rows = []
    for name, values in rates.items():
        for part, when in enumerate(("first round", f"the other {rounds - 1}")):
            beside = [mine[part].rate / disk[part].rate for mine, disk in zip(values, rates["disk"], strict=True)]
            last = values[-1][part]
            rows.append(
                (
                    f"{name}, {when}",
                    *spread([each[part].rate for each in values], ".0f"),
                    f"{median(beside):.2f}",
                    f"{last.fetched:.2f}",
                    f"{last.fetches:.1f}",
                )
            )
    print_table(("data", "M tokens/s", "quartiles", "of disk", "bytes per byte", "fetches per M tokens"), rows)


def measure_start(folder: Path, objects: int) -> None:
    """Print the seconds to open a dataset of many small objects, for the first time and again."""
    dataset = folder / "many"
    if not dataset.exists():
        write_documents(dataset / "one", 600, 800_000)
        first, *_ = sorted((dataset / "one").glob("*.arrow"))
        for number in range(objects):
            path = dataset / f"{number:06d}.arrow"
            path.write_bytes(first.read_bytes())
            write_record(path, ArrowFormat(DataConfig()).documents(str(path)), "arrow tokens")
        for path in (dataset / "one").iterdir():
            path.unlink()
        (dataset / "one").rmdir()
    with serving(folder) as address, tempfile.TemporaryDirectory(prefix="benchmark-index-") as index:
        config = replace(settings_of(folder, "many"), data_path=address, index_path=index)
        for what in ("the first start", "a later one"):
            began = time.perf_counter()
            open_datasets(build_indices(list_datasets(config), config), config)
            print(f"{objects:,} objects, {what}: {time.perf_counter() - began:.1f} s")


def main() -> None:
    parser = flag_parser(
        "The loader on data in an object store.",
        tokens=Number(1_000_000_000, "tokens of the dataset", least=10_000_000),
        shards=Number(256, "logical shards", least=BATCH),
        rounds=Number(200, "rounds of samples per turn; 150 read a block of each shard once", least=2),
        turns=Number(3, "measured turns"),
        objects=Number(0, "objects for the measurement of a start; 0 = none", least=0),
    )
    parser.add_argument("--folder", type=Path, help="keep the random documents here (default: a temporary folder)")
    flags = parser.parse_args()
    announce()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = flags.folder or Path(temporary)
        (folder / ".index").mkdir(parents=True, exist_ok=True)
        write_documents(folder / DATASET, 600, flags.tokens)
        for path in (folder / DATASET).glob("*.arrow"):
            write_record(path, ArrowFormat(DataConfig()).documents(str(path)), "arrow tokens")
        measure_reading(folder, flags.shards, flags.rounds, flags.turns)
        if flags.objects:
            measure_start(folder, flags.objects)


if __name__ == "__main__":
    main()
