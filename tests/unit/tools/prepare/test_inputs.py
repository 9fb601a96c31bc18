"""Finding the files of an input."""

from __future__ import annotations

import json
import logging
import os
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.tools.prepare.prepare_files import json_lines, packed

from pretraining.cli import main
from pretraining.errors import DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare.inputs import Selection, list_files, standard_library_files, warn_of_copies
from pretraining.tools.prepare.packed_files import InputFile

ENDINGS = Selection(("txt", "jsonl"))


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(packed(name.lower(), f"text of {name}".encode()))


def names(files: list[InputFile]) -> list[str]:
    return [file.name for file in files]


def test_folders_are_walked_in_the_order_of_names_and_files_and_globs_are_taken_whatever_their_ending(
    tmp_path: Path,
) -> None:
    found = ["a/deep/er/x.jsonl", "a/z.txt.gz", "a-b.txt", "b.jsonl.zst", "c.TXT", "d.JSONL.GZ"]
    tree(tmp_path, *reversed(found), "no.pdf", "no.rst.gz", "no.gz", ".hidden.txt", ".git/x.txt")
    assert names(list_files([str(tmp_path)], ENDINGS)) == found
    tree(tmp_path, "one[1].rst", "x/b.py", "x/y/a.py", "x/y/c.txt")
    inputs = [str(tmp_path / "one[1].rst"), str(tmp_path / "x/**/*.py")]
    assert names(list_files(inputs, ENDINGS)) == ["one[1].rst", "b.py", "y/a.py"]


def test_each_file_counts_once_and_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    tree(tmp_path, "in/a.txt", "elsewhere/b.txt")
    (tmp_path / "in/circle").symlink_to(tmp_path / "in")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "in")
    (tmp_path / "in/again.txt").symlink_to(tmp_path / "in/a.txt")
    assert names(list_files([str(tmp_path / "in")], ENDINGS)) == ["a.txt", "linked/b.txt"]


def test_a_folder_that_cannot_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="Permission denied") as error:
        list_files([str(tmp_path)], ENDINGS)
    assert error.value.path == tmp_path


def test_token_files_made_here_are_no_input_of_the_folder_around_them(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "data/web/prepare.json", "data/web/part.txt", "data/web/deeper/x.txt", "data/y.txt")
    assert names(list_files([str(tmp_path)], ENDINGS)) == ["a.txt", "data/y.txt"]
    assert names(list_files([str(tmp_path / "data/web")], ENDINGS)) == ["deeper/x.txt", "part.txt"]


# What people keep beside the text


ANY = Selection(PrepareConfig().extensions)


def records(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(json_lines([name]))


def listed(caplog: pytest.LogCaptureFixture, *inputs: Path, split: str | None = None) -> list[str]:
    caplog.clear()
    caplog.set_level(logging.INFO, "pretraining")
    return names(list_files([str(each) for each in inputs], replace(ANY, split=split)))


def test_unread_files_of_a_folder_are_counted_and_the_first_ones_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree(tmp_path, "a.txt", "b.pdf", "a/c.docx", "x/d.zip", ".hidden")
    assert listed(caplog, tmp_path) == ["a.txt"]
    assert "3 files not read, the first is a/c.docx: their endings are not in --extensions=" in caplog.text


SPLIT_FOLDERS = [
    ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "validation-0.parquet", "test-0.parquet"],
    ["train/a.jsonl", "train/b.jsonl", "valid/a.jsonl", "test/a.jsonl"],
    ["web.jsonl", "web2.jsonl", "web.val.jsonl", "web_test.jsonl"],
    ["TinyStories-train.txt", "TinyStories_train_2.txt", "TinyStories-valid.txt", "TinyStories-test.txt"],
    ["en/train.json.gz", "fr/training.json.gz", "en/dev.json.gz", "fr/eval.json.gz"],
]


@pytest.mark.parametrize("files", SPLIT_FOLDERS, ids=range(len(SPLIT_FOLDERS)))
def test_files_of_other_splits_are_skipped_and_named_with_the_flag_that_reads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: list[str]
) -> None:
    for name in files:
        (tree if name.endswith(".txt") else records)(tmp_path, name)
    given, (_, _, validation, test) = tmp_path, files
    assert listed(caplog, given / "**/*.*") == listed(caplog, given) == sorted(files[:2])
    for split, name in (("validation", validation), ("test", test)):
        assert f"1 file not read, the first is {name}: they look like the split {split}" in caplog.text
        assert f"--split={split}" in caplog.text
        assert listed(caplog, given, split=split) == [name]
    assert listed(caplog, given, split="dev") == [validation], "another word for validation"
    assert listed(caplog, given, split="all") == sorted(files)
    assert listed(caplog, tmp_path / test) == [Path(test).name], "a file that is named is read"


def test_a_split_is_distinguished_from_words_that_resemble_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["docs/dev/guide.md", "docs/test/plan.md", "tests/case.md", "a.md"]
    tree(tmp_path / "texts", *texts)
    assert listed(caplog, tmp_path / "texts") == sorted(texts), "no text is named train"
    code = ["train.py", "model.py", "data/loader.py", "data/batch.py", "tests/test_a.py", "tests/test_b.py"]
    tree(tmp_path / "code", *code)
    assert names(list_files([str(tmp_path / "code")], Selection(("py",)))) == sorted(code), "most modules name no split"
    records(tmp_path, "records/contest.jsonl", "records/latest.jsonl", "records/trainer.jsonl")
    assert len(listed(caplog, tmp_path / "records")) == 3
    records(tmp_path, "alone/test-0.jsonl", "alone/test-1.jsonl")
    assert len(listed(caplog, tmp_path / "alone")) == 2, "nothing is mixed"
    assert not caplog.messages


def test_descriptions_and_settings_beside_records_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records(tmp_path, "data/train.jsonl")
    tree(tmp_path, "README.md", "LICENSE.txt", "notes.md")
    (tmp_path / "settings.json").write_text('{\n "version": 1\n}')
    assert listed(caplog, tmp_path) == ["data/train.jsonl", "notes.md"]
    assert "2 files not read, the first is LICENSE.txt: they describe the records" in caplog.text
    assert "1 file not read, the first is settings.json: JSON, but neither" in caplog.text
    tree(tmp_path / "texts", "README.md", "a.txt")
    assert listed(caplog, tmp_path / "texts") == ["README.md", "a.txt"], "texts alone are texts"


def save_to_disk(folder: Path, files: list[str], **state: object) -> None:
    """Write a folder as `Dataset.save_to_disk` does, and a cache as `map` leaves it there."""
    folder.mkdir(parents=True)
    for name in (*files, "cache-32ce1326d4e03f53.arrow", "cache-32ce1326d4e03f53_00000_of_00002.arrow"):
        table = pa.table({"text": [f"{folder.name} {name}"]})
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in files], "_indices_data_files": None} | state
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')


@pytest.mark.parametrize("pattern", ["", "*.arrow", "*"])
def test_a_saved_dataset_is_read_from_the_files_in_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pattern: str
) -> None:
    files = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    save_to_disk(tmp_path / "saved", files)
    assert listed(caplog, tmp_path / "saved" / pattern) == files
    assert "2 files not read, the first is cache-32ce1326d4e03f53.arrow: state.json does not list" in caplog.text
    (tmp_path / "saved/state.json").unlink()  # a cache folder of the library has no state.json
    assert listed(caplog, tmp_path / "saved" / pattern.replace("*", "*.arrow")[:7]) == files
    assert "`datasets` names its caches so" in caplog.text


def test_of_a_saved_dict_one_split_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train", "test", "german"):
        save_to_disk(tmp_path / "dict" / name, ["data.arrow"])
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test", "german"]}')
    assert listed(caplog, tmp_path / "dict") == ["train/data.arrow"]
    assert "2 files not read, the first is german/: other splits, which --split takes" in caplog.text
    assert listed(caplog, tmp_path / "dict", split="german") == ["german/data.arrow"]
    assert len(listed(caplog, tmp_path / "dict", split="all")) == 3
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["german"]}')
    assert listed(caplog, tmp_path / "dict") == ["german/data.arrow"], "there is no other"


# Inputs that are refused


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Places that give no text, or not the text that was asked for."""
    root = tmp_path_factory.mktemp("inputs")
    (root / "empty").mkdir()
    tree(root, "with_gone/a.txt", "left_out/d.zip", "a.txt", "flat/a.jsonl", "flat/a.jsonl.gz")
    for link in ("gone.txt", "with_gone/gone.txt"):
        (root / link).symlink_to(root / "nowhere")
    records(root, "split/validation.jsonl", "split/test.jsonl")
    save_to_disk(root / "short", ["data-0.arrow"])
    (root / "short/data-0.arrow").unlink()
    save_to_disk(root / "shuffled", ["data-0.arrow"], _indices_data_files=[{"filename": "indices.arrow"}])
    save_to_disk(root / "dict/german", ["data.arrow"])
    (root / "dict/dataset_dict.json").write_text('{"splits": ["test", "german"]}')
    return root


OTHER_SPLITS, TWICE = "like test, validation: give one as --split", "no new file in it: earlier inputs hold them all"
# inputs, the split, the place that the error names, what it says
REFUSED: list[tuple[list[str], str | None, str, str]] = [
    *(([name], None, name, "--input_path") for name in ("nowhere", "*.none", "empty", "gone.txt")),
    (["with_gone"], None, "with_gone/gone.txt", "--input_path"),
    (["left_out"], None, "left_out", "all files in it are left out"),
    *((["split"], split, "split", OTHER_SPLITS) for split in (None, "train", "german")),
    (["split/test.jsonl"], "test", "split/test.jsonl", "--split=test selects files of a folder"),
    (["short"], None, "short/state.json", "names data-0.arrow, which is not there"),
    (["shuffled"], None, "shuffled/state.json", "--hf_dataset="),
    (["dict"], None, "dict", "it has no split 'train', but german, test: give one as --split"),
    (["flat", "flat/a.jsonl"], None, "flat/a.jsonl", TWICE),
    (["flat/", "flat/*.gz"], None, "flat/*.gz", TWICE),
    (["a.txt", "a.txt"], None, "a.txt", TWICE),
]


@pytest.mark.parametrize(("names", "split", "place", "words"), REFUSED, ids=range(len(REFUSED)))
def test_an_input_that_gives_no_text_is_refused_with_its_place(
    inputs: Path, names: list[str], split: str | None, place: str, words: str
) -> None:
    with pytest.raises(DataError) as error:
        list_files([str(inputs / name) for name in names], replace(ANY, split=split))
    assert error.value.path == inputs / place and words in str(error.value)


def test_the_running_python_has_megabytes_of_code_in_an_order_that_does_not_change(tmp_path: Path) -> None:
    files = standard_library_files()
    assert sum(file.size for file in files) > 2_000_000 and files == standard_library_files()
    assert {"argparse.py", "json/decoder.py"} <= {file.name for file in files}
    with pytest.raises(DataError, match=r"without its sources.*--input_path"):
        standard_library_files(tmp_path)


# The same text twice


def warned(caplog: pytest.LogCaptureFixture, *inputs: Path, selection: Selection = ANY) -> list[str]:
    caplog.clear()
    warn_of_copies(list_files([str(each) for each in inputs], selection))
    return caplog.messages


def write_records(path: Path, seed: int = 0) -> None:
    """Write 200 records in the format that the name says."""
    texts = [random.Random(seed + n).randbytes(300).hex() for n in range(200)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_bytes(packed(path.name, json_lines(texts)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.jsonl", "a.jsonl.gz"),
        ("train.jsonl", "train.parquet"),
        ("train-0.json.xz", "train-0.ndjson"),
        ("web.parquet", "web.txt"),
    ],
)
def test_one_name_with_two_known_endings_in_a_folder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, second: str
) -> None:
    write_records(tmp_path / "in" / first)
    write_records(tmp_path / "in" / second)
    write_records(tmp_path / "in/other.jsonl", 999)
    message = (
        f"1 file probably read twice, the first is {tmp_path}/in/{second}: {tmp_path}/in/{first} has the same name"
    )
    assert warned(caplog, tmp_path / "in") == [f"{message} before their endings. Leave one out."]
    assert len(warned(caplog, tmp_path / "in" / first, tmp_path / "in" / second)) == 1


def test_copies_under_other_names_and_in_other_folders_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.jsonl", "b.jsonl", "deeper/c.jsonl"):
        write_records(tmp_path / "in" / name)
    write_records(tmp_path / "in/d.jsonl", 999)
    names = f"{tmp_path}/in/b.jsonl: {tmp_path}/in/a.jsonl has the same size and content. Leave one out."
    assert warned(caplog, tmp_path / "in") == [f"2 files probably read twice, the first is {names}"]


def test_files_that_only_look_alike_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["part-0001.jsonl.gz", "part-0002.jsonl.gz", "v1.0.jsonl", "v1.1.jsonl", "x/part-0001.jsonl.gz"]
    for seed, name in enumerate(names):
        write_records(tmp_path / "in" / name, seed * 999)
    texts = {name: f"This is the text of {name:9}" for name in ("a.py", "a.pyi", "README.md", "one.txt", "two.txt")}
    texts |= {"__init__.py": "", "x/__init__.py": "", "large.txt": "a" * 10**6, "like.txt": "a" * (10**6 - 1) + "b"}
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    assert not warned(caplog, tmp_path / "in")
    assert not warned(caplog, tmp_path / "in", selection=Selection(("py", "pyi", "txt", "md", "jsonl")))


def test_prepare_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_records(tmp_path / "in/a.jsonl")
    write_records(tmp_path / "in/a.jsonl.gz")
    main(["prepare", f"--input_path={tmp_path}/in", f"--output_path={tmp_path}/out", "--vocab_size=300"])
    assert sum("probably read twice" in message for message in caplog.messages) == 1
