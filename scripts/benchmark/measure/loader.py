"""Speed of the loader on one core, and time of a resume.

    python -m scripts.benchmark.measure.loader
    python -m scripts.benchmark.measure.loader --folder=/data/benchmark     keeps the random documents

The benchmark measures tokens/s of `next(loader)`, on files in the page cache. All contenders take turns in one process
that is bound to one core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.data.batch import MicroBatch
from pretraining.data.dataset import build_indices, build_loader, open_datasets
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.storage.dataset_files import list_datasets
from scripts.benchmark.common import Number, announce, flag_parser, print_table, spread
from scripts.benchmark.documents import SEQ_LENGTH, VOCABULARY, use_one_core, write_documents

MEAN_TOKENS = (600, 60)
GLOBAL_BATCHES = (8, 64, 512)
MICRO_BATCH = 8
SHARDS = 1024
STEPS = (10, 10**9)


def settings_of(folder: Path, dataset: str) -> DataConfig:
    """Return settings to read a dataset in the calling thread, with a document mask."""
    return DataConfig(
        data_path=str(folder),
        datasets=(dataset,),
        index_path=str(folder / ".index"),
        seq_length=SEQ_LENGTH,
        logical_shards=SHARDS,
        document_mask=True,
        num_workers=0,
    )


def open_data(config: DataConfig) -> OpenedDatasets:
    """Open datasets, and build missing indices."""
    listing = list_datasets(config)
    build_indices(listing, config)
    return open_datasets(listing, config)


def open_loader(config: DataConfig, opened: OpenedDatasets, global_batch: int, ranks: int = 1) -> Loader:
    """Return a new loader of rank 0, without caches."""
    share = global_batch // ranks
    plan = BatchSizes(global_batch, min(share, MICRO_BATCH), max(1, share // MICRO_BATCH), ranks)
    return build_loader(
        OpenedDatasets(opened.datasets, chunks=opened.chunks), config, plan, 0, seed=0, vocab_size=VOCABULARY
    )


def reading(config: DataConfig, opened: OpenedDatasets, global_batch: int) -> Callable[[], int]:
    """Return a contender. Its turn reads a sample of every shard, at least 8 steps, and returns the tokens."""
    loader = open_loader(config, opened, global_batch)

    def work() -> int:
        steps = range(max(8, SHARDS // global_batch))
        with loader:
            return sum(_tokens_of(micro_batch) for _ in steps for micro_batch in next(loader).micro_batches)

    return work


def _tokens_of(micro_batch: MicroBatch) -> int:
    """Return the number of input tokens, without padding."""
    if micro_batch.lengths_B is None:
        return micro_batch.tokens_BT.size(0) * SEQ_LENGTH
    return int(micro_batch.lengths_B.clamp(max=SEQ_LENGTH).sum())


def measure_reading(folder: Path, mean: int, rounds: int) -> None:
    """Print tokens/s for documents of a mean length, for several batch sizes."""
    config = settings_of(folder, f"mean{mean}")
    opened = open_data(config)
    contenders = {size: reading(config, opened, size) for size in GLOBAL_BATCHES}
    rates: dict[int, list[float]] = {size: [] for size in GLOBAL_BATCHES}
    for turn in range(rounds + 1):
        for size, work in contenders.items():
            began = time.perf_counter()
            tokens = work()
            if turn:  # the first turn is a warm-up
                rates[size].append(tokens / 1e6 / (time.perf_counter() - began))
    rows = [(f"{size} samples per step", *spread(values, ".0f")) for size, values in rates.items()]
    print_table((f"documents of {mean} tokens", "M tokens/s", "quartiles"), rows)


def measure_resume(folder: Path, rounds: int) -> None:
    """Print the time from a state to the first batch, on one of 8 ranks."""
    config = settings_of(folder, f"mean{MEAN_TOKENS[0]}")
    milliseconds: dict[int, list[float]] = {step: [] for step in STEPS}
    for _ in range(rounds + 1):
        for step in STEPS:
            loader = open_loader(config, open_data(config), 512, ranks=8)
            mixture = loader.reader.mixture
            counts = {"next_sample": mixture.first_sample(step), "counts": mixture.counts_before_step(step)}
            state = loader.state_dict() | counts
            began = time.perf_counter()
            loader.load_state_dict(state)
            next(loader)
            milliseconds[step].append(1000 * (time.perf_counter() - began))
    print("\nfrom a state to the first batch (64 of 512 samples), without caches")
    rows = [(f"step {step:,}", *spread(values[1:], ".1f")) for step, values in milliseconds.items()]
    print_table(("", "ms", "quartiles"), rows)


def main() -> None:
    parser = flag_parser(
        "The loader on one core.",
        tokens=Number(200_000_000, "tokens per dataset", least=10_000_000),
        rounds=Number(9, "measured turns"),
    )
    parser.add_argument("--folder", type=Path, help="keep the random documents here (default: a temporary folder)")
    flags = parser.parse_args()
    use_one_core()
    announce()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = flags.folder or Path(temporary)
        (folder / ".index").mkdir(parents=True, exist_ok=True)
        for mean in MEAN_TOKENS:
            write_documents(folder / f"mean{mean}", mean, flags.tokens)
        measure_resume(folder, flags.rounds)
        for mean in MEAN_TOKENS:
            measure_reading(folder, mean, flags.rounds)


if __name__ == "__main__":
    main()
