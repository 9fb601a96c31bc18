"""How fast the loader is on one core, how small its state, and how quick a resume.

    python -m scripts.benchmark.measure.loader
    python -m scripts.benchmark.measure.loader --folder=/data/benchmark     keeps the made-up documents

Tokens/s are those of `next(loader)`, on files in the page cache. All contenders take turns in one process that is bound
to one core, and what is shown is the median over turns, with quartiles.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.data.batch import MicroBatch
from pretraining.data.dataset import build_indices, build_loader, open_datasets
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.storage.dataset_files import list_datasets
from scripts.benchmark.common import (
    Number,
    announce,
    end_if_checked,
    flag_parser,
    in_turn,
    print_table,
    spread,
)
from scripts.benchmark.documents import (
    SEQ_LENGTH,
    VOCABULARY,
    read_documents,
    take_turns,
    token_files,
    use_one_core,
    write_documents,
)

MEAN_TOKENS = (600, 60)
GLOBAL_BATCHES = (8, 64, 512)
MICRO_BATCH = 8
SHARDS = 1024
DATASETS = 20
LINKS = tuple(f"link{number:02d}" for number in range(DATASETS))
"""Names of as many datasets, all of the same files."""
PACKINGS = ("greedy", "first_fit", "best_fit")
STEPS = (10, 10**9)
Work = Callable[[], int]


def settings_of(folder: Path, *datasets: str, **changes: Any) -> DataConfig:
    """How datasets are read: in the calling thread and with documents told apart, if nothing else is said."""
    places = {"data_path": str(folder), "datasets": datasets, "index_path": str(folder / ".index")}
    reading = {"seq_length": SEQ_LENGTH, "logical_shards": SHARDS, "document_mask": True, "num_workers": 0}
    return DataConfig(**{**places, **reading, **changes})


def open_data(config: DataConfig) -> OpenedDatasets:
    """Datasets with their indices, which are made where they are missing."""
    listing = list_datasets(config)
    build_indices(listing, config)
    return open_datasets(listing, config)


def open_loader(config: DataConfig, opened: OpenedDatasets, global_batch: int, ranks: int = 1) -> Loader:
    """A loader of rank 0, with a memory of its own in which there is nothing yet."""
    share = global_batch // ranks
    plan = BatchSizes(global_batch, min(share, MICRO_BATCH), max(1, share // MICRO_BATCH), ranks)
    return build_loader(OpenedDatasets(opened.datasets), config, plan, 0, seed=0, vocab_size=VOCABULARY)


def tokens_of(micro_batch: MicroBatch) -> int:
    """Tokens that a model would take, without padding."""
    if micro_batch.lengths_B is None:
        return micro_batch.tokens_BT.size(0) * SEQ_LENGTH
    return int(micro_batch.lengths_B.clamp(max=SEQ_LENGTH).sum())


def reading(
    config: DataConfig, opened: OpenedDatasets, global_batch: int, then: Callable[[MicroBatch], object] | None = None
) -> Work:
    """A contender that takes steps from a loader: a turn takes a sample of every shard, and at least 8 steps.

    Args:
        config: of the data.
        opened: the same.
        global_batch: samples a step.
        then: done with every micro-batch.
    """
    loader = open_loader(config, opened, global_batch)
    steps = max(8, SHARDS * len(opened.datasets) // global_batch)

    def work() -> int:
        tokens = 0
        with loader:  # ends its threads, so that none reads ahead in the turns of others
            for _ in range(steps):
                for micro_batch in next(loader).micro_batches:
                    tokens += tokens_of(micro_batch)
                    if then is not None:
                        then(micro_batch)
        return tokens

    return work


def copying(tokens: np.ndarray, global_batch: int) -> Work:
    """A contender that copies tokens which lie end to end in memory, a step at a time."""
    size, steps, at = global_batch * SEQ_LENGTH, max(8, SHARDS // global_batch), 0

    def work() -> int:
        nonlocal at
        for _ in range(steps):
            at = at + size if at + 2 * size <= len(tokens) else 0
            batch = np.empty(size, dtype=tokens.dtype)
            np.copyto(batch, tokens[at : at + size])
        return steps * size

    return work


def measure_reading(folder: Path, mean: int, rounds: int) -> None:
    """Prints tokens/s of every way to read documents of some length."""
    apart, mixed, ahead = (
        settings_of(folder, f"mean{mean}", **changes) for changes in ({}, {"document_mask": False}, {"num_workers": 1})
    )
    packed = {mode: settings_of(folder, f"mean{mean}", packing=mode) for mode in PACKINGS}
    opened, opened_packed = open_data(apart), {mode: open_data(config) for mode, config in packed.items()}
    tokens = np.concatenate(list(read_documents(token_files(folder / f"mean{mean}"))))
    ways: dict[str, Callable[[int], Work]] = {
        "documents told apart": lambda size: reading(apart, opened, size),
        "not told apart": lambda size: reading(mixed, opened, size),
        "told apart; inputs, labels, positions made too": lambda size: reading(
            apart, opened, size, MicroBatch.model_inputs
        ),
        "told apart; num_workers=1": lambda size: reading(ahead, opened, size),
        **{f"told apart; packing={mode}": partial(reading, packed[mode], opened_packed[mode]) for mode in PACKINGS},
        "numpy copies as many tokens": lambda size: copying(tokens, size),
    }
    print_rates(f"documents of {mean} tokens", ways, rounds)


def measure_many(folder: Path, rounds: int) -> None:
    """Prints tokens/s of a mixture of many datasets."""
    config = settings_of(folder, *LINKS)
    opened = open_data(config)
    print_rates(
        f"{DATASETS} datasets, documents of {MEAN_TOKENS[0]} tokens",
        {"documents told apart": lambda size: reading(config, opened, size)},
        rounds,
    )


def print_rates(heading: str, ways: Mapping[str, Callable[[int], Work]], rounds: int) -> None:
    """Lets ways to read, each with every number of samples a step, take turns, and prints tokens/s."""
    contenders = {(way, size): make(size) for way, make in ways.items() for size in GLOBAL_BATCHES}
    rates = take_turns(contenders, rounds)
    rows = [
        (way, *(" / ".join(spread([rate / 1e6 for rate in rates[way, size]], ".0f")) for size in GLOBAL_BATCHES))
        for way in ways
    ]
    header = (heading, *(f"{size} samples a step" for size in GLOBAL_BATCHES))
    print(f"\nmillions of tokens/s, median / quartiles of {rounds} turns")
    print_table(header, rows)


def measure_state(folder: Path, rounds: int) -> None:
    """Prints the size of the state, what a process keeps in memory, and how long a resume takes."""
    cases = {(count, step): settings_of(folder, *LINKS[:count]) for count in (1, DATASETS) for step in STEPS}
    before = _resident_mib()
    loader = open_loader(cases[DATASETS, STEPS[0]], open_data(cases[DATASETS, STEPS[0]]), 512, ranks=8)
    for _ in range(DATASETS * SHARDS // 512 * 2):
        next(loader)
    kept = _resident_mib() - before
    states = {step: _state_at(loader, step) for step in STEPS}
    print(f"\nstate of {DATASETS} datasets x {SHARDS} shards: {len(json.dumps(states[STEPS[-1]])):,} bytes of JSON")
    print(f"memory of rank 0 of 8, once all of its shards are visited: {kept:.0f} MiB more than before")

    def resuming(config: DataConfig, step: int) -> float:
        loader = open_loader(config, open_data(config), 512, ranks=8)
        state = _state_at(loader, step)
        began = time.perf_counter()
        loader.load_state_dict(state)
        next(loader)
        return 1000 * (time.perf_counter() - began)

    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in in_turn(range(rounds + 1)):
        for (count, step), config in cases.items():
            times[count, step].append(resuming(config, step))
    rows = [
        (f"{count} dataset{'s' * (count > 1)}, step {step:,}", *spread(times[count, step][1:], ".1f"))
        for count, step in cases
    ]
    print("\nfrom a state to the first batch (64 of 512 samples), nothing in memory yet")
    print_table(("", "ms", "quartiles"), rows)


def _state_at(loader: Loader, step: int) -> dict[str, Any]:
    """The state of a run after this many steps."""
    mixture = loader.reader.mixture
    counts = {"next_sample": mixture.first_sample(step), "counts": mixture.counts_before_step(step)}
    return {**loader.state_dict(), **counts}


def _resident_mib() -> float:
    """Return the memory of the process, what it has mapped of files included."""
    return int(re.findall(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def prepare(folder: Path, tokens: int) -> None:
    """Makes the documents that are not there yet."""
    for mean in MEAN_TOKENS:
        write_documents(folder / f"mean{mean}", mean, tokens)
    for link in LINKS:
        if not (folder / link).exists():
            (folder / link).symlink_to(f"mean{MEAN_TOKENS[0]}", target_is_directory=True)
    (folder / ".index").mkdir(exist_ok=True)


def main() -> None:
    parser = flag_parser(
        "The loader on one core.",
        tokens=Number(200_000_000, "of each dataset", least=10_000_000),
        rounds=Number(9, "turns that count"),
    )
    parser.add_argument("--folder", type=Path, help="keep the made-up documents here (default: a temporary folder)")
    flags = parser.parse_args()
    end_if_checked(flags)
    use_one_core()
    announce(flags)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = flags.folder or Path(temporary)
        prepare(folder, flags.tokens)
        measure_state(folder, flags.rounds)
        for mean in MEAN_TOKENS:
            measure_reading(folder, mean, flags.rounds)
        measure_many(folder, flags.rounds)


if __name__ == "__main__":
    main()
