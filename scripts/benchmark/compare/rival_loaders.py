"""Loaders that are raced against the project's, each on documents in the form that suits it.

`CONTENDERS` names them, `prepare` writes the documents. A contender is a generator: it reads a batch of `BATCH` rows
and yields how many tokens these have for a model, without end. What it imports need not be installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset

from scripts.benchmark.documents import SEQ_LENGTH, VOCABULARY, read_documents, token_files
from scripts.benchmark.measure.loader import open_data, open_loader, settings_of

BATCH = 8
ROW = SEQ_LENGTH + 1
FMS_WINDOW = 10_000
"""Rows that fms-fsdp's loader shuffles among; until it has them, it reads two for each that it gives."""
Batches = Iterator[int]
Contender = Callable[[Path, str], Batches]


def project(folder: Path, name: str) -> Batches:
    """The project with 8 samples a step."""
    return _steps(folder, name, BATCH)


def project_large_steps(folder: Path, name: str) -> Batches:
    """The project with 512 samples a step, in micro-batches of 8."""
    return _steps(folder, name, 512)


def _steps(folder: Path, name: str, global_batch: int) -> Batches:
    config = settings_of(folder, name)
    for step in open_loader(config, open_data(config), global_batch):
        for micro_batch in step.micro_batches:
            yield micro_batch.tokens_BT.size(0) * SEQ_LENGTH


def fms_fsdp(folder: Path, name: str) -> Batches:
    """fms-fsdp's loader with its defaults, once its window is full."""
    from fms_fsdp.utils import dataloader_utils, dataset_utils

    # It hands over the class where it needs an object, and then fails.
    dataloader_utils._handler_map["arrow"] = dataset_utils.ArrowHandler()
    settings = SimpleNamespace(
        data_path=str(folder / "fms" / name),
        datasets="documents",
        weights="1",
        file_type="arrow",
        col_name="tokens",
        seq_length=SEQ_LENGTH,
        batch_size=BATCH,
        logical_shards=1024,
        num_workers=0,
        seed=2023,
        bos_token=None,
        eos_token=0,
        bol_token=None,
        eol_token=None,
        strip_tokens="",
        vocab_size=VOCABULARY,
        ckpt_load_path=str(folder / "none"),
        ckpt_save_path=str(folder / "none"),
        resuming_dataset=False,
        checkpoint_interval=sys.maxsize,
    )
    batches = iter(dataloader_utils.get_data_loader(settings, 0, 1))
    for _ in range(FMS_WINDOW // BATCH):
        next(batches)
    for tokens, _ in batches:
        yield tokens.numel()


def mosaic_rows(folder: Path, name: str) -> Batches:
    """Mosaic Streaming on rows that are packed already."""
    for batch in _endless(DataLoader(_mosaic(folder / "mds_rows" / name), batch_size=BATCH)):
        yield batch["tokens"].shape[0] * SEQ_LENGTH


def mosaic_documents(folder: Path, name: str) -> Batches:
    """Mosaic Streaming on documents, packed when they are read."""
    documents = _endless(_mosaic(folder / "mds_documents" / name))
    return _batches_of(Rows(document["tokens"] for document in documents))


def _mosaic(folder: Path) -> IterableDataset[dict[str, np.ndarray]]:
    from streaming import StreamingDataset

    dataset: IterableDataset[dict[str, np.ndarray]] = StreamingDataset(
        local=str(folder), shuffle=True, batch_size=BATCH
    )
    return dataset


def datasets_lists(folder: Path, name: str) -> Batches:
    """Hugging Face datasets as its documentation has it: streamed, shuffled in a buffer, grouped as lists."""
    from datasets import load_dataset

    def group(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(itertools.chain.from_iterable(examples["tokens"]))
        return {"input_ids": [tokens[at : at + ROW] for at in range(0, len(tokens) - ROW + 1, ROW)]}

    def stack(examples: list[dict[str, list[int]]]) -> torch.Tensor:
        return torch.tensor([example["input_ids"] for example in examples])

    files = [str(path) for path in token_files(folder / name)]
    documents = load_dataset("arrow", data_files=files, split="train", streaming=True)
    rows = documents.shuffle(seed=0, buffer_size=10_000).map(group, batched=True, remove_columns=["tokens"])
    # `rows.with_format("torch")` in place of `stack` takes fifteen times as long.
    for batch in _endless(DataLoader(rows, batch_size=BATCH, collate_fn=stack)):
        yield batch.shape[0] * SEQ_LENGTH


def datasets_arrays(folder: Path, name: str) -> Batches:
    """Hugging Face datasets with more care: mapped into memory, shuffled wholly, read and packed as numpy arrays."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = [str(path) for path in token_files(folder / name)]
    documents = load_dataset("arrow", data_files=files, split="train", cache_dir=str(folder / "datasets_cache"))
    documents = documents.with_format("numpy")

    def read() -> Iterator[np.ndarray]:
        for seed in itertools.count():
            for examples in documents.shuffle(seed=seed).iter(batch_size=1000):
                yield from examples["tokens"]

    return _batches_of(Rows(read()))


class Rows(IterableDataset[np.ndarray]):
    """Documents end to end, cut into rows, as one writes it by hand."""

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


def _batches_of(rows: Rows) -> Batches:
    for batch in DataLoader(rows, batch_size=BATCH):
        yield batch.shape[0] * SEQ_LENGTH


def _endless(passes: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from passes


CONTENDERS: dict[str, tuple[Contender, str]] = {
    "project, 8 samples a step": (project, ""),
    "project, 512 samples a step": (project_large_steps, ""),
    "fms-fsdp": (fms_fsdp, "fms_fsdp"),
    "Mosaic Streaming, packed rows": (mosaic_rows, "streaming"),
    "Mosaic Streaming, documents": (mosaic_documents, "streaming"),
    "datasets, streamed lists": (datasets_lists, "datasets"),
    "datasets, shuffled arrays": (datasets_arrays, "datasets"),
}
# package -> the modules that it takes, and how to get them
PACKAGES = {
    "fms_fsdp": (
        ("fms_fsdp", "transformers"),
        "give --fms_fsdp=<a checkout of github.com/foundation-model-stack/fms-fsdp>, and pip install transformers",
    ),
    "streaming": (("streaming",), "pip install mosaicml-streaming"),
    "datasets": (("datasets",), "pip install datasets"),
}


def installed_packages() -> set[str]:
    """Those whose contenders can be measured; says what to do for the others."""
    found = set()
    for package, (modules, how) in PACKAGES.items():
        if all(importlib.util.find_spec(module) for module in modules):
            found.add(package)
        else:
            print(f"left out  {package}: {how}")
    return found


def prepare(folder: Path, name: str, packages: set[str]) -> None:
    """Writes documents in the forms that contenders read, where they are not there yet."""
    (folder / ".index").mkdir(exist_ok=True)
    files = token_files(folder / name)
    forms: list[tuple[str, str, Callable[[Path], None]]] = [
        ("fms_fsdp", "fms", lambda target: _write_one_a_record_batch(files, target)),
        ("streaming", "mds_rows", lambda target: _write_mds(Rows(read_documents(files)), f"uint16:{ROW}", target)),
        ("streaming", "mds_documents", lambda target: _write_mds(read_documents(files), "uint16", target)),
    ]
    for package, form, write in forms:
        target = folder / form / name
        if package in packages and not target.exists():
            aside = target.with_name(f".{name}.tmp")
            aside.mkdir(parents=True, exist_ok=True)
            write(aside)
            aside.rename(target)


def _write_one_a_record_batch(files: list[Path], folder: Path) -> None:
    """Files as fms-fsdp's loader wants them, with the counts that spare it to look into each."""
    (folder / "documents").mkdir(exist_ok=True)
    (folder / "meta").mkdir(exist_ok=True)
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
