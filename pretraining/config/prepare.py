"""The settings of `pretrain prepare`: which text becomes which token files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretraining.config.training import setting
from pretraining.errors import ConfigError

SMALLEST_VOCABULARY = 257
"""All 256 bytes and the end-of-text token: with these every text can be encoded."""
COMPRESSED_ENDINGS = (".gz", ".zst")
"""May follow any ending of a text file."""


@dataclass(frozen=True)
class PrepareConfig:
    """From text to a tokenizer and token files. The same input gives the same bytes, however many work on it."""

    input_path: tuple[str, ...] = setting(
        (),
        "text to read: files, folders and globs, comma list. .jsonl and .ndjson hold a document a line, .parquet, "
        ".arrow and .feather one a row, other files one each; texts may be .gz or .zst",
    )
    source: str | None = setting(
        None,
        "text that needs no files, in place of input_path; stdlib: the source code of this Python's standard library",
        choices=("stdlib",),
    )
    hf_dataset: str | None = setting(
        None,
        "a Hugging Face dataset in place of input_path: its name on the Hub, or a local folder (of data files, or "
        "written by save_to_disk); needs pip install 'pretraining[hf]'",
    )
    hf_config: str | None = setting(None, "configuration of hf_dataset; none = its only one")
    hf_split: str = setting("train", "split of hf_dataset")
    text_field: str = setting(
        "text",
        "field (JSON lines) or column (tables, hf_dataset) that holds the text. A column with lists of integers holds "
        "token ids: they are taken as they are",
    )
    extensions: tuple[str, ...] = setting(
        ("txt", "text", "md", "jsonl", "ndjson", "parquet", "arrow", "feather"),
        "endings of the files taken from folders, comma list, .gz and .zst behind them too; files and globs are taken "
        "whatever their ending",
    )
    output_path: str = setting(
        "data", "root folder (the data_path of training): tokenizer.json and a sub-folder a dataset are written here"
    )
    dataset: str | None = setting(
        None, "name of the dataset's sub-folder; none = the name of the input folder, file or source"
    )
    tokenizer_path: str | None = setting(
        None,
        "folder or tokenizer.json to encode with; none = the tokenizer in output_path, or where there is none a "
        "byte-level BPE trained on the text",
    )
    vocab_size: int | None = setting(
        None,
        "entries of a tokenizer trained here; none = 32000, or fewer where the text does not give as many. Of token "
        "ids: every one is below it; none = the tokenizer's, or one more than the largest",
        minimum=1,
    )
    tokens_per_file: int = setting(
        100_000_000,
        "a new token file is begun at the first document after so many tokens, and after about 256 MB of input",
        minimum=1,
    )
    num_workers: int | None = setting(
        None, "threads that encode; none or 0 = one a core. The output does not depend on it", minimum=0
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


def check_prepare_config(config: PrepareConfig) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: with every problem found.
    """
    problems = []
    given = {
        "--input_path": ",".join(config.input_path),
        "--source": config.source,
        "--hf_dataset": config.hf_dataset,
    }
    named = [f"{flag}={value}" for flag, value in given.items() if value]
    if not named:
        problems.append(
            "there is no text to prepare: give --input_path=<files, folders or globs>, --hf_dataset=<name or folder> "
            "or --source=stdlib"
        )
    if len(named) > 1:
        problems.append(f"{' and '.join(named)} all say which text to read: give one of them")
    if config.hf_config is not None and config.hf_dataset is None:
        problems.append(f"--hf_config={config.hf_config} is of which dataset? Give --hf_dataset too, or leave it out")
    if config.tokenizer_path is not None and config.vocab_size is not None:
        problems.append(
            f"--vocab_size={config.vocab_size} is for a tokenizer trained here, or for token ids without one, but "
            "--tokenizer_path gives one: drop one of them"
        )
    name = config.dataset_name
    if not name and config.dataset is None:
        if config.input_path:
            problems.append("several inputs or a glob suggest no name for the dataset: give --dataset=<name>")
    elif not name or name.startswith(".") or "/" in name or "," in name:
        problems.append(
            f"{name!r} cannot be a dataset's name (a plain folder name, without '/' and ',', not hidden): give "
            "another --dataset"
        )
    if config.input_path and not config.extensions:
        problems.append(
            "--extensions is empty, so that no file of a folder would be read: name some, such as "
            "--extensions=txt,jsonl"
        )
    if problems:
        raise ConfigError(problems)
