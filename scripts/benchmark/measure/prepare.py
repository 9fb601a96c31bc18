"""Time `pretrain prepare` against the tokenizers library alone, and the training of a tokenizer.

All encode the same documents with the same tokenizer, in turns: A B C A B C ..., on one core and on all. The libraries
get them as strings that are in memory already, in one call, and what they give is thrown away; `prepare` reads them
from a file, encodes them, and writes token files with their checksums and prepare.json. The goal is a ratio of 10.

The text is the standard library's own sources, cut into documents of 2000 characters and repeated to the size asked
for; or `--text`, a folder whose Python sources are taken instead, each once, up to that size. The plain text is one
document. Where other programs take the machine's cores now and then, the ratio of the CPU seconds says more than that
of the clock's.

Before that, tokenizers are trained on the standard library and on parts of it, and encode all of it.

    python -m scripts.benchmark.measure.prepare
    python -m scripts.benchmark.measure.prepare --megabytes=500 --vocabulary=64000
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pretraining.config.commands import SMALLEST_VOCABULARY, PrepareConfig
from pretraining.data.tokenizer import Tokenizer, library_threads, train_tokenizer
from pretraining.tools.prepare.encode import text_encoder
from pretraining.tools.prepare.inputs import standard_library_files
from pretraining.tools.prepare.prepare import prepare
from scripts.benchmark.common import Number, announce, flag_parser, in_turn, print_table

DOCUMENT_CHARACTERS = 2000
SHARES = (1, 2, 4, 10)
"""A tokenizer is trained on every so-manieth module."""


def main() -> None:
    parser = flag_parser(
        __doc__ or "",
        megabytes=Number(100, "text to encode"),
        vocabulary=Number(32_000, "entries of the tokenizer", least=SMALLEST_VOCABULARY),
        rounds=Number(5, "turns of each that count"),
    )
    parser.add_argument("--text", help="folder with Python sources to encode (default the standard library)")
    flags = parser.parse_args()
    announce(flags)
    modules = [file.path.read_text(encoding="utf-8") for file in standard_library_files()]
    tokenizer = compare_training(modules, flags.vocabulary)
    texts = cycle(modules) if flags.text is None else _sources(Path(flags.text))
    documents = list(_documents(texts, round(flags.megabytes * 1e6)))
    characters = sum(map(len, documents)) / 1e6
    print(f"\ntext      {len(documents):,} documents, {characters:,.1f} million characters", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        root = Path(folder)
        tokenizer.save(root)
        run(root, documents, tokenizer, flags.rounds)


def compare_training(modules: list[str], vocabulary: int) -> Tokenizer:
    """Prints what training takes, and what a part of the text costs; returns the tokenizer of the whole text."""
    rows, tokenizers = [], []
    for share, entries in [(1, SMALLEST_VOCABULARY), *((share, vocabulary) for share in SHARES)]:
        some = modules[::share]
        began, cpu_began = time.perf_counter(), _cpu_seconds()
        with library_threads(True):
            tokenizer = train_tokenizer(some, entries)
        seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - cpu_began
        tokens = len(text_encoder(tokenizer, "fastokens")(modules)[0])
        tokenizers.append((tokenizer, tokens))
        more = f"{tokens / tokenizers[1][1] - 1:+.2%}" if entries == vocabulary else "-"
        characters = sum(map(len, some)) / 1e6
        rows.append((f"{tokenizer.vocab_size:,}", f"{characters:.1f}", f"{seconds:.2f}", f"{cpu_seconds:.2f}", more))
    print_table(("entries", "million characters", "s", "CPU s", "tokens of the whole text"), rows)
    return tokenizers[1][0]


def run(root: Path, documents: list[str], tokenizer: Tokenizer, rounds: int) -> None:
    """Measures, and prints a table."""
    fast = text_encoder(tokenizer, "fastokens")
    contenders: dict[str, Callable[[int, int], int]] = {
        "tokenizers library alone": lambda cores, turn: _library(tokenizer, documents, cores),
        "fastokens alone": lambda cores, turn: len(fast(documents)[0]),
    }
    for path in _write(root, documents):
        contenders[f"prepare, from {path.name}"] = _preparing(path, root)
    names = [(name, cores) for cores in sorted({1, len(os.sched_getaffinity(0))}) for name in contenders]
    turns: dict[tuple[str, int], list[tuple[float, float]]] = {name: [] for name in names}
    tokens: dict[tuple[str, int], int] = {}
    for turn in in_turn(range(rounds + 1)):
        for name, cores in names:
            with _on_cores(cores):
                began, cpu_began = time.perf_counter(), _cpu_seconds()
                tokens[name, cores] = contenders[name](cores, turn)
                if turn:  # the first ones warm up
                    turns[name, cores].append((time.perf_counter() - began, _cpu_seconds() - cpu_began))
    rows = []
    alone = next(iter(contenders))
    for name, cores in names:
        measured = turns[name, cores]
        rate = statistics.median(tokens[name, cores] / seconds for seconds, _ in measured)
        ratios, cpu_ratios = ([a[i] / b[i] for a, b in zip(turns[alone, cores], measured, strict=True)] for i in (0, 1))
        rows.append((name, str(cores), f"{rate:,.0f}", *_spread(ratios), *_spread(cpu_ratios)))
    print_table(("", "cores", "tokens/s", "ratio", "all", "ratio of CPU time", "all of these"), rows)


def _write(root: Path, documents: Sequence[str]) -> Iterator[Path]:
    """The documents as files of all kinds."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    contents = {
        "documents.jsonl": lines,
        "documents.jsonl.gz": gzip.compress(lines, compresslevel=6),
        "documents.jsonl.zst": pa.Codec("zstd").compress(lines, asbytes=True),
        "documents.txt": "".join(documents).encode(),
    }
    for name, content in contents.items():
        (root / name).write_bytes(content)
        yield root / name
    pq.write_table(pa.table({"text": documents}), root / "documents.parquet", compression="zstd")
    yield root / "documents.parquet"


def _library(tokenizer: Tokenizer, documents: list[str], cores: int) -> int:
    with library_threads(cores > 1):
        encodings = tokenizer.library.encode_batch_fast(documents, add_special_tokens=False)
    return sum(map(len, encodings))


def _preparing(text: Path, root: Path) -> Callable[[int, int], int]:
    def run_once(cores: int, turn: int) -> int:
        out = root / f"out_{cores}_{turn}"
        config = PrepareConfig(
            input_path=(str(text),), output_path=str(out), dataset=text.name, tokenizer_path=str(root)
        )
        with redirect_stdout(StringIO()):
            return prepare(config).tokens

    return run_once


def _documents(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts cut into documents, up to so many characters in all."""
    for text in texts:
        for at in range(0, len(text), DOCUMENT_CHARACTERS):
            document = text[at : at + DOCUMENT_CHARACTERS]
            yield document
            characters -= len(document)
            if characters <= 0:
                return


def _sources(folder: Path) -> Iterator[str]:
    """The Python sources below a folder, each text once."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes().decode("utf-8", "ignore")
        if text not in seen:
            seen.add(text)
            yield text


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Keeps this thread, and those that it starts, on the first `count` cores."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def _spread(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
