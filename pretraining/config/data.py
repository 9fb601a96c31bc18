"""Where tokens come from and how they are cut into samples: the section `data`."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pretraining.config.fields import setting
from pretraining.config.values import format_value, parse_range


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are cut into samples."""

    data_path: str | None = setting(None, "root folder; each dataset is a sub-folder with token files")
    datasets: tuple[str, ...] = setting(
        (), "sub-folders of data_path to train on, comma list; empty = every sub-folder with token files"
    )
    weights: tuple[float, ...] = setting(
        (), "proportions of the datasets, comma list in their order; empty = in proportion to their tokens"
    )
    seq_length: int = setting(4096, "tokens a sequence", minimum=1)
    packing: str = setting(
        "stream",
        "how documents make samples. stream: laid end to end and cut, without padding; the others: as many whole "
        "documents as fit, and padding, only longer documents are cut; best_fit pads least, greedy most",
        choices=("stream", "greedy", "first_fit", "best_fit"),
    )
    bos_token: int | None = setting(
        None,
        "token id that begins every document (not doubled where it is there already); none = nothing before documents",
        minimum=0,
    )
    sep_token: int | None = setting(
        None,
        "token id that ends every document (not doubled where it is there already); none = nothing between documents",
        minimum=0,
    )
    strip_tokens: tuple[int, ...] = setting(
        (),
        "token ids removed at both ends of every document, as many as there are, before bos_token and sep_token are "
        "looked at, comma list",
        minimum=0,
    )
    min_length: int = setting(
        1, "documents that hold fewer tokens, after strip_tokens, are left out; 1 = only empty ones are", minimum=1
    )
    logical_shards: int = setting(
        1024,
        "pieces a dataset is cut into; the order of the data depends on it, the number of GPUs does not",
        minimum=1,
    )
    document_mask: bool = setting(
        False, "attention stays inside documents, positions restart at each, and no label crosses from one to the next"
    )
    num_workers: int = setting(
        1, "threads that read ahead in each process; 0 = read in the training loop. The data is the same", minimum=0
    )
    file_type: str = setting(
        "auto",
        "format of the token files: auto (by suffix), arrow, npy, bin, or a class of your own as package.module:Class",
    )
    token_dtype: str | None = setting(
        None, "type of the tokens in .bin files without a header, such as nanoGPT's", choices=("uint16", "uint32")
    )
    col_name: str = setting("tokens", "column of the token files that holds the token ids")
    tokenizer_path: str | None = setting(None, "folder or tokenizer.json, to print generated samples as text")
    held_out_fraction: float = setting(
        0.0, "fraction of the documents kept for evaluation and never trained on", minimum=0, below=1
    )
    index_path: str | None = setting(
        None,
        "folder for document indices; none = inside each dataset's, or the user's cache folder where that is read-only",
    )
    skip_samples: tuple[str, ...] = setting(
        (),
        "samples never to train on: global indices A-B as `pretrain inspect` shows them, both included, comma list; "
        "those of a checkpoint stay skipped",
    )
    bad_documents: str = setting(
        "stop",
        "when a sample cannot be read (damaged file, token beyond the vocabulary): stop and name it, or quarantine: "
        "go on without its labels and say so; no other sample moves",
        choices=("stop", "quarantine"),
    )
    use_dummy_dataset: bool = setting(False, "made-up tokens, no files: for quick tests and performance benchmarks")

    @property
    def skipped_ranges(self) -> list[tuple[int, int]]:
        """`skip_samples` as (first, end).

        Raises:
            ValueError: they are no ranges of samples.
        """
        ranges = (parse_range(text, smallest=0) for text in self.skip_samples)
        return [(first, last + 1) for first, last in ranges]


TOKEN_FORMATS = {
    "arrow": "pretraining.data.storage.arrow:ArrowFormat",
    "npy": "pretraining.data.storage.flat_files:NpyFormat",
    "bin": "pretraining.data.storage.flat_files:BinFormat",
}
"""Formats of token files, by the name that `file_type` gives them."""


def format_problems(data: DataConfig) -> Iterator[str]:
    """What is wrong with the format of the token files: it is known, or a user's own."""
    name, known = data.file_type, ("auto", *TOKEN_FORMATS)
    if "parquet" in name.lower():
        yield (
            f"--file_type={name}: training does not read Parquet. Make token files of it first: "
            f"pretrain prepare --input_path={data.data_path} --output_path=<folder>"
        )
    elif name not in known and ":" not in name:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield f"--file_type={name} must be {', '.join(known)} or a class of your own as package.module:Class{hint}"
    if data.token_dtype is not None and name in ("arrow", "npy"):
        yield f"--token_dtype={data.token_dtype} is for *.bin files; *.{name} files say the type of their tokens"


def source_problems(data: DataConfig) -> Iterator[str]:
    """What is wrong with the settings that say where tokens come from: there is one source."""
    if data.data_path is None and not data.use_dummy_dataset:
        yield "no data: give --data_path, --use_dummy_dataset=true or --recipe=demo"
    if data.data_path is not None and data.use_dummy_dataset:
        yield (
            f"two sources of data: --data_path={data.data_path} and --use_dummy_dataset=true, which makes its tokens "
            "up; give --data_path=none or --use_dummy_dataset=false"
        )


def weights_problems(data: DataConfig) -> Iterator[str]:
    """What is wrong with the datasets and their weights: each has one."""
    datasets, weights = data.datasets, data.weights
    if weights and not datasets:
        yield f"--weights={format_value(weights)} are proportions of nothing: give --datasets, in the same order"
    elif weights and len(weights) != len(datasets):
        yield (
            f"{len(weights)} weights for {len(datasets)} datasets: --weights={format_value(weights)} needs one for "
            f"each of --datasets={format_value(datasets)}, in the same order"
        )
    for position, weight in enumerate(weights, start=1):
        if weight < 0:
            yield f"--weights={format_value(weights)}: number {position} is {weight:g}, and proportions are at least 0"
    if weights and not any(weights):
        yield f"--weights={format_value(weights)} leave every dataset out: give one of them more than 0"
    for name, times in Counter(datasets).items():
        if times > 1:
            yield f"--datasets={format_value(datasets)} names {name} {times} times; give it once, with a larger weight"


def skip_problems(data: DataConfig) -> Iterator[str]:
    """What is wrong with the samples to skip: they are ranges."""
    try:
        _ = data.skipped_ranges
    except ValueError:
        yield (
            f"skip_samples={','.join(data.skip_samples)}: write the first and the last sample of each range, "
            "as in --skip_samples=307200-309759,400000-400255"
        )
