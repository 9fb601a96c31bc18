"""Speed of `pretrain prepare` against the tokenizers library alone.

    python -m scripts.benchmark.measure.prepare
    python -m scripts.benchmark.measure.prepare --megabytes=500 --vocabulary=64000

A tokenizer is trained on the source code of Python's standard library. Then all contenders encode the same documents
with this tokenizer in turns, on one core and on all cores. The library encodes strings in memory, in one call, and
discards the result. `prepare` reads the documents from a file, encodes them, and writes token files with checksums. The
text is the same source code, cut into documents of 2000 characters and repeated up to the requested size.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pretraining.data.tokenizer import Tokenizer, library_threads, train_tokenizer
from pretraining.tools.command_settings import SMALLEST_VOCABULARY, PrepareConfig
from pretraining.tools.prepare.inputs import standard_library_files
from pretraining.tools.prepare.prepare import prepare
from scripts.benchmark.common import Number, announce, flag_parser, print_table, spread

DOCUMENT_CHARACTERS = 2000
LIBRARY = "tokenizers library alone"


def main() -> None:
    parser = flag_parser(
        "pretrain prepare against the tokenizers library.",
        megabytes=Number(100, "MB of text to encode"),
        vocabulary=Number(32_000, "entries of the tokenizer", least=SMALLEST_VOCABULARY),
        rounds=Number(5, "measured turns per contender"),
    )
    flags = parser.parse_args()
    announce()
    text = "".join(file.path.read_text(encoding="utf-8") for file in standard_library_files())
    documents = [text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS)]
    with library_threads(True):
        tokenizer = train_tokenizer(documents, flags.vocabulary)
    documents = list(islice(cycle(documents), flags.megabytes * 1_000_000 // DOCUMENT_CHARACTERS))
    print(f"text      {len(documents):,} documents, {sum(map(len, documents)):,} characters", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        tokenizer.save(Path(folder))
        compare(Path(folder), documents, tokenizer, flags.rounds)


def compare(root: Path, documents: list[str], tokenizer: Tokenizer, rounds: int) -> None:
    """Let the library, and `prepare` with each kind of file, encode in turns, and print a table."""
    contenders: dict[str, Callable[[int, int], int]] = {
        LIBRARY: lambda cores, turn: _encode_with_library(tokenizer, documents, cores)
    }
    for path in _write(root, documents):
        contenders[f"prepare, from {path.name}"] = _preparing(path, root)
    names = [(name, cores) for cores in sorted({1, len(os.sched_getaffinity(0))}) for name in contenders]
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in names}
    tokens: dict[tuple[str, int], int] = {}
    for turn in range(rounds + 1):
        for name, cores in names:
            with _on_cores(cores):
                began = time.perf_counter()
                tokens[name, cores] = contenders[name](cores, turn)
                if turn:  # the first turn is a warm-up
                    seconds[name, cores].append(time.perf_counter() - began)
    rows = []
    for name, cores in names:
        own = seconds[name, cores]
        rate, _ = spread([tokens[name, cores] / each for each in own], ",.0f")
        ratio, quartiles = spread([a / b for a, b in zip(seconds[LIBRARY, cores], own, strict=True)], ".2f")
        rows.append((name, str(cores), rate, ratio, quartiles))
    print_table(("", "cores", "tokens/s", "of the library's", "quartiles"), rows)


def _write(root: Path, documents: Sequence[str]) -> Iterator[Path]:
    """Write the documents as a file of each kind."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    for name, content in (("jsonl", lines), ("jsonl.gz", gzip.compress(lines, compresslevel=6))):
        path = root / f"documents.{name}"
        path.write_bytes(content)
        yield path
    pq.write_table(pa.table({"text": documents}), root / "documents.parquet", compression="zstd")
    yield root / "documents.parquet"


def _encode_with_library(tokenizer: Tokenizer, documents: list[str], cores: int) -> int:
    with library_threads(cores > 1):
        encodings = tokenizer.library.encode_batch_fast(documents, add_special_tokens=False)
    return sum(map(len, encodings))


def _preparing(text: Path, root: Path) -> Callable[[int, int], int]:
    def run_once(cores: int, turn: int) -> int:
        config = PrepareConfig(
            input_path=(str(text),),
            output_path=str(root / f"out_{cores}_{turn}"),
            dataset=text.name,
            tokenizer_path=str(root),
        )
        with redirect_stdout(StringIO()):
            return prepare(config).tokens

    return run_once


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Bind this thread, and threads that it starts, to the first `count` cores."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


if __name__ == "__main__":
    main()
