"""Paths and files that others have made, or broken.

Every command ends at once, with one error that names the path.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from training_runs import TINY, write_two_datasets
from unit.checkpoint.checkpoint_files import SHAPES, manifest_of, tensors_of, write_sharded

import pretraining.tools.export
import pretraining.tools.import_weights
import pretraining.tools.inspect
import pretraining.tools.list_checkpoints
import pretraining.tools.prepare.prepare
import pretraining.tools.verify
import pretraining.train.run  # noqa: F401  loaded here: another user may not read where they are
from pretraining.checkpoint import lease
from pretraining.checkpoint.lease import LEASE
from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.run_folder import CHECKPOINTS
from pretraining.cli import main
from pretraining.config.recipes import RUN_CONFIG_FILE
from pretraining.data.tokenizer import train_tokenizer
from pretraining.files import DEEPEST_JSON
from pretraining.model.hf import CONFIG_FILE, config_document
from pretraining.tools import doctor
from pretraining.train.run_status import STATUS_FILE

NOBODY = 65534

DEEP = "[" * 100_000
ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{n + 1}: &a{n + 1} {{b: *a{n}, c: *a{n}}}" for n in range(40))])

SMALL = [*TINY, "num_steps=1"]
COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "train, data": lambda path, good: ["train", *SMALL, f"--data_path={path}", f"--ckpt_save_path={good}/run"],
    "train, run": lambda path, good: ["train", *SMALL, "--use_dummy_dataset", f"--ckpt_save_path={path}"],
    "train, start": lambda path, good: [
        *("train", *SMALL, "--use_dummy_dataset", f"--ckpt_save_path={good}/run", f"--ckpt_load_path={path}")
    ],
    "train, recipe": lambda path, good: ["train", *SMALL, "--use_dummy_dataset", f"--recipe={path}/a.yaml"],
    "train, tokenizer": lambda path, good: [
        *("train", *SMALL, "--use_dummy_dataset", f"--ckpt_save_path={good}/run", f"--tokenizer_path={path}")
    ],
    "train, index": lambda path, good: [
        *("train", *SMALL, f"--data_path={good}/data", f"--ckpt_save_path={good}/run", f"--index_path={path}")
    ],
    "prepare, input": lambda path, good: ["prepare", f"--input_path={path}", f"--output_path={good}/out"],
    "prepare, output": lambda path, good: ["prepare", f"--input_path={good}/a.txt", f"--output_path={path}"],
    "inspect": lambda path, good: ["inspect", "--step=1", f"--ckpt_load_path={path}"],
    "list": lambda path, good: ["list", f"{path}"],
    "export": lambda path, good: ["export", f"{path}", f"--output_path={good}/exported"],
    "import": lambda path, good: ["import", f"{path}", f"--ckpt_save_path={good}/run"],
    "verify, checkpoint": lambda path, good: ["verify", f"{path}"],
    "verify, data": lambda path, good: ["verify", f"--data_path={path}"],
    "doctor": lambda path, good: ["doctor", f"--disk_path={path}"],
}


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one error that a command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    said = capsys.readouterr()
    assert ending.value.code == 1 and said.err.count("error:") == 1
    return said.err[said.err.index("error:") :]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a text, a tokenizer, and a run of one checkpoint."""
    folder = tmp_path_factory.mktemp("template")
    write_two_datasets(folder / "data")
    (folder / "a.txt").write_text("a text\n" * 100)
    (folder / "tokenizer").mkdir()
    train_tokenizer(["a text"], 300).save(folder / "tokenizer")
    checkpoint = folder / "good_run" / CHECKPOINTS / "step_3_ckp"
    write_sharded(checkpoint, tensors_of(SHAPES["plain"]), manifest_of(SHAPES["plain"]), processes=1)
    return folder


@pytest.fixture
def good(template: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the template, to be spoilt."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    yield tmp_path
    if dist.is_initialized():  # a start that fails leaves that to the end of its process
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def quick_doctor() -> Iterator[None]:
    """The doctor measures a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(doctor.MATMUL_SIZE, "cpu", 32)
        patch.setitem(doctor.COPY_BYTES, "cpu", 2**20)
        patch.setattr(doctor, "BUDGET_SECONDS", 0.001)
        yield


@pytest.fixture(scope="module")
def imported(template: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every command has been called: what it imports is there for a process that may not read where it comes from."""
    import encodings.idna  # noqa: F401  # of host names

    folder = tmp_path_factory.mktemp("imported")
    shutil.copytree(template, folder, dirs_exist_ok=True)
    for command in COMMANDS.values():
        with suppress(SystemExit):
            main(command(folder / "missing" / "x", folder))
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def somebodys(good: Path, imported: None) -> Iterator[Path]:
    """A folder that the process may not look into."""
    folder = good / "somebodys"
    shutil.copytree(good / "good_run", folder / "x")
    folder.chmod(0)
    was_root = os.geteuid() == 0
    if was_root:  # who may look everywhere
        for each in (good, *good.parents):
            if each.stat().st_uid == 0 and Path(tempfile.gettempdir()) in each.parents:
                each.chmod(0o711)
        os.chown(good, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if was_root:
            os.seteuid(0)
        folder.chmod(0o700)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_another_user_is_named(command: str, somebodys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(COMMANDS[command](somebodys / "x", somebodys.parent), capsys)
    assert str(somebodys) in error and "Permission denied" in error


@pytest.mark.parametrize(
    "command", sorted(COMMANDS.keys() - {"doctor"})
)  # which asks as others do, and measures for long
@pytest.mark.parametrize("kind", ["300 characters", "a pipe"])
def test_a_path_that_cannot_be_a_folder_is_named(
    command: str, kind: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = good / ("x" * 300 if kind == "300 characters" else "strange")
    if kind == "a pipe":
        os.mkfifo(path)
    assert str(path) in error_of(COMMANDS[command](path, good), capsys)


def pipe_in_place_of(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PLACES: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "a shard": ("good_run/**/*.safetensors", lambda good: ["verify", f"{good}/good_run"]),
    "token file": (
        "data/first/*.arrow",
        lambda good: ["train", *SMALL, f"--data_path={good}/data", f"--ckpt_save_path={good}/run"],
    ),
    "recipe": ("a.yaml", lambda good: ["train", *SMALL, "--use_dummy_dataset", f"--recipe={good}/a.yaml"]),
    "tokenizer": (
        "tokenizer/tokenizer.json",
        lambda good: ["prepare", f"--input_path={good}/a.txt", f"--tokenizer_path={good}/tokenizer", "--dataset=a"],
    ),
}
"""A file, and the command that reads it."""


@pytest.mark.parametrize("place", PLACES)
def test_a_path_that_is_no_file_is_named_at_once(place: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern, command = PLACES[place]
    (good / "a.yaml").touch()
    path = next(good.glob(pattern))
    pipe_in_place_of(path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ending:
        main(command(good))
    said = capsys.readouterr()
    assert ending.value.code == 1 and said.err.count("error:") == 1
    assert str(path) in said.out + said.err


def test_a_manifest_that_is_a_pipe_is_damage(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe_in_place_of(next((good / "good_run").rglob(MANIFEST)))
    main(["list", str(good / "good_run")])
    assert "damaged" in capsys.readouterr().out


# Files to be parsed


def in_config(good: Path, content: str) -> list[str]:
    folder = good / "hf"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(content)
    return ["import", str(folder), f"--ckpt_save_path={good}/run"]


def in_index(good: Path, content: str) -> list[str]:
    command = in_config(good, json.dumps(config_document(SHAPES["plain"], "float32", 32, None, None)))
    (good / "hf" / "model.safetensors.index.json").write_text(content)
    return command


def in_header(good: Path, content: str) -> list[str]:
    command = in_config(good, json.dumps(config_document(SHAPES["plain"], "float32", 32, None, None)))
    header = content.encode()
    (good / "hf" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return command


def in_manifest(good: Path, content: str) -> list[str]:
    next((good / "good_run").rglob(MANIFEST)).write_text(content)
    return ["export", str(good / "good_run"), f"--output_path={good}/exported"]


def in_recipe(good: Path, content: str) -> list[str]:
    (good / "a.yaml").write_text(content)
    return ["train", *SMALL, "--use_dummy_dataset", f"--recipe={good}/a.yaml"]


def in_tokenizer(good: Path, content: str) -> list[str]:
    (good / "tokenizer.json").write_text(content)
    return ["prepare", f"--input_path={good}/a.txt", f"--tokenizer_path={good}", f"--output_path={good}/out"]


@pytest.mark.parametrize("place", [in_config, in_index, in_header, in_manifest, in_tokenizer])
@pytest.mark.parametrize(
    "content",
    [DEEP, "[" * (DEEPEST_JSON + 40) + "]" * (DEEPEST_JSON + 40), '{"a": "\\ud800"}'],
    ids=["lists", "closed lists", "half a pair"],
)
def test_deep_json_is_one_error(
    place: Callable[[Path, str], list[str]], content: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(good) in error_of(place(good, content), capsys)


def test_yaml_with_exponential_aliases_is_one_error(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (ALIASES, "a: &a [*a]", "# nothing\n" * 200_000):
        assert str(good / "a.yaml") in error_of(in_recipe(good, content), capsys)
    main(["list", str(good / "good_run")])  # the settings in a manifest are read only where they are needed


@pytest.mark.parametrize("content", [DEEP, '{"a": "\\ud800"}'], ids=["deep", "half a pair"])
@pytest.mark.parametrize("name", [STATUS_FILE, LEASE, "logs/metrics.jsonl", RUN_CONFIG_FILE])
def test_damaged_notes_of_a_run_do_not_prevent_its_start(
    name: str, content: str, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = good / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text(content + "\n")
    os.utime(path, (0, 0))  # long ago
    monkeypatch.setattr(lease, "STALE_SECONDS", 1)
    main(["train", *SMALL, "--use_dummy_dataset", f"--ckpt_save_path={good}/run"])
    assert json.loads((good / "run" / STATUS_FILE).read_text())["status"] == "finished"


# Models that nobody has


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 2**60}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"hidden_size": -16}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"hidden_act": "x" * 10**6}, "hidden_act"),
    ],
)
def test_absurd_sizes_are_refused_before_a_model_is_built(
    entries: dict[str, object], named: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = config_document(SHAPES["plain"], "float32", 32, None, None) | entries
    error = error_of(in_config(good, json.dumps(document)), capsys)
    assert named in error and str(good) in error and len(error) < 2000


@pytest.mark.parametrize("flag", ["num_hidden_layers=1000000000", "hidden_size=1e12", "vocab_size=1e18"])
def test_flags_have_the_bounds_of_a_downloaded_model(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(["train", "--use_dummy_dataset", f"--{flag}"], capsys)
    assert f"{flag.partition('=')[0]}=" in error


def test_a_manifest_with_absurd_sizes_is_damage(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((good / "good_run").rglob(MANIFEST)).parent
    manifest = manifest_of(SHAPES["plain"])
    manifest.model["num_hidden_layers"] = 10**9
    (path / MANIFEST).write_text(json.dumps(manifest.document()))
    with pytest.raises(SystemExit):
        main(["verify", str(path)])
    assert "num_hidden_layers=1000000000" in capsys.readouterr().out
