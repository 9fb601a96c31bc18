"""Tokens/s of the loader against that of fms-fsdp, on the same documents and on one core.

    git clone https://github.com/foundation-model-stack/fms-fsdp
    python -m scripts.benchmark.compare.against_loaders --fms_fsdp=fms-fsdp

Both run in their own process, without workers, and make batches of 8 sequences of 4096 + 1 tokens. They take turns of a
second on one core. Their files are in the page cache: Arrow files, for fms-fsdp with a record batch per document. Only
the project also yields where documents begin.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa

from scripts.benchmark.common import Number, announce, flag_parser, print_table, spread
from scripts.benchmark.documents import (
    SEQ_LENGTH,
    VOCABULARY,
    read_documents,
    token_files,
    use_one_core,
    write_documents,
)
from scripts.benchmark.measure.loader import MEAN_TOKENS, open_data, open_loader, settings_of

TURN_SECONDS = 1.0
BATCH = 8
FMS_WINDOW = 10_000
"""Rows in the shuffle buffer of fms-fsdp's loader; until it is full, the loader reads two rows to yield one."""
Batches = Iterator[int]
"""Number of tokens per batch."""


def project(folder: Path, name: str) -> Batches:
    config = settings_of(folder, name)
    for step in open_loader(config, open_data(config), BATCH):
        for micro_batch in step.micro_batches:
            yield micro_batch.tokens_BT.size(0) * SEQ_LENGTH


def fms_fsdp(folder: Path, name: str) -> Batches:
    """Read with fms-fsdp's loader and its defaults, after its buffer is full."""
    from fms_fsdp.utils import dataloader_utils, dataset_utils

    # fms-fsdp passes the class where an object is needed, and then fails.
    dataloader_utils._handler_map["arrow"] = dataset_utils.ArrowHandler()
    data = {"datasets": "documents", "weights": "1", "file_type": "arrow", "col_name": "tokens", "seed": 2023}
    sizes = {"seq_length": SEQ_LENGTH, "batch_size": BATCH, "logical_shards": 1024, "num_workers": 0}
    tokens_of = {"vocab_size": VOCABULARY, "eos_token": 0, "bos_token": None, "bol_token": None, "eol_token": None}
    saves = {"checkpoint_interval": sys.maxsize, "resuming_dataset": False, "strip_tokens": ""}
    paths = dict.fromkeys(("ckpt_load_path", "ckpt_save_path"), str(folder / "none"))
    settings = SimpleNamespace(data_path=str(folder / "fms" / name), **data, **sizes, **tokens_of, **saves, **paths)
    batches = iter(dataloader_utils.get_data_loader(settings, 0, 1))
    for _ in range(FMS_WINDOW // BATCH):
        next(batches)
    for tokens, _ in batches:
        yield tokens.numel()


CONTENDERS: dict[str, Callable[[Path, str], Batches]] = {"project": project, "fms-fsdp": fms_fsdp}


def _write_for_fms_fsdp(files: list[Path], folder: Path) -> None:
    """Write files with a record batch per document, and the counts that fms-fsdp's loader reads."""
    (folder / "documents").mkdir(parents=True)
    (folder / "meta").mkdir()
    schema = pa.schema([("tokens", pa.uint16())])
    lines = ["dataset/filename,documents,tokens"]
    for file in files:
        count = tokens = 0
        with pa.ipc.new_file(str(folder / "documents" / file.name), schema) as writer:
            for document in read_documents([file]):
                writer.write_batch(pa.record_batch([pa.array(document)], schema=schema))
                count, tokens = count + 1, tokens + len(document)
        lines.append(f"/documents/{file.name},{count},{tokens}")
    (folder / "meta" / "counts.csv").write_text("\n".join(lines) + "\n")


_opened: list[Batches] = []
"""The loader of a contender's process."""


def _open(contender: str, folder: Path, name: str) -> None:
    use_one_core()
    _opened.append(CONTENDERS[contender](folder, name))


def _read() -> float:
    """Read during a turn; return millions of tokens per second."""
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() < began + TURN_SECONDS:
        tokens += next(_opened[0])
    return tokens / 1e6 / (time.perf_counter() - began)


def race(folder: Path, name: str, rounds: int) -> dict[str, list[float]]:
    """Return the rates of each contender, turn by turn, without the first turn (warm-up)."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {
            each: stack.enter_context(ProcessPoolExecutor(1, spawn, initializer=_open, initargs=(each, folder, name)))
            for each in CONTENDERS
        }
        turns = [{each: pool.submit(_read).result() for each, pool in pools.items()} for _ in range(rounds + 1)]
    return {each: [turn[each] for turn in turns[1:]] for each in CONTENDERS}


def main() -> None:
    parser = flag_parser(
        "The loader against that of fms-fsdp.",
        tokens=Number(100_000_000, "tokens per dataset", least=10_000_000),
        rounds=Number(9, "measured turns"),
    )
    parser.add_argument("--fms_fsdp", type=Path, help="a checkout of github.com/foundation-model-stack/fms-fsdp")
    flags = parser.parse_args()
    announce()
    if flags.fms_fsdp is None:
        parser.error("give --fms_fsdp=<checkout>")
    sys.path.insert(0, str(flags.fms_fsdp.absolute()))  # for the processes of the contenders
    os.environ["OMP_NUM_THREADS"] = "1"
    use_one_core()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        (folder / ".index").mkdir()
        for mean in MEAN_TOKENS:
            name = f"mean{mean}"
            write_documents(folder / name, mean, flags.tokens)
            _write_for_fms_fsdp(token_files(folder / name), folder / "fms" / name)
            rates = race(folder, name, flags.rounds)
            ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
            rows = [(each, *spread(values, ".1f")) for each, values in rates.items()]
            print_table((f"documents of {mean} tokens", "M tokens/s", "quartiles"), rows)
            print("\nproject / fms-fsdp: {} ({})".format(*spread(ratios, ".1f")))


if __name__ == "__main__":
    main()
