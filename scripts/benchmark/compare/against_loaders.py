"""Tokens/s of the loader against others, on the same documents and on one core.

    pip install mosaicml-streaming datasets          in a separate environment: it needs older packages
    git clone https://github.com/foundation-model-stack/fms-fsdp
    python -m scripts.benchmark.compare.against_loaders --fms_fsdp=fms-fsdp

Every contender runs in its own process, without workers, and makes batches of 8 sequences of 4096 + 1 tokens. The
contenders take turns of a second on one core. Their files are in the page cache, in the form that each needs:

    project, datasets   Arrow files
    fms-fsdp            Arrow files with a record batch per document
    Mosaic Streaming    MDS shards of documents, or of packed rows (the usual form, which needs no work but reading)

Contenders that are not installed are left out. Only the project also yields where documents begin.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
from torch.utils.data import DataLoader, IterableDataset

from scripts.benchmark.common import Number, Table, announce, flag_parser, spread
from scripts.benchmark.documents import (
    SEQ_LENGTH,
    VOCABULARY,
    read_documents,
    token_files,
    use_one_core,
    write_documents,
)
from scripts.benchmark.measure.loader import open_data, open_loader, settings_of

MEAN_TOKENS = (600, 60)
TURN_SECONDS = 1.0
BATCH = 8
ROW = SEQ_LENGTH + 1
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


def mosaic_rows(folder: Path, name: str) -> Batches:
    """Read packed rows."""
    loader = DataLoader(_mosaic(folder / "mds_rows" / name), batch_size=BATCH)
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        yield batch["tokens"].shape[0] * SEQ_LENGTH


def mosaic_documents(folder: Path, name: str) -> Batches:
    """Read documents and pack them."""
    documents = itertools.chain.from_iterable(itertools.repeat(_mosaic(folder / "mds_documents" / name)))
    return _packed(document["tokens"] for document in documents)


def _mosaic(folder: Path) -> IterableDataset[dict[str, np.ndarray]]:
    from streaming import StreamingDataset

    dataset: IterableDataset[dict[str, np.ndarray]] = StreamingDataset(
        local=str(folder), shuffle=True, batch_size=BATCH
    )
    return dataset


def datasets_arrays(folder: Path, name: str) -> Batches:
    """Read a memory-mapped, fully shuffled Hugging Face dataset as numpy arrays, and pack the documents."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = [str(path) for path in token_files(folder / name)]
    documents = load_dataset("arrow", data_files=files, split="train", cache_dir=str(folder / "datasets_cache"))
    documents = documents.with_format("numpy")
    return _packed(
        document
        for seed in itertools.count()
        for examples in documents.shuffle(seed=seed).iter(batch_size=1000)
        for document in examples["tokens"]
    )


class Rows(IterableDataset[np.ndarray]):
    """Concatenated documents, cut into rows: the usual loop in user code."""

    def __init__(self, documents: Iterator[np.ndarray]) -> None:
        self._documents = documents

    def __iter__(self) -> Iterator[np.ndarray]:
        parts: list[np.ndarray] = []
        held = 0
        for document in self._documents:
            parts.append(document)
            held += len(document)
            if held >= ROW:
                tokens = np.concatenate(parts)
                for at in range(0, held - ROW + 1, ROW):
                    yield tokens[at : at + ROW]
                held %= ROW
                parts = [tokens[len(tokens) - held :]]


def _packed(documents: Iterator[np.ndarray]) -> Batches:
    for batch in DataLoader(Rows(documents), batch_size=BATCH):
        yield batch.shape[0] * SEQ_LENGTH


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


def _write_mds(arrays: Iterable[np.ndarray], dtype: str, folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:{dtype}"}, exist_ok=True) as writer:
        for tokens in arrays:
            writer.write({"tokens": np.ascontiguousarray(tokens)})


CONTENDERS: dict[str, tuple[Callable[[Path, str], Batches], tuple[str, ...]]] = {
    "project": (project, ()),
    "fms-fsdp": (fms_fsdp, ("fms_fsdp", "transformers")),
    "Mosaic Streaming, packed rows": (mosaic_rows, ("streaming",)),
    "Mosaic Streaming, documents": (mosaic_documents, ("streaming",)),
    "datasets, shuffled arrays": (datasets_arrays, ("datasets",)),
}
"""Contenders by name, with the packages that they need; the others are compared with the first."""
WRITERS: dict[str, tuple[str, Callable[[list[Path], Path], None]]] = {
    "fms": ("fms-fsdp", _write_for_fms_fsdp),
    "mds_rows": (
        "Mosaic Streaming, packed rows",
        lambda files, target: _write_mds(Rows(read_documents(files)), f"uint16:{ROW}", target),
    ),
    "mds_documents": (
        "Mosaic Streaming, documents",
        lambda files, target: _write_mds(read_documents(files), "uint16", target),
    ),
}
"""Writers of other file forms by folder, with the contender that reads them."""

_opened: list[Batches] = []
"""The loader of a contender's process."""


def _open(contender: str, folder: Path, name: str) -> None:
    use_one_core()
    _opened.append(CONTENDERS[contender][0](folder, name))


def _read() -> float:
    """Read during a turn; return tokens per second."""
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() < began + TURN_SECONDS:
        tokens += next(_opened[0])
    return tokens / (time.perf_counter() - began)


def race(contenders: list[str], folder: Path, name: str, rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of every contender, turn by turn, without the first turn (warm-up)."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {
            each: stack.enter_context(ProcessPoolExecutor(1, spawn, initializer=_open, initargs=(each, folder, name)))
            for each in contenders
        }
        turns = [{each: pool.submit(_read).result() for each, pool in pools.items()} for _ in range(rounds + 1)]
    return {each: [turn[each] for turn in turns[1:]] for each in contenders}


def main() -> None:
    parser = flag_parser(
        "The loader against others.",
        tokens=Number(100_000_000, "tokens per dataset", least=10_000_000),
        rounds=Number(9, "measured turns"),
    )
    parser.add_argument("--fms_fsdp", type=Path, help="a checkout of github.com/foundation-model-stack/fms-fsdp")
    flags = parser.parse_args()
    if flags.fms_fsdp is not None:  # for the processes of the contenders
        sys.path.insert(0, str(flags.fms_fsdp.absolute()))
    announce(flags)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    use_one_core()
    contenders = [name for name, (_, packages) in CONTENDERS.items() if all(map(importlib.util.find_spec, packages))]
    if missing := CONTENDERS.keys() - set(contenders):
        print(f"left out, because their packages are not installed: {', '.join(sorted(missing))}")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        (folder / ".index").mkdir()
        for mean in MEAN_TOKENS:
            name = f"mean{mean}"
            write_documents(folder / name, mean, flags.tokens)
            for form, (reader, write) in WRITERS.items():
                if reader in contenders:
                    write(token_files(folder / name), folder / form / name)
            rates = race(contenders, folder, name, flags.rounds)
            table = Table(f"documents of {mean} tokens", "M tokens/s", "quartiles", "project / it")
            for contender, each in rates.items():
                ratio, _ = spread([a / b for a, b in zip(rates["project"], each, strict=True)], ".1f")
                table.add(contender, *spread([rate / 1e6 for rate in each], ".1f"), ratio)
            table.print()


if __name__ == "__main__":
    main()
