"""Time `pretrain prepare` against the tokenizers library alone.

Both encode the same documents with the same tokenizer on all cores, in turns: A B A B ... The library gets them as
strings that are in memory already, in one call, and what it gives is thrown away; `prepare` reads them from a file,
encodes them, and writes token files with their checksums and prepare.json. The goal is a ratio of 0.9 or more.

The text is the standard library's own sources, cut into documents of 2000 characters and repeated to the size asked
for. Where other programs take the machine's cores now and then, the ratio of the CPU seconds says more than that of the
clock's.

    python -m scripts.benchmark.measure.prepare
    python -m scripts.benchmark.measure.prepare --megabytes=500 --vocabulary=64000
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import Tokenizer, library_threads, train_tokenizer
from pretraining.tools.prepare.inputs import standard_library_files
from pretraining.tools.prepare.prepare import prepare
from scripts.benchmark.common import Number, announce, announce_rest, flag_parser, print_table

DOCUMENT_CHARACTERS = 2000


def main() -> None:
    flags = flag_parser(
        __doc__ or "",
        megabytes=Number(100, "text to encode"),
        vocabulary=Number(32_000, "entries of the tokenizer", least=257),
        rounds=Number(5, "turns of each that count"),
    ).parse_args()
    announce(flags)
    modules = [file.path.read_text(encoding="utf-8") for file in standard_library_files()]
    pieces = [
        text[at : at + DOCUMENT_CHARACTERS] for text in modules for at in range(0, len(text), DOCUMENT_CHARACTERS)
    ]
    count = round(flags.megabytes * 1e6 / statistics.mean(map(len, pieces)))
    documents = list(islice(cycle(pieces), count))
    with library_threads(True):
        tokenizer = train_tokenizer(modules, flags.vocabulary)
    print(f"text      {count:,} documents, {sum(map(len, documents)) / 1e6:,.1f} million characters", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        root = Path(folder)
        tokenizer.save(root)
        run(root, documents, tokenizer, flags.rounds)


def run(root: Path, documents: list[str], tokenizer: Tokenizer, rounds: int) -> None:
    """Measures, and prints a table."""
    jsonl, parquet = root / "documents.jsonl", root / "documents.parquet"
    with jsonl.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    pq.write_table(pa.table({"text": documents}), parquet, compression="zstd")
    tokens = 1
    contenders: dict[str, Callable[[int], int]] = {
        "tokenizers library alone": lambda turn: _library(tokenizer, documents),
        "prepare, from .jsonl": lambda turn: _prepare(jsonl, root, turn),
        "prepare, from .parquet": lambda turn: _prepare(parquet, root, turn),
    }
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    warm_up_began = time.perf_counter()
    for turn in range(rounds + 1):
        if turn == 1:
            announce_rest(rounds * (time.perf_counter() - warm_up_began))
        for name, contender in contenders.items():
            began, cpu_began = time.perf_counter(), _cpu_seconds()
            tokens = contender(turn) or tokens
            if turn:  # the first ones warm up
                turns[name].append((time.perf_counter() - began, _cpu_seconds() - cpu_began))
    alone, *_ = turns.values()
    rows = []
    for name, measured in turns.items():
        rate = statistics.median(tokens / seconds for seconds, _ in measured)
        ratios, cpu_ratios = ([a[i] / b[i] for a, b in zip(alone, measured, strict=True)] for i in (0, 1))
        rows.append((name, f"{rate:,.0f}", *_spread(ratios), *_spread(cpu_ratios)))
    print_table(("", "tokens/s", "ratio", "all", "ratio of CPU time", "all of these"), rows)


def _library(tokenizer: Tokenizer, documents: list[str]) -> int:
    with library_threads(True):
        tokenizer.library.encode_batch_fast(documents, add_special_tokens=False)
    return 0


def _prepare(text: Path, root: Path, turn: int) -> int:
    config = PrepareConfig(
        input_path=(str(text),), output_path=str(root / f"out{turn}"), dataset=text.suffix[1:], tokenizer_path=str(root)
    )
    return prepare(config).tokens


def _spread(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
