"""Paths and files that others have made, or broken.

Every command ends at once, with one error that names the path.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
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
from pretraining.checkpoint.run_folder import CHECKPOINTS, STATUS_FILE
from pretraining.cli import main
from pretraining.config.recipe_files import RUN_CONFIG_FILE
from pretraining.data.tokenizer import train_tokenizer
from pretraining.files import DEEPEST_JSON
from pretraining.model.hf import CONFIG_FILE, config_document
from pretraining.tools import doctor

NOBODY = 65534

DEEP = "[" * 100_000
ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{n + 1}: &a{n + 1} {{b: *a{n}, c: *a{n}}}" for n in range(40))])

SMALL = " ".join([*TINY, "num_steps=1"])
DUMMY = f"train {SMALL} --use_dummy_dataset"
TRAIN, INTO = f"train {SMALL} --data_path={{good}}/data", "--ckpt_save_path={good}/run"
COMMANDS = {
    "train, data": f"train {SMALL} --data_path={{path}} {INTO}",
    "train, run": f"{DUMMY} --ckpt_save_path={{path}}",
    "train, start": f"{DUMMY} {INTO} --ckpt_load_path={{path}}",
    "train, recipe": f"{DUMMY} --recipe={{path}}/a.yaml",
    "train, tokenizer": f"{DUMMY} {INTO} --tokenizer_path={{path}}",
    "train, index": f"{TRAIN} {INTO} --index_path={{path}}",
    "prepare, input": "prepare --input_path={path} --output_path={good}/out",
    "prepare, output": "prepare --input_path={good}/a.txt --output_path={path}",
    "inspect": "inspect --step=1 --ckpt_load_path={path}",
    "list": "list {path}",
    "export": "export {path} --output_path={good}/exported",
    "import": f"import {{path}} {INTO}",
    "verify, checkpoint": "verify {path}",
    "verify, data": "verify --data_path={path}",
    "doctor": "doctor --disk_path={path}",
}


def words_of(command: str, good: Path, path: Path | str = "") -> list[str]:
    return command.format(good=good, path=path).split()


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
    """A folder with data, a text, a recipe, a tokenizer, a Hugging Face folder, and a run of one checkpoint."""
    folder = tmp_path_factory.mktemp("template")
    write_two_datasets(folder / "data")
    (folder / "a.txt").write_text("a text\n" * 100)
    (folder / "a.yaml").touch()
    for name in ("tokenizer", "hf"):
        (folder / name).mkdir()
    (folder / "hf" / CONFIG_FILE).write_text(config_of())
    train_tokenizer(["a text"], 300).save(folder / "tokenizer")
    checkpoint = folder / "good_run" / CHECKPOINTS / "step_3_ckp"
    write_sharded(checkpoint, tensors_of(SHAPES["plain"]), manifest_of(SHAPES["plain"]), processes=1)
    return folder


def config_of(**entries: object) -> str:
    return json.dumps(config_document(SHAPES["plain"], "float32", 32, None, None) | entries)


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
        patch.setattr(doctor, "FILE_MIB", 1)
        yield


@pytest.fixture(scope="module")
def imported(template: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every command has been called: what it imports is there for a process that may not read where it comes from."""
    import encodings.idna  # noqa: F401  # of host names

    folder = tmp_path_factory.mktemp("imported")
    shutil.copytree(template, folder, dirs_exist_ok=True)
    for command in COMMANDS.values():
        with suppress(SystemExit):
            main(words_of(command, folder, folder / "missing" / "x"))
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
    error = error_of(words_of(COMMANDS[command], somebodys.parent, somebodys / "x"), capsys)
    assert str(somebodys) in error and "Permission denied" in error


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "doctor"])  # it measures for long
@pytest.mark.parametrize("kind", ["300 characters", "a pipe"])
def test_a_path_that_cannot_be_a_folder_is_named(
    command: str, kind: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = good / ("x" * 300 if kind == "300 characters" else "strange")
    if kind == "a pipe":
        os.mkfifo(path)
    assert str(path) in error_of(words_of(COMMANDS[command], good, path), capsys)


def pipe_in_place_of(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# A file, and the command that reads it.
PLACES = {
    "good_run/**/*.safetensors": "verify {good}/good_run",
    "data/first/*.arrow": f"{TRAIN} {INTO}",
    "a.yaml": f"{DUMMY} --recipe={{good}}/a.yaml",
    "tokenizer/tokenizer.json": "prepare --input_path={good}/a.txt --tokenizer_path={good}/tokenizer --dataset=a",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_path_that_is_no_file_is_named_at_once(place: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(good.glob(place))
    pipe_in_place_of(path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ending:
        main(words_of(PLACES[place], good))
    said = capsys.readouterr()
    assert ending.value.code == 1 and said.err.count("error:") == 1
    assert str(path) in said.out + said.err


def test_a_manifest_that_is_a_pipe_is_damage(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe_in_place_of(next((good / "good_run").rglob(MANIFEST)))
    main(["list", str(good / "good_run")])
    assert "damaged" in capsys.readouterr().out


IMPORT = f"import {{good}}/hf {INTO}"
PARSED = {
    "hf/config.json": IMPORT,
    "hf/model.safetensors.index.json": IMPORT,
    "hf/model.safetensors": IMPORT,
    "good_run/checkpoints/step_3_ckp/manifest.json": "export {good}/good_run --output_path={good}/exported",
    "tokenizer/tokenizer.json": PLACES["tokenizer/tokenizer.json"],
}


@pytest.mark.parametrize("place", PARSED)
@pytest.mark.parametrize(
    "content",
    [DEEP, "[" * (DEEPEST_JSON + 40) + "]" * (DEEPEST_JSON + 40), '{"a": "\\ud800"}'],
    ids=["lists", "closed lists", "half a pair"],
)
def test_deep_json_is_one_error(place: str, content: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = len(content).to_bytes(8, "little") if place == "hf/model.safetensors" else b""  # of its header
    (good / place).write_bytes(length + content.encode())
    assert str(good) in error_of(words_of(PARSED[place], good), capsys)


def test_yaml_with_exponential_aliases_is_one_error(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (ALIASES, "a: &a [*a]", "# nothing\n" * 200_000):
        (good / "a.yaml").write_text(content)
        assert str(good / "a.yaml") in error_of(words_of(PLACES["a.yaml"], good), capsys)
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
    main(words_of(f"{DUMMY} {INTO}", good))
    assert json.loads((good / "run" / STATUS_FILE).read_text())["status"] == "finished"


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
    (good / "hf" / CONFIG_FILE).write_text(config_of(**entries))
    error = error_of(words_of(IMPORT, good), capsys)
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
