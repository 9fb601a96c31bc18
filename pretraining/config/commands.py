"""The settings of the commands besides `pretrain train`: a dataclass each.

A command reads the settings of its dataclass. `pretrain inspect` has those of training, which decide what a step trains
on, and a section of its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from pretraining.config.fields import NonNegativeFloat, NonNegativeInt, OneOfOr, PositiveInt, required, setting
from pretraining.config.plugins import TOKEN_FORMATS
from pretraining.config.training import DataConfig, TrainConfig
from pretraining.config.values import parse_ranges
from pretraining.errors import ConfigError

SMALLEST_VOCABULARY = 257
"""All 256 bytes and the end-of-text token: with these every text can be encoded."""
COMPRESSED_ENDINGS = (".gz", ".zst")
"""May follow any ending of a text file."""
LARGEST_STEP = 10**12
"""More than any run has."""
LARGEST_CLUSTER = 10**6
"""GPUs."""
ForeignKind = Literal["stub", "guide", "deepspeed", "composed", "nanogpt"]
"""Files of settings of other systems: the names of `tools/translate/translate.py`."""


@dataclass(frozen=True)
class PrepareConfig:
    """From text to a tokenizer and token files. The same input gives the same bytes, however many work on it."""

    input_path: tuple[str, ...] = setting(
        (),
        "files, folders and globs to read, comma list. A document is a line of .jsonl and .ndjson, a row of .parquet, "
        ".arrow and .feather, else a file; .gz and .zst are read, too",
    )
    source: Literal["stdlib"] | None = setting(
        None, "text that needs no files; stdlib: the source code of Python's standard library"
    )
    hf_dataset: str | None = setting(
        None, "a Hugging Face dataset: name on the Hub or local folder; needs pip install 'pretraining[hf]'"
    )
    hf_config: str | None = setting(None, "configuration of hf_dataset; none = its only one")
    hf_split: str = setting("train", "split of hf_dataset")
    text_field: str = setting(
        "text", "field or column with the text; a column with lists of integers holds token ids, taken as they are"
    )
    extensions: tuple[str, ...] = setting(
        ("txt", "text", "md", "jsonl", "ndjson", "parquet", "arrow", "feather"),
        "endings of the files taken from folders, also with .gz or .zst behind them; globs take any ending",
    )
    output_path: str = setting("data", "root folder, data_path of training: tokenizer.json and a folder per dataset")
    dataset: str | None = setting(None, "name of the dataset's folder; none = that of the input folder, file or source")
    tokenizer_path: str | None = setting(
        None,
        "folder, tokenizer.json or name on the Hub to encode with; none = that in output_path, else a new BPE",
    )
    vocab_size: PositiveInt | None = setting(
        None,
        "entries of a new tokenizer; none = 32000, or fewer for little text. Token ids must be below it; none = the "
        "tokenizer's size, or one more than the largest id",
    )
    tokens_per_file: PositiveInt = setting(
        100_000_000, "begin a new file after this many tokens, or about 256 MB of input"
    )
    num_workers: NonNegativeInt | None = setting(
        None, "threads that encode; none or 0 = one per core; the output is the same"
    )
    encoder: Literal["auto", "fastokens", "tokenizers"] = setting(
        "auto",
        "fastokens: many times as fast, checked on a sample of the text; tokenizers: the reference; auto: fastokens "
        "if it is installed and takes the tokenizer. The output is the same",
    )

    @property
    def dataset_name(self) -> str:
        """The sub-folder's name: the one given, or that of the input; empty where the input suggests none."""
        if self.dataset is not None:
            return self.dataset
        if self.source is not None:
            return self.source
        if self.hf_dataset is not None:
            return Path(self.hf_dataset).expanduser().name
        if len(self.input_path) != 1 or any(character in self.input_path[0] for character in "*?["):
            return ""
        # The longest ending that is listed goes: "wiki.jsonl.gz" is the dataset "wiki", "v1.5" stays as it is.
        name = Path(self.input_path[0]).expanduser().absolute().name
        plain = ["." + ending.lstrip(".") for ending in self.extensions]
        endings = [ending + more for ending in plain for more in ("", *COMPRESSED_ENDINGS)]
        matching = [ending for ending in endings if name.endswith(ending)]
        return name[: -len(max(matching, key=len))] if matching else name


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint in a form that other programs read. It takes one process and the memory of one tensor."""

    ckpt_load_path: str = required(
        "checkpoint, run (its newest one), or address of one in an object store; also as the first word",
        first_word=True,
        may_be_address=True,
    )
    output_path: str = required("folder to make; it appears when it is complete")
    format: Literal["hf", "full"] = setting(
        "hf",
        "hf: a folder for AutoModelForCausalLM.from_pretrained; full: four .pt files that training can resume from",
    )
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16",
        "of the weights in the hf form: bfloat16, as Llama models are published; float32, as they are trained",
    )
    max_shard_size: str = setting("5GB", "largest weight file of the hf form: 500MB, 5GB, 2GiB")
    tokenizer_path: str | None = setting(
        None, "folder or tokenizer.json for the hf form; none = the run's tokenizer_path"
    )

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes; raises a ConfigError where it is no size."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", self.max_shard_size.strip().upper(), re.ASCII)
        size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else 0.0
        if not 1 <= size < math.inf:
            raise ConfigError(f"--max_shard_size={self.max_shard_size} is no size: write 500MB, 5GB or 2GiB")
        return int(size)


@dataclass(frozen=True)
class ImportConfig:
    """Make a run of a Hugging Face Llama: a checkpoint of step 0 with its weights, in float32."""

    input_path: str = required("folder with config.json and safetensors files; also as the first word", first_word=True)
    ckpt_save_path: str = required("the run's folder; it may not hold a checkpoint yet")


@dataclass(frozen=True)
class SampleConfig:
    """Continue a prompt with a trained model, in one process: on a GPU where there is one."""

    ckpt_load_path: str = required(
        "checkpoint, run (its newest one), or Hugging Face folder; also as the first word", first_word=True
    )
    prompt: str | None = setting(None, "text to continue; none = as a document begins")
    prompt_tokens: tuple[NonNegativeInt, ...] = setting((), "token ids instead of prompt, comma list; ids are printed")
    tokenizer_path: str | None = setting(
        None, "folder or tokenizer.json; none = the folder's, or the run's tokenizer_path"
    )
    max_new_tokens: PositiveInt = setting(128, "how many tokens to add, unless the text ends before")
    temperature: NonNegativeFloat = setting(0.8, "above 1 bolder, below 1 tamer; 0 takes the likeliest token each time")
    top_k: PositiveInt = setting(50, "draws among this many of the likeliest tokens")
    seed: NonNegativeInt = setting(0, "of the draws: the same seed gives the same text")


@dataclass(frozen=True)
class TranslateConfig:
    """Turn another system's file of settings into a recipe, and say what became of each setting.

    `pretrain train --recipe=FILE` reads such a file as well, without this step.
    """

    input_path: str = required("the file; also as the first word", first_word=True)
    kind: ForeignKind | None = setting(None, "stub, guide, deepspeed, composed or nanogpt; none = as its keys say")
    output_path: str | None = setting(None, "recipe to write; none = printed")
    accept_llama: bool = setting(False, "take a Llama of the same shape for another model (GELU, dropout, biases)")
    accept_unknown: bool = setting(False, "leave out the keys that are not understood")


@dataclass(frozen=True)
class ListConfig:
    """Show the checkpoints of a run. Their content is not read: `pretrain verify` does that."""

    run_path: str = required(
        "run's folder or address in an object store; also as the first word", first_word=True, may_be_address=True
    )
    json: bool = setting(False, "one JSON object a checkpoint")


@dataclass(frozen=True)
class PushConfig:
    """Copy the checkpoints of a run that an object store lacks into it, as training does with ckpt_mirror_path."""

    paths: tuple[str, ...] = required(
        "the run's folder, and the address to copy to (none = the run's own ckpt_mirror_path); also as the first words",
        first_word=True,
        may_be_address=True,
    )


@dataclass(frozen=True)
class PageConfig:
    """Write a page about a run, or about several beside each other: curves, events, settings. It needs no network."""

    run_path: tuple[str, ...] = required("folders of runs, comma list; also as the first words", first_word=True)
    output_path: str | None = setting(
        None, "page to write; none = report.html in the run's folder, or with several runs in the current folder"
    )
    picture: str | None = setting(None, "a picture of the loss curves besides, .png or .svg")


@dataclass(frozen=True)
class InspectSettings:
    """What to show of the run that the other settings describe. ckpt_load_path takes those of a checkpoint."""

    step: Annotated[int, Ge(1), Le(LARGEST_STEP)] | None = setting(None, "the step to show, counted from 1")
    steps: str | None = setting(None, "A-B: a summary of steps A to B, a line a dataset, in place of single samples")
    sample_id: Annotated[int, Ge(0), Le(10**15)] | None = setting(None, "the sample to show, by its global index")
    rank: NonNegativeInt | None = setting(None, "show only what this process trains on; needs world_size")
    world_size: PositiveInt | None = setting(
        None,
        "GPUs that share the global batch; none = 1. It matters only if neither global_batch_size nor a checkpoint "
        "says its size",
    )
    tokens: bool = setting(False, "show the token ids too, and with tokenizer_path their text")
    json: bool = setting(False, "one JSON object a sample (with steps: a dataset), nothing shortened")

    @property
    def step_range(self) -> tuple[int, int]:
        """First and last of `steps`; raises a ConfigError where it is no range of steps."""
        return parse_ranges("steps", [self.steps or ""], smallest=1, largest=LARGEST_STEP)[0]


@dataclass(frozen=True)
class InspectConfig(TrainConfig):
    """A run, and what to show of it."""

    inspect: InspectSettings = InspectSettings()


@dataclass(frozen=True)
class PlanSettings:
    """On what the run would train, and what to show. Nothing is read and nothing is started: it is arithmetic."""

    gpu: Literal["h100", "h200", "a100", "b200", "l40s", "4090"] = setting(
        "h100", "kind of GPU: h100, h200, a100, b200, l40s or 4090"
    )
    gpus: Annotated[int, Ge(1), Le(LARGEST_CLUSTER)] = setting(8, "GPUs in all")
    gpus_per_node: PositiveInt = setting(8, "GPUs of a node")
    network: Annotated[float, Ge(0.001)] | None = setting(
        None, "Gbit/s from each node to others, all of its adapters together; none = common with that GPU"
    )
    search: bool = setting(
        False, "a table of what fits, fastest first: strategies, groups, checkpointing, micro-batches"
    )
    optimizer_state_bytes: Annotated[float, Ge(0), Le(1024)] | None = setting(
        None, "bytes per parameter that a user-defined optimizer keeps; none = 8, as AdamW"
    )
    json: bool = setting(False, "one JSON object in place of the table; with search, one a line")


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """A run that is planned; tokens are made up, so that no data is needed."""

    data: DataConfig = DataConfig(use_dummy_dataset=True)
    plan: PlanSettings = PlanSettings()


@dataclass(frozen=True)
class SweepSettings:
    """Which runs, and where. All other settings are those of training, and each may be given several values."""

    sweep_path: str = setting("runs/sweep", "folder of the sweep: a folder per run, and sweep.csv")
    processes: PositiveInt = setting(1, "processes of each run, one a GPU, on this machine (torchrun)")
    only: NonNegativeInt | None = setting(None, "train this combination alone, counted from 0; none = all")


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """A grid of runs: settings with several values, a comma list; values that are lists or text between semicolons."""

    sweep: SweepSettings = SweepSettings()


@dataclass(frozen=True)
class VerifyConfig:
    """Read token files or checkpoints wholly and name every fault. The status is 0 only if there is none."""

    ckpt_path: str | None = setting(
        None, "checkpoint, or run with all of its checkpoints; also as the first word", first_word=True
    )
    data_path: str | None = setting(None, "root folder of the datasets to check, as for training")
    datasets: tuple[str, ...] = setting((), "sub-folders of data_path, comma list; empty = all with token files")
    vocab_size: PositiveInt | None = setting(
        None, "every token must be below it; none = the size in prepare.json, else no check"
    )
    file_type: Annotated[str, OneOfOr(("auto", *TOKEN_FORMATS))] = setting(
        "auto", "format of the token files, as for training"
    )
    col_name: str = setting("tokens", "column of the token files that holds the token ids")
    sep_token: NonNegativeInt | None = setting(None, "token id at the end of documents, for files that need it")
    token_dtype: Literal["uint16", "uint32"] | None = setting(None, "type of the tokens in .bin files without a header")
    num_workers: NonNegativeInt | None = setting(None, "threads that read files; none or 0 = one per core")


@dataclass(frozen=True)
class DoctorSettings:
    """What to measure of the machines that the run would be on. Started like training; takes seconds."""

    disk_path: str | None = setting(".", "folder whose disk is measured; none = no disk")
    disk_mib: PositiveInt = setting(256, "size of the file that is written there and read again, MiB")
    message_mib: PositiveInt | None = setting(
        None, "largest message between processes, MiB; none = 256 on GPUs, 16 on CPUs"
    )
    slow_factor: Annotated[float, Ge(1.05)] = setting(
        1.3, "name a rank or link that is this many times slower than the median of the others"
    )
    json: bool = setting(False, "one JSON object in place of the tables")


@dataclass(frozen=True)
class DoctorConfig(TrainConfig):
    """A run, and what to measure of its machines. With ckpt_save_path saves are measured; with a model, their size."""

    data: DataConfig = DataConfig(use_dummy_dataset=True)
    doctor: DoctorSettings = DoctorSettings()
