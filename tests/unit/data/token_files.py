"""Small token files for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.data.batch import StepBatch
from pretraining.data.dataset import build_indices, build_loader, open_datasets
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.flat_files import BIN_MAGIC

SEP = 999
Documents = Sequence[Sequence[int]]
MEGATRON_TYPES = {"<u1": 1, "<i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}


def write_documents(
    path: Path,
    documents: Sequence[Sequence[int] | None],
    kind: pa.DataType | None = None,
    batch_documents: int = 10**9,
    column: str = "tokens",
) -> None:
    """Write an Arrow file of one column with `batch_documents` rows per record batch, or one if `kind` is no list."""
    kind = kind or pa.list_(pa.uint16())
    is_list = not pa.types.is_integer(kind)
    size = batch_documents if is_list else 1
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([(column, kind)])
    with pa.ipc.new_file(str(path), schema) as writer:
        for begin in range(0, len(documents), size):
            rows = [None if row is None else list(row) for row in documents[begin : begin + size]]
            writer.write_batch(pa.record_batch([pa.array(rows if is_list else rows[0], type=kind)], schema=schema))


def random_documents(count: int, seed: int = 0, largest: int = 40, vocab_size: int = 1000) -> list[list[int]]:
    """Documents of 0 to `largest` tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, generator.integers(0, largest + 1)).tolist() for _ in range(count)]


def make_root(root: Path, seed: int = 0, **datasets: int) -> Path:
    """A data_path with one dataset per keyword, which gives its number of documents; two files each."""
    for number, (name, count) in enumerate(datasets.items()):
        documents = random_documents(count, seed + number)
        write_documents(root / name / "one.arrow", documents[: count // 3], batch_documents=7)
        write_documents(root / name / "two.arrow", documents[count // 3 :])
    return root


def opened(config: DataConfig) -> OpenedDatasets:
    listing = list_datasets(config)
    build_indices(listing, config)
    return open_datasets(listing, config)


def plan(global_batch: int, ranks: int = 1, accumulation: int = 1) -> BatchSizes:
    share = -(-global_batch // ranks)
    return BatchSizes(global_batch, -(-share // accumulation), accumulation, ranks)


def loader(
    config: DataConfig, batch: BatchSizes | None = None, rank: int = 0, seed: int = 7, vocab_size: int = 1000
) -> Loader:
    datasets = None if config.use_dummy_dataset else opened(config)
    return build_loader(datasets, config, batch or plan(8), rank, seed, vocab_size)


def rows(batch: StepBatch) -> list[list[int]]:
    """All sequences of a batch that are not padding."""
    found: list[list[int]] = []
    for micro_batch in batch.micro_batches:
        lengths = micro_batch.lengths_B
        filled = len(micro_batch.tokens_BT) if lengths is None else int((lengths > 0).sum())
        found += micro_batch.tokens_BT[:filled].tolist()
    return found


def header(version: int, tokens: int) -> bytes:
    """The header of llm.c."""
    return np.array([BIN_MAGIC, version, tokens, *[0] * 253], "<i4").tobytes()


def ended(documents: Documents, dtype: str) -> np.ndarray:
    """Documents end to end, with a separator after each except the last."""
    return np.array([token for document in documents for token in (*document, SEP)][:-1], dtype)


def write_flat(path: Path, documents: Documents, dtype: str = "<u2", version: int | None = None) -> None:
    """Write an array or a .bin file, with a header of a version or without one as nanoGPT."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = ended(documents, dtype)
    if path.name.endswith(".idx.bin"):
        write_megatron(path, documents, dtype)
    elif path.name.endswith(".raw.npy"):
        tokens.tofile(path)
    elif path.suffix == ".npy":
        np.save(path, tokens)
    else:
        path.write_bytes((b"" if version is None else header(version, len(tokens))) + tokens.tobytes())


def write_megatron(
    path: Path,
    documents: Documents,
    dtype: str = "<u2",
    borders: Sequence[int] | None = None,
    version: int = 1,
    magic: bytes = b"MMIDIDX\0\0",
    modes: bytes = b"",
) -> None:
    """Write x.bin and x.idx as Megatron-LM does: the sequences, and the borders of documents among them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sequences = [np.array(each, dtype) for each in documents]
    path.write_bytes(b"".join(each.tobytes() for each in sequences))
    lengths = np.array([len(each) for each in sequences], "<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    indices = np.array(range(len(sequences) + 1) if borders is None else borders, "<i8")
    head = struct.pack("<9sQBQQ", magic, version, MEGATRON_TYPES[dtype], len(lengths), len(indices))
    index = head + lengths.tobytes() + pointers.tobytes() + indices.tobytes() + modes
    path.with_suffix(".idx").write_bytes(index)


# Suffix, writer and settings of each format.
FLAT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "npy": (".npy", {}, {}),
    "npy int32": (".npy", {"dtype": "<i4"}, {"file_type": "npy"}),
    "llm.c": (".bin", {"version": 1}, {}),
    "llm.c, Llama 3": (".bin", {"dtype": "<u4", "version": 7}, {"file_type": "bin"}),
    "nanoGPT": (".bin", {}, {"token_dtype": "uint16"}),
    "nanoGPT, uint32": (".bin", {"dtype": "<u4"}, {"token_dtype": "uint32"}),
    "uint64": (".bin", {"dtype": "<u8"}, {"token_dtype": "uint64"}),
    "Dolma": (".raw.npy", {"dtype": "<u2"}, {"token_dtype": "uint16"}),
    "OLMo": (".raw.npy", {"dtype": "<u4"}, {"token_dtype": "uint32", "file_type": "npy_raw"}),
    "Megatron": (".idx.bin", {"dtype": "<u2"}, {}),
    "Megatron, int32": (".idx.bin", {"dtype": "<i4"}, {"file_type": "megatron"}),
}
