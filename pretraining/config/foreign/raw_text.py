"""Text that another system reads while it trains: here `pretrain prepare` makes token files of it first.

    dataset_name: wikitext   ->   data_path=data datasets=wikitext, and the command that makes data/wikitext

The command is the note's remark. Where the command line says where the data is, it wins, and nothing is set.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from pretraining.config.commands import PrepareConfig
from pretraining.config.foreign.stub import data_settings
from pretraining.config.foreign.translation import Rule, Translating
from pretraining.config.plugins import TOKEN_SUFFIXES
from pretraining.files import entries_of, exists, is_folder
from pretraining.progress import parse_number

ROOT = PrepareConfig().output_path
"""Where `pretrain prepare` writes, and training then reads."""
END_OF_TEXT = "0"
"""The end-of-text token of tokenizers that `pretrain prepare` trains."""
_TEXT_SUFFIXES = tuple(f".{ending}" for ending in (*PrepareConfig().extensions, *("json", "csv", "gz", "zst")))
_PERCENT_OF_A_SPLIT = re.compile(r"\w+\[(?::|-)(\d{1,2})%:?\]")


@dataclass(frozen=True)
class TextKeys:
    """The keys under which a system's file says which text it reads; those it does not have stay "".

    Attributes:
        name: a Hugging Face dataset, or a file or folder.
        file: files of text, in place of a dataset.
        config, split, column: of the dataset.
        tokenizer: encodes the text; where none is given, one is trained.
        vocab_size: of that.
    """

    name: str
    file: str = ""
    config: str = ""
    split: str = ""
    column: str = ""
    tokenizer: str = ""
    vocab_size: str = ""

    def rules(self) -> dict[str, Rule]:
        """Returns what becomes of each of the keys but the tokenizer's and the vocabulary's."""
        of_the_command = {self.config: "hf_config", self.split: "hf_split", self.column: "text_field"}
        return {
            self.name: self._settle_text,
            **({self.file: self._settle_text} if self.file else {}),
            **{key: self._in_the_command(flag) for key, flag in of_the_command.items() if key},
        }

    def _settle_text(self, translating: Translating, key: str) -> None:
        text = translating.text(key) or ""
        if translating.is_overridden("data_path", "use_dummy_dataset"):
            translating.leave_out(key, "the command line says where the tokens are")
        elif holds_tokens(Path(text)):
            translating.set(key, **data_settings(Path(text)))
        else:
            remark = f"prepare it first: {self._command(translating, key)}"
            settings = {"data_path": ROOT, "datasets": _dataset_of(text)}
            if self.tokenizer in translating:
                remark += "; it prints the --sep_token to give"
            else:
                settings |= {"tokenizer_path": ROOT, "sep_token": END_OF_TEXT}
            translating.set(key, remark, **settings)

    def validation(self, translating: Translating, key: str) -> None:
        """Settles a key that says what is evaluated on: a fraction, a split, or a file of text."""
        text = translating.text(key) or ""
        slice_of_split = _PERCENT_OF_A_SPLIT.fullmatch(text)
        number, is_path = parse_number(text), bool(self.file) or _is_path(text)
        if slice_of_split:
            translating.set(key, "of the documents, by a hash", held_out_fraction=int(slice_of_split[1]) / 100)
        elif number is not None:
            translating.set(key, held_out_fraction=text)
        elif translating.is_overridden("eval_datasets", "held_out_fraction"):
            translating.leave_out(key, "the command line says what is evaluated on")
        elif translating.is_overridden("data_path", "use_dummy_dataset"):
            remark = "a hundredth of the data that the command line names"
            translating.set(key, remark, held_out_fraction=0.01)
        elif holds_tokens(Path(text)):
            translating.set(key, eval_datasets=text)
        elif self.name in translating and not is_path:
            dataset = f"{_dataset_of(translating.text(self.name) or '')}_{text}"
            command = self._command(translating, self.name, split=text, dataset=dataset)
            translating.set(key, f"prepare it, too: {command}", eval_datasets=f"{ROOT}/{dataset}")
        elif is_path:
            command = _command(input_path=text, text_field=self._text(translating, self.column))
            translating.set(key, f"prepare it, too: {command}", eval_datasets=f"{ROOT}/{_dataset_of(text)}")
        else:
            translating.leave_out(key, "a split of no dataset: give --eval_datasets or --held_out_fraction")

    def _in_the_command(self, flag: str) -> Rule:
        return lambda translating, key: translating.leave_out(key, f"of pretrain prepare: its --{flag}")

    def _command(self, translating: Translating, key: str, split: str | None = None, dataset: str | None = None) -> str:
        text = translating.text(key) or ""
        trained = self.tokenizer not in translating
        common = {
            "text_field": self._text(translating, self.column),
            "dataset": dataset,
            # The tokenizer of the first dataset is that of all below the same root.
            "vocab_size": self._text(translating, self.vocab_size) if trained and dataset is None else None,
            "tokenizer_path": None if trained else self._text(translating, self.tokenizer),
        }
        if key == self.file or _is_path(text):
            return _command(input_path=text, **common)
        config = self._text(translating, self.config)
        return _command(
            hf_dataset=text, hf_config=config, hf_split=split or self._text(translating, self.split), **common
        )

    @staticmethod
    def _text(translating: Translating, key: str) -> str | None:
        return translating.text(key) if key else None


def holds_tokens(folder: Path) -> bool:
    """Whether a folder holds token files, itself or in its sub-folders."""
    if not is_folder(folder) or _is_saved_dataset(folder):
        return False
    entries = entries_of(folder)
    inside = [entry for path in entries if is_folder(path) for entry in entries_of(path)]
    return any(path.suffix in TOKEN_SUFFIXES for path in (*entries, *inside))


def _is_saved_dataset(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`, whose Arrow files hold text."""
    return any(exists(folder / name) for name in ("dataset_dict.json", "dataset_info.json"))


def _is_path(text: str) -> bool:
    """Whether a text names files of text: some are there, or it is written as a path."""
    path = Path(text).expanduser()
    if _is_saved_dataset(path):
        return False
    return text.startswith(("/", "./", "../", "~")) or path.suffix in _TEXT_SUFFIXES or "*" in text or exists(path)


def _dataset_of(text: str) -> str:
    """Returns the name of the dataset that `pretrain prepare` makes."""
    inputs = tuple(text.split(","))
    return PrepareConfig(input_path=inputs).dataset_name or PrepareConfig(input_path=inputs[:1]).dataset_name or "text"


def _command(**options: str | None) -> str:
    """Writes the command without what is the default anyway."""
    defaults = vars(PrepareConfig())
    inputs = options.get("input_path")
    if inputs is not None and not PrepareConfig(input_path=tuple(inputs.split(","))).dataset_name:
        options["dataset"] = options.get("dataset") or _dataset_of(inputs)
    given = {name: value for name, value in options.items() if value is not None and value != defaults[name]}
    flags = [f"--{name}={value}" for name, value in (given | {"output_path": ROOT}).items()]
    return shlex.join(["pretrain", "prepare", *flags])
