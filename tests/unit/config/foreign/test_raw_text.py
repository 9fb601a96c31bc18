"""Text that another system reads as it trains: the command that prepares it, and what training then reads."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.command_line import parse_config
from pretraining.config.commands import PrepareConfig
from pretraining.config.foreign.raw_text import TextKeys
from pretraining.config.foreign.translation import Note, Source, Translating

KEYS = TextKeys("name", config="config", split="split", column="column", tokenizer="tokenizer", vocab_size="vocabulary")
PREPARED = {"tokenizer_path": "data", "sep_token": "0", "data_path": "data"}


def notes_of(overrides: Mapping[str, str] | None = None, **tree: Any) -> dict[str, Note]:
    work = Translating("some", Source("a.json", None, "", tree, overrides or {}))
    work.apply(KEYS.rules() | {"validation": KEYS.validation})
    return {note.key: note for note in work.finish().notes}


def command_in(note: Note) -> str:
    command = note.remark.partition(": ")[2].partition(";")[0]
    program, name, *flags = shlex.split(command)
    assert (program, name) == ("pretrain", "prepare")
    parse_config(PrepareConfig, [], dict(flag[2:].split("=", 1) for flag in flags))
    return command.removeprefix("pretrain prepare ")


@pytest.mark.parametrize(
    ("tree", "dataset", "command"),
    [
        ({"name": "wikitext"}, "wikitext", "--hf_dataset=wikitext --output_path=data"),
        (
            {"name": "a/b", "config": "en", "split": "all", "column": "body", "vocabulary": "500"},
            "b",
            "--hf_dataset=a/b --hf_config=en --hf_split=all --text_field=body --vocab_size=500 --output_path=data",
        ),
        ({"name": "a/b", "split": "train", "column": "text"}, "b", "--hf_dataset=a/b --output_path=data"),
        ({"name": "./texts"}, "texts", "--input_path=./texts --output_path=data"),
        ({"name": "all.jsonl"}, "all", "--input_path=all.jsonl --output_path=data"),
        ({"name": "texts/*.txt"}, "text", "--input_path='texts/*.txt' --dataset=text --output_path=data"),
        (
            {"name": "./my texts", "column": "a"},
            "my texts",
            "'--input_path=./my texts' --text_field=a --output_path=data",
        ),
    ],
)
def test_text_is_prepared_by_the_command_that_is_shown(tree: dict[str, Any], dataset: str, command: str) -> None:
    note = notes_of(**tree)["name"]
    assert note.settings == PREPARED | {"datasets": dataset}
    assert shlex.split(command_in(note)) == shlex.split(command)


def test_with_a_tokenizer_none_is_trained_and_its_end_of_text_is_asked_for() -> None:
    note = notes_of(name="a", tokenizer="tok", vocabulary="500")["name"]
    assert note.settings == {"data_path": "data", "datasets": "a"}
    assert command_in(note) == "--hf_dataset=a --tokenizer_path=tok --output_path=data"
    assert note.remark.endswith("it prints the --sep_token to give")


def test_token_files_are_trained_on_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.arrow").touch()
    assert notes_of(name=str(tmp_path))["name"].settings == {"data_path": str(tmp_path)}
    one = {"data_path": str(tmp_path), "datasets": "one"}
    assert notes_of(name=str(tmp_path / "one"))["name"].settings == one
    assert notes_of(validation=str(tmp_path / "one"))["validation"].settings == {"eval_datasets": f"{tmp_path}/one"}


def test_a_dataset_of_hugging_face_on_disk_is_no_folder_of_token_files(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").touch()
    (tmp_path / "dataset_info.json").touch()
    note = notes_of(name=str(tmp_path))["name"]
    assert command_in(note) == f"--hf_dataset={tmp_path} --output_path=data"


@pytest.mark.parametrize("flag", ["data_path", "data.data-path", "use_dummy_dataset"])
def test_the_command_lines_data_win(flag: str) -> None:
    notes = notes_of({flag: "x"}, name="a", validation="valid")
    assert notes["name"].settings == {}
    assert notes["validation"].settings == {"held_out_fraction": "0.01"}
    notes = notes_of({flag: "x", "eval_datasets": "y"}, name="a", validation="valid")
    assert notes["validation"].settings == {}


@pytest.mark.parametrize(
    ("validation", "fraction"), [("0.05", "0.05"), ("train[:5%]", "0.05"), ("train[-10%:]", "0.1"), ("0", "0")]
)
def test_a_share_of_the_documents_is_held_out(validation: str, fraction: str) -> None:
    assert notes_of(name="a", validation=validation)["validation"].settings == {"held_out_fraction": fraction}


def test_a_split_is_a_dataset_of_its_own() -> None:
    note = notes_of(name="x/a", config="en", column="body", validation="valid", vocabulary="500")["validation"]
    assert note.settings == {"eval_datasets": "data/a_valid"}
    assert command_in(note) == (
        "--hf_dataset=x/a --hf_config=en --hf_split=valid --text_field=body --dataset=a_valid --output_path=data"
    )


def test_a_file_is_evaluated_on_once_it_is_prepared() -> None:
    note = notes_of(name="x/a", validation="valid.txt")["validation"]
    assert note.settings == {"eval_datasets": "data/valid"}
    assert command_in(note) == "--input_path=valid.txt --output_path=data"


def test_a_split_of_nothing_is_left_out() -> None:
    note = notes_of(validation="valid")["validation"]
    assert note.remark == "a split of no dataset: give --eval_datasets or --held_out_fraction"
