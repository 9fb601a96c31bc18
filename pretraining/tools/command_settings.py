"""The settings of every command except `pretrain train`: one dataclass per command.

Commands about a run to train (inspect, plan, sweep, doctor) have all settings of training and a section of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from pretraining.config.fields import (
    ByteSize,
    NonNegativeFloat,
    NonNegativeInt,
    OneOfOr,
    PositiveInt,
    required,
    setting,
)
from pretraining.config.plugins import TOKEN_FORMATS
from pretraining.config.rules import DROP_ONE, Problems, Row, Rules, is_given, is_off, is_on
from pretraining.config.training import DataConfig, TrainConfig
from pretraining.config.values import parse_ranges

SMALLEST_VOCABULARY = 257
"""All 256 bytes and the end-of-text token; enough to encode any text."""
COMPRESSED_ENDINGS = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4")
"""Allowed after any ending of a text file."""
LARGEST_STEP = 10**12


def _check_text(config: PrepareConfig) -> Problems:
    given = {"--input_path": ",".join(config.input_path), "--source": config.source, "--hf_dataset": config.hf_dataset}
    named = [f"{flag}={value}" for flag, value in given.items() if value]
    if len(named) != 1:
        yield f"the text to prepare is given by {' and '.join(named) or 'nothing'}: give one of {', '.join(given)}"
    name = config.dataset_name
    if (named or config.dataset is not None) and (not name or name.startswith(".") or "/" in name or "," in name):
        yield f"{name!r} cannot name a dataset's folder: give --dataset=<name>, without / and comma, not hidden"


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into a tokenizer and token files. The output does not depend on the number of workers."""

    RULES: ClassVar = Rules(
        (
            Row({"hf_config": is_on, "hf_dataset": is_off}, "name the dataset with --hf_dataset"),
            Row({"hf_dataset": is_off, "hf_split": lambda split: split != "train"}, "folders and files have --split"),
            Row({"split": is_on, "hf_dataset": is_on}, "the split of --hf_dataset is --hf_split"),
            Row({"split": is_on, "source": is_on}, f"this text has no splits; {DROP_ONE}"),
            Row({"text_field": [None], "hf_dataset": is_on}, "a dataset has fields: name the one with the text"),
            Row({"vocab_size": is_on, "tokenizer_path": is_on}, f"a given tokenizer has its own size; {DROP_ONE}"),
        ),
        (_check_text,),
    )

    input_path: tuple[str, ...] = setting(
        (),
        "files, folders and globs to read, comma list. A document is a JSON object (JSON lines, or an array), a row of "
        "Parquet and Arrow, or a whole file of text; gzip, zstd, bzip2, xz and lz4 are decompressed",
    )
    split: str | None = setting(
        None,
        "split to read, by the names of files in folders and globs (train, validation, test), or the folder of a "
        "DatasetDict; all = every file; none = train, and files that name no split",
    )
    source: Literal["stdlib"] | None = setting(
        None, "text to prepare without files of your own; stdlib: the source code of Python's standard library"
    )
    hf_dataset: str | None = setting(
        None, "a Hugging Face dataset: name on the Hub or local folder; needs pip install 'pretraining[hf]'"
    )
    hf_config: str | None = setting(None, "configuration of hf_dataset; none = its only one")
    hf_split: str = setting("train", "split of hf_dataset")
    text_field: str | None = setting(
        "text",
        "field or column with the text; a column of integer lists is taken as token ids, lists of messages (role and "
        "content) as chats; none = each file of JSON, CSV or TSV is a document",
    )
    extensions: tuple[str, ...] = setting(
        ("txt", "text", "md", "jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "feather"),
        "endings of the files to read in folders, also with .gz, .zst, .bz2, .xz or .lz4; globs take any ending",
    )
    special_tokens: Literal["text", "ids"] | None = setting(
        None,
        "what names of special tokens in the text, such as <|im_start|>, become: text = ordinary characters, ids = "
        "their ids; none = text, but ids in chats",
    )
    bad_records: Literal["stop", "skip"] = setting(
        "stop", "if a record cannot be read: stop; or skip: leave it out, count and name it in prepare.json"
    )
    output_path: str = setting(
        "data", "root folder to write: tokenizer.json and a folder per dataset; give it to training as data_path"
    )
    dataset: str | None = setting(None, "name of the dataset's folder; none = from the input folder, file or source")
    tokenizer_path: str | None = setting(
        None,
        "tokenizer: folder, tokenizer.json, address or name on the Hub; none = tokenizer.json in output_path, else a "
        "new BPE",
        may_be_address=True,
    )
    vocab_size: PositiveInt | None = setting(
        None,
        "entries of a new tokenizer; none = 32000, or fewer for little text. For a column of token ids: every id must "
        "be below it; none = the tokenizer's size, or the largest id plus one",
    )
    tokens_per_file: PositiveInt = setting(
        100_000_000, "begin a new file after this many tokens, or about 256 MB of input"
    )
    num_workers: NonNegativeInt | None = setting(
        None, "threads that encode; none or 0 = one per core; no effect on the output"
    )
    encoder: Literal["auto", "fastokens", "tokenizers"] = setting(
        "auto",
        "fastokens: many times as fast, checked on a sample of the text; tokenizers: the reference; auto: fastokens "
        "if it is installed and supports the tokenizer. No effect on the output",
    )

    @property
    def dataset_name(self) -> str:
        """Name of the dataset's folder: the setting, or derived from the input; empty if nothing can be derived."""
        if self.dataset is not None:
            return self.dataset
        if self.source is not None:
            return self.source
        if self.hf_dataset is not None:
            return Path(self.hf_dataset).expanduser().name
        if len(self.input_path) != 1 or any(character in self.input_path[0] for character in "*?["):
            return ""
        # Remove the longest ending that is listed: "wiki.jsonl.gz" becomes "wiki", "v1.5" stays.
        name = Path(self.input_path[0]).expanduser().absolute().name
        plain = ["." + ending.lstrip(".") for ending in self.extensions]
        endings = [ending + more for ending in plain for more in ("", *COMPRESSED_ENDINGS)]
        matching = [ending for ending in endings if name.endswith(ending)]
        return name[: -len(max(matching, key=len))] if matching else name


_BLOCK = "user-defined decoder block of the checkpoint, which it only names: package.module:Class"


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint in a form that other programs read, in one process, with memory for one tensor at a time."""

    ckpt_load_path: str = required(
        "checkpoint, or run (its newest checkpoint): folder or object store address; also as the first word",
        first_word=True,
        may_be_address=True,
    )
    output_path: str = required(
        "new folder (gguf: file) to write, which appears only when complete; also as the second word", second_word=True
    )
    format: Literal["hf", "full", "gguf"] = setting(
        "hf",
        "hf: a folder for AutoModelForCausalLM.from_pretrained; full: four .pt files that training can resume from; "
        "gguf: one file for llama.cpp (needs pip install 'pretraining[gguf]')",
    )
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16",
        "type of the weights with hf and gguf: bfloat16, as Llama models are published; float32, as they are trained",
        aliases={"bf16": "bfloat16", "fp32": "float32"},
    )
    max_shard_size: ByteSize = setting("5GB", "largest weight file with hf: 500MB, 5GB, 2GiB")
    tokenizer_path: str | None = setting(
        None,
        "tokenizer to include with hf and gguf: folder, tokenizer.json or address; none = the run's tokenizer_path",
        may_be_address=True,
    )
    block: str | None = setting(None, _BLOCK)


@dataclass(frozen=True)
class ImportConfig:
    """Turn a Hugging Face Llama into a run: a checkpoint of step 0 with the model's weights in float32."""

    RULES: ClassVar = Rules(
        (Row({"ckpt_save_path": [""]}, "name the run folder"),),
    )

    input_path: str = required("folder with config.json and safetensors files; also as the first word", first_word=True)
    ckpt_save_path: str = required(
        "run folder to write, which must not hold a checkpoint; also as the second word", second_word=True
    )


@dataclass(frozen=True)
class SampleConfig:
    """Continue a prompt with a trained model, in one process, on a GPU if there is one."""

    RULES: ClassVar = Rules(
        (Row({"prompt": is_on, "prompt_tokens": is_on}, f"both are prompts; {DROP_ONE}"),),
    )

    ckpt_load_path: str = required(
        "checkpoint, run (its newest checkpoint), or Hugging Face folder; also as the first word", first_word=True
    )
    prompt: str | None = setting(None, "text to continue; none = start like a new document")
    prompt_tokens: tuple[NonNegativeInt, ...] = setting((), "token ids instead of prompt, comma list; prints token ids")
    tokenizer_path: str | None = setting(
        None,
        "folder, tokenizer.json or address; none = the tokenizer in the folder, or the run's tokenizer_path",
        may_be_address=True,
    )
    max_new_tokens: PositiveInt = setting(128, "most tokens to generate; the end-of-text token stops earlier")
    temperature: NonNegativeFloat = setting(0.8, "higher values give more varied text; 0 = always the likeliest token")
    top_k: NonNegativeInt = setting(50, "sample among this many of the likeliest tokens; 0 = all")
    top_p: Annotated[float, Ge(0), Le(1)] = setting(
        1.0, "sample among the likeliest tokens that have this share of the probability together"
    )
    seed: NonNegativeInt = setting(0, "seed of the sampling; the same seed gives the same text")
    block: str | None = setting(None, _BLOCK)


@dataclass(frozen=True)
class TranslateConfig:
    """Turn another system's settings file into a recipe, and report what each setting became.

    `pretrain train --recipe=FILE` reads such a file directly.
    """

    input_path: str = required("settings file; also as the first word", first_word=True)
    kind: Literal["stub", "guide", "deepspeed", "composed", "nanogpt"] | None = setting(
        None, "system that the file is of (docs/coming-from.md); none = by the file's keys"
    )
    output_path: str | None = setting(None, "recipe to write; none = print it")
    accept_llama: bool = setting(False, "use a Llama of the same shape for another model (GELU, dropout, biases)")
    accept_unknown: bool = setting(False, "ignore unknown keys")


@dataclass(frozen=True)
class ListConfig:
    """List the checkpoints of a run, without reading their tensors (`pretrain verify` does)."""

    run_path: str = required(
        "run folder or its object store address; also as the first word", first_word=True, may_be_address=True
    )
    json: bool = setting(False, "print one JSON object per checkpoint")


def _check_averaged(config: AverageConfig) -> Problems:
    is_run = len(config.paths) == 1
    chosen = config.last is not None or config.steps is not None
    if config.paths and is_run != chosen:
        yield (
            "--paths: name one run and give --last or --steps, or name several checkpoints"
            if is_run
            else "--last and --steps choose checkpoints of one run: name one, or leave them out"
        )


@dataclass(frozen=True)
class PushConfig:
    """Copy a run's missing checkpoints into an object store, as training does with ckpt_mirror_path."""

    paths: tuple[str, ...] = required(
        "run folder, then the address to copy to (left out = the run's ckpt_mirror_path); also as the first words",
        first_word=True,
        may_be_address=True,
    )


@dataclass(frozen=True)
class AverageConfig:
    """Write the average of checkpoints' weights as a new folder, from which `--ckpt_load_path` starts."""

    RULES: ClassVar = Rules(
        (
            Row({"last": is_given, "steps": is_given}, DROP_ONE),
            Row({"weights": is_on, "decay_shape": is_given}, f"the shape gives the weights; {DROP_ONE}"),
            *(
                Row({"weights": is_on, name: is_given}, f"--weights belong to checkpoints that are named; {DROP_ONE}")
                for name in ("last", "steps")
            ),
        ),
        (_check_averaged,),
    )

    paths: tuple[str, ...] = required(
        "run, or several checkpoints: folders or object store addresses; also as the first words",
        first_word=True,
        may_be_address=True,
    )
    output_path: str = required("new folder to write, which appears only when complete")
    last: Annotated[int, Ge(2)] | None = setting(None, "of a run: number of newest checkpoints")
    steps: str | None = setting(None, "of a run: first and last step of the checkpoints, as in 80000-100000")
    weights: tuple[NonNegativeFloat, ...] = setting((), "of named checkpoints: shares in the average; none = equal")
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = setting(
        None, "weights that imitate a decay of the learning rate of this shape, after a constant rate; none = equal"
    )


@dataclass(frozen=True)
class PageConfig:
    """Write an HTML page about one run or several: curves, events, settings. The page needs no network."""

    run_path: tuple[str, ...] = required(
        "run folders, or the folder of a sweep, comma list; also as the first words", first_word=True
    )
    output_path: str | None = setting(
        None, "page to write; none = report.html in the folder, or in the current folder for several"
    )
    picture: str | None = setting(None, "picture of the loss curves to write as well, .png or .svg")


@dataclass(frozen=True)
class InspectSettings:
    """Samples to show of the run that the other settings describe.

    A run or checkpoint as the first word, or in ckpt_load_path, gives its own settings.
    """

    step: Annotated[int, Ge(1), Le(LARGEST_STEP)] | None = setting(None, "step to show, counted from 1")
    steps: str | None = setting(None, "A-B: summarize steps A to B, one line per dataset, instead of single samples")
    sample_id: Annotated[int, Ge(0), Le(10**15)] | None = setting(None, "sample to show, by its global index")
    rank: NonNegativeInt | None = setting(None, "show only the samples of this rank; needs world_size")
    world_size: PositiveInt | None = setting(
        None,
        "GPUs that share the global batch; none = 1. Without rank, it matters only if neither global_batch_size nor a "
        "checkpoint gives the batch's size",
    )
    tokens: bool = setting(False, "show the token ids, too, and with tokenizer_path their text")
    text: bool = setting(False, "show the whole text of each sample, which tokens shortens; needs tokenizer_path")
    json: bool = setting(False, "print one JSON object per sample (with steps: per dataset), nothing shortened")

    @property
    def step_range(self) -> tuple[int, int]:
        """First and last of `steps`; raises a ConfigError if it is malformed."""
        return parse_ranges("steps", [self.steps or ""], smallest=1, largest=LARGEST_STEP)[0]


def is_chosen(value: bool | int | None) -> bool:
    """Return whether a value is neither none nor false; numbers count from 0."""
    return value is not None and value is not False


def _check_steps(config: InspectConfig) -> Problems:
    inspect = config.inspect
    if inspect.rank is not None and inspect.rank >= (inspect.world_size or 1):
        yield f"--rank={inspect.rank} does not exist: ranks count from 0; give --world_size=<number of GPUs>"
    if inspect.steps is not None:
        _ = inspect.step_range


@dataclass(frozen=True)
class InspectConfig(TrainConfig):
    """Settings of a run, and the samples to show."""

    RULES: ClassVar = Rules(
        (
            Row({"step": [None], "sample_id": [None], "steps": [None]}, "nothing to show: give one of them"),
            *(
                Row({"steps": is_given, name: is_chosen}, f"--steps summarizes whole steps; {DROP_ONE}")
                for name in ("step", "sample_id", "rank", "tokens", "text")
            ),
        ),
        (_check_steps,),
    )

    inspect: InspectSettings = InspectSettings()


@dataclass(frozen=True)
class PlanSettings:
    """Machines to plan for. The plan is pure arithmetic: it reads no data and starts nothing."""

    gpu: Literal["h100", "h200", "a100", "b200", "l40s", "4090"] = setting(
        "h100", "kind of GPU: h100, h200, a100, b200, l40s or 4090"
    )
    gpus: Annotated[int, Ge(1), Le(10**6)] = setting(8, "number of GPUs")
    gpus_per_node: PositiveInt = setting(8, "GPUs per node")
    network: Annotated[float, Ge(0.001)] | None = setting(
        None, "Gbit/s per node, over all of its network adapters; none = what is common with this GPU"
    )
    optimizer_state_bytes: Annotated[float, Ge(0), Le(1024)] | None = setting(
        None, "bytes per parameter that a user-defined optimizer keeps; none = measured"
    )
    json: bool = setting(False, "print one JSON object instead of the table")


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Settings of the run to plan; with generated tokens, so no data is needed."""

    data: DataConfig = DataConfig(use_dummy_dataset=True)
    plan: PlanSettings = PlanSettings()


@dataclass(frozen=True)
class SweepSettings:
    """Which combinations to train, and where. Every setting of training takes several values."""

    sweep_path: str = setting("runs/sweep", "folder of the sweep: one folder per run, and sweep.csv")
    processes: PositiveInt = setting(1, "processes per run on this machine, one per GPU (torchrun)")
    only: NonNegativeInt | None = setting(None, "train only this combination, counted from 0; none = all")


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """A grid of runs: a comma list of values per setting; semicolons separate values that are lists or text."""

    sweep: SweepSettings = SweepSettings()


@dataclass(frozen=True)
class VerifyConfig:
    """Read checkpoints or token files completely and report every fault. Exits with 0 only if there is none."""

    RULES: ClassVar = Rules(
        (
            Row({"ckpt_path": is_off, "data_path": is_off}, "name a checkpoint or run, or token files"),
            *(
                Row({"ckpt_path": is_on, name: is_on}, f"--{name} is for token files only; {DROP_ONE}")
                for name in ("data_path", "datasets", "vocab_size")
            ),
        ),
    )

    ckpt_path: str | None = setting(
        None, "checkpoint, or run (all of its checkpoints); also as the first word", first_word=True
    )
    data_path: str | None = setting(
        None, "root folder of the datasets to check, or its address, as for training", may_be_address=True
    )
    datasets: tuple[str, ...] = setting(
        (), "sub-folders of data_path, comma list; empty = every sub-folder with token files"
    )
    vocab_size: PositiveInt | None = setting(
        None, "report token ids that are not below it; none = the size in prepare.json, else no check"
    )
    block: str | None = setting(None, _BLOCK)
    file_type: Annotated[str, OneOfOr(("auto", *TOKEN_FORMATS))] = setting(
        "auto", "format of the token files, as for training"
    )
    col_name: str = setting("tokens", "column of the token files with the token ids")
    sep_token: NonNegativeInt | None = setting(None, "token id at the end of documents, for files that need it")
    strip_tokens: tuple[NonNegativeInt, ...] = setting((), "token ids that training removes at both ends of documents")
    token_dtype: Literal["uint16", "uint32", "uint64"] | None = setting(
        None, "type of the tokens in .bin and .npy files without a header"
    )
    index_path: str | None = setting(None, "folder of the indices, as for training")
    num_workers: NonNegativeInt | None = setting(None, "threads that read files; none or 0 = one per core")


@dataclass(frozen=True)
class DoctorSettings:
    """Measurements of the machines that the run would use. Start it like training; it takes seconds."""

    disk_path: str | None = setting(".", "folder whose disk is measured, such as that of the data; none = no disk")
    json: bool = setting(False, "print one JSON object instead of the table")


@dataclass(frozen=True)
class DoctorConfig(TrainConfig):
    """Settings of a run, and what to measure. ckpt_save_path is measured, too, if it is given."""

    data: DataConfig = DataConfig(use_dummy_dataset=True)
    doctor: DoctorSettings = DoctorSettings()


@dataclass(frozen=True)
class Command:
    """A row of `COMMANDS`.

    Attributes:
        settings: dataclass of the command's settings.
        function: called with the settings; "module:function" in `pretraining` is imported when the command runs.
        purpose: text in the list of commands.
        takes_assignments: whether the function takes the assignments of the command line instead of settings.
    """

    settings: type
    function: str | Callable[..., None]
    purpose: str
    takes_assignments: bool = False


BESIDE_RECIPES = """
For a recipe of another system: --accept_llama=true uses a Llama of the same shape for another model,
--accept_unknown=true ignores unknown keys."""
BESIDE_TRAINING = {
    "prepare": Command(
        PrepareConfig, "tools.prepare.prepare:prepare_in_job", "turn text into a tokenizer and token files"
    ),
    "inspect": Command(
        InspectConfig, "tools.inspect:inspect_command", "show the samples of a training step", takes_assignments=True
    ),
    "list": Command(ListConfig, "tools.list_checkpoints:list_checkpoints", "list the checkpoints of a run"),
    "push": Command(PushConfig, "tools.push:push", "copy the checkpoints of a run into an object store"),
    "average": Command(AverageConfig, "tools.average:average", "write the average of checkpoints' weights"),
    "report": Command(PageConfig, "tools.report:report", "write a page about runs: curves, events, settings"),
    "sample": Command(SampleConfig, "tools.sample:sample", "continue a prompt with a trained model"),
    "export": Command(ExportConfig, "tools.export:export", "write a checkpoint for transformers, or as .pt files"),
    "import": Command(ImportConfig, "tools.import_weights:import_weights", "turn a Hugging Face Llama into a run"),
    "plan": Command(PlanConfig, "tools.planner:plan", "estimate memory and speed of a run before it is started"),
    "sweep": Command(SweepConfig, "tools.sweep:sweep", "train a grid of values per setting", takes_assignments=True),
    "translate": Command(
        TranslateConfig,
        "tools.translate.command:translate_command",
        "turn another system's settings file into a recipe",
        takes_assignments=True,
    ),
    "verify": Command(VerifyConfig, "tools.verify:verify", "check checkpoints or token files completely"),
    "doctor": Command(DoctorConfig, "tools.doctor:doctor", "measure devices, folders and the all-reduce of a job"),
}
