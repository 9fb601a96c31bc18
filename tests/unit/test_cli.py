from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT, run_command
from training_runs import TINY, VOCABULARY, write_two_datasets
from unit.data.token_files import loader, plan, rows

from pretraining import __version__
from pretraining.checkpoint.manifest import Manifest
from pretraining.cli import COMMANDS, HEAD_START, main
from pretraining.config.command_line import read_words
from pretraining.config.fields import settings_of
from pretraining.config.read import check_config, load_train_config
from pretraining.config.recipe_files import dump_config
from pretraining.config.rules import find_problems
from pretraining.config.training import TrainConfig
from pretraining.config.values import limit_problem, parse_value
from pretraining.config.variants import resolve_shape
from pretraining.errors import Preempted
from pretraining.tools import demo
from pretraining.tools.command_settings import ImportConfig, PrepareConfig


def test_help_explains_commands_and_every_flag_of_one_or_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, flags in (
        (["help", "train"], "--learning_rate --recipe"),
        (["prepare", "-h"], "--input_path"),
        (["train", "--help=schedule"], "--warmup_steps"),
        (["--help"], "prepare translate"),
        ([], "prepare translate"),
        (["--version"], f"{__version__} torch Python"),
    ):
        main(arguments)
        out = capsys.readouterr().out
        assert all(flag in out for flag in flags.split())


def test_values_reach_the_settings_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    # fire alone would read 12345e67 as a float and `false` as a true string, and accept a misspelt flag.
    with pytest.raises(SystemExit):
        main(["train", "--use_dummy_dataset=false", "--data_path=12345e67", "--weigths=1", "--hidden_size=12345e67"])
    error = capsys.readouterr().err
    assert "weights" in error and "--hidden_size=12345e67" in error and "--data_path" not in error


def start_as(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables that torchrun sets for a process."""
    values = {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    values |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("ranks", "prefix"), [(1, "error: "), (2, "error: rank 1: ")])
def test_a_file_system_error_about_a_path_is_one_error(
    ranks: int, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", b"/a/b")

    start_as(ranks - 1, ranks, monkeypatch)
    monkeypatch.setattr("pretraining.cli.translate", refused)
    monkeypatch.setattr(os, "_exit", sys.exit)  # one of several processes
    with pytest.raises(SystemExit) as ending:
        main(["train"])
    assert ending.value.code == 1 and capsys.readouterr().err.startswith(f"{prefix}/a/b: ")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()  # a start in a folder that is gone
    with pytest.raises(SystemExit) as ending:
        main(["plan"])
    assert ending.value.code == 1 and capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(24, "Too many open files"), None), (KeyboardInterrupt(), 130)], ids=repr
)
def test_an_interrupt_has_its_exit_code_and_an_error_without_a_path_keeps_its_traceback(
    error: BaseException, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("pretraining.cli.translate", fail)
    with pytest.raises((OSError, SystemExit)) as ending:
        main(["train"])
    assert getattr(ending.value, "code", None) == code


def test_a_silent_process_exits_after_the_one_that_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[tuple[int, float]] = []
    for rank in (0, 1):
        start_as(rank, 2, monkeypatch)
        monkeypatch.setattr("pretraining.cli.time.sleep", lambda seconds, rank=rank: pauses.append((rank, seconds)))
        with pytest.raises(SystemExit):
            main(["train", "--nonsense=1"])
    assert pauses == [(1, HEAD_START)]


def test_inspect_reads_settings_and_batch_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_two_datasets(tmp_path / "data")
    config = load_train_config([*TINY, f"data_path={data}", "datasets=first,second", "weights=3,1", "batch_size=2"])
    with loader(config.data, plan(6), seed=config.run.seed, vocab_size=VOCABULARY) as training:
        batches = [rows(next(training)) for _ in range(4)]
        state = training.state_dict()
    model = asdict(resolve_shape(config.model))
    manifest = Manifest(step=4, data=state, global_batch_size=6, model=model, config=dump_config(config))
    checkpoint = tmp_path / "run/checkpoints/step_4_ckp"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest.document()))
    (tmp_path / "run/config.yaml").write_text(manifest.config)
    capsys.readouterr()  # the datasets were indexed
    for source in (
        [f"{tmp_path}/run"],  # as list, verify and report take it
        [f"--recipe={tmp_path}/run/config.yaml", f"--ckpt_save_path={tmp_path}/run"],  # the run to resume
    ):
        for step in (1, 4):
            main(["inspect", *source, f"--step={step}", "--tokens", "--json"])
            lines = capsys.readouterr().out.splitlines()
            assert [json.loads(line)["ids"] for line in lines] == batches[step - 1]
    with pytest.raises(SystemExit):
        main(["inspect", f"--ckpt_load_path={tmp_path}/run", "--step=1", "--seq_length=8"])
    assert "seq_length was 32 and is 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--help=shedule"], "schedule?"),
        (["trian"], "'trian'"),
        (["foo", "-h"], "foo"),
        (["list"], "--run_path"),
        (["export", "nowhere", "--output_path=out", "--max_shard_size=big"], "--max_shard_size=big"),
        (["import", "./nowhere", "--ckpt_save_path=runs/a"], "nowhere/config.json"),
        (["inspect", "--use_dummy_dataset", "--model_variant=tiny", "--stepp=2"], "step?"),
        (["inspect", "nowhere", "--step=1"], "--ckpt_load_path=nowhere"),
        (["inspect", "nowhere", "--ckpt_load_path=elsewhere", "--step=1"], "two values for ckpt_load_path"),
        (["list", "nowhere", "-", "--json"], "'-'"),
        (["list", "nowhere", "--=3"], "'--=3'"),
        (["verify"], "--data_path"),
        (["verify", "a", "--data_path=b"], "--data_path"),
        (["verify", "a", "--vocab_size=3"], "--vocab_size"),
        (["verify", "nowhere", "elsewhere"], "'elsewhere'"),
    ],
)
def test_an_impossible_command_is_one_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(tmp_path), pytest.raises(SystemExit) as ending:
        main(arguments)
    error = capsys.readouterr().err
    assert ending.value.code == 1 and message in error and error.count("error:") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_command_shows_the_credentials_of_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, address = f"--ckpt_save_path={tmp_path / 'run'}", "s3://KEY:SECRET@bucket/run?token=SECRET"
    flags = ("ckpt_mirror_path", "ckpt_load_path", "resume_from_checkpoint", "tokenizer_path", "recipe", "num_steps")
    for command in (
        *([name, address] for name in COMMANDS),
        *(["train", *TINY, run, f"--{flag}={address}"] for flag in flags),
        ["verify", f"--data_path={address}"],
        ["push", str(tmp_path), address],
        ["export", str(tmp_path), f"--output_path={address}"],
        ["plan", "--gpu=h100", f"--ckpt_load_path={address}"],
    ):
        with pytest.raises(SystemExit) as ending:
            main(command)
        assert ending.value.code, command
    assert "SECRET" not in "".join(capsys.readouterr()) and not (tmp_path / "run").exists()


def test_names_that_are_not_utf_8_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_two_datasets(tmp_path / "data") / "first"
    for path in folder.glob("*.arrow"):
        path.rename(folder / os.fsdecode(b"tok\xffens.arrow"))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8", errors="strict"))
    main(["inspect", f"data_path={tmp_path / 'data'}", "datasets=first", "step=1", *TINY])
    sys.stdout.flush()
    assert b"first/tok\xffens.arrow  row" in printed.getvalue()


LOADED = """
import json, sys
from pretraining.cli import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit:
        pass
    known = ("fire", "numpy", "pyarrow", "rich", "sympy", "tensorboard", "torch")
    print(json.dumps([name for name in known if name in sys.modules]), file=sys.stderr)
"""


def test_quick_commands_do_not_import_slow_packages(tmp_path: Path) -> None:
    """PyTorch takes seconds: neither flags, a list of checkpoints, a plan, a report nor the text of a step needs it."""
    shutil.copytree(ROOT / "tests" / "golden" / "run", tmp_path, dirs_exist_ok=True)
    run = tmp_path / "sharded"
    commands = {
        "train --help": [],
        "train --nonsense=1": ["fire"],
        f"list --run_path={run}": ["fire"],
        "plan --model_variant=70b --gpus=1024 --search=true": ["fire"],
        f"inspect --ckpt_load_path={run} --data_path={tmp_path}/data --step=9": ["fire", "numpy", "pyarrow"],
        f"report {run}": ["fire", "numpy", "pyarrow"],
    }
    result = run_command([sys.executable, "-c", LOADED, *commands], check=False)
    found = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("[")]
    assert found == list(commands.values())


def test_a_run_at_its_time_limit_notifies_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(given: object) -> None:
        raise ending

    monkeypatch.setitem(COMMANDS, "train", replace(COMMANDS["train"], function="own_commands:end"))
    monkeypatch.setitem(sys.modules, "pretraining.own_commands", SimpleNamespace(end=end))
    monkeypatch.setenv("PRETRAINING_TIME_IS_OVER", str(tmp_path / "note"))
    for is_out_of_time in (False, True):
        ending = Preempted("Preempted at step 3")
        ending.is_out_of_time = is_out_of_time
        with pytest.raises(SystemExit) as ended:
            main(["train"])
        assert ended.value.code == 75 and (tmp_path / "note").exists() is is_out_of_time


def test_a_guide_without_prepared_data_is_an_error_with_the_command_that_prepares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No Hub is asked for a model called "data"."""
    monkeypatch.chdir(tmp_path)
    shape = {"d_model": 32, "n_heads": 2, "n_layers": 1, "num_epochs": 3, "dataset_name": "someone/corpus"}
    Path("guide.json").write_text(json.dumps(shape))
    with pytest.raises(SystemExit):
        main(["train", "guide.json"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "  pretrain prepare --hf_dataset=someone/corpus --output_path=data"


# Rules for the settings of other commands


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PrepareConfig(input_path=("/texts/books/",)), "books"),
        (PrepareConfig(input_path=("wiki.jsonl.gz",)), "wiki"),
        (PrepareConfig(input_path=("a", "b"), dataset="both"), "both"),
        (PrepareConfig(hf_dataset="someone/web-text"), "web-text"),
    ],
)
def test_the_dataset_is_named_after_its_input(config: PrepareConfig, name: str) -> None:
    check_config(config)
    assert config.dataset_name == name


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (PrepareConfig(), "input_path"),
        (PrepareConfig(input_path=("a",), source="stdlib"), "input_path"),
        (PrepareConfig(source="stdlib", tokenizer_path="t", vocab_size=300), "vocab_size"),
        (PrepareConfig(input_path=("a", "b")), "dataset"),
        (PrepareConfig(input_path=("a/*.txt",)), "dataset"),
        (PrepareConfig(input_path=("a",), dataset="x/y"), "dataset"),
        (PrepareConfig(source="stdlib", hf_config="en"), "hf_config"),
        (ImportConfig(input_path="a", ckpt_save_path=""), "ckpt_save_path"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config: Any, named: str) -> None:
    [problem] = find_problems(config)
    assert problem.names[0] == named


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_of_a_command_is_an_address_only_if_declared(command: str) -> None:
    for setting in filter(lambda setting: setting.is_path, settings_of(COMMANDS[command].settings).values()):
        if setting.may_be_address:
            assert parse_value(setting, "s3://bucket/x") in ("s3://bucket/x", ("s3://bucket/x",))
            with pytest.raises(ValueError, match="an address begins with s3://"):
                parse_value(setting, "s3:/bucket/x")
            continue
        with pytest.raises(ValueError, match="this setting takes no address"):
            parse_value(setting, "s3://bucket/x")
        assert limit_problem(setting, ("s3:/b",) if setting.many else "s3:/b")  # as Path normalizes it
        parse_value(setting, "./s3:/x")


# The demo of train.sh: which command lines mean it


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of train.sh."""
    monkeypatch.setenv("PRETRAINING_DEMO", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [["--config", "my.yaml"], ["num_steps=5", "model.model_variant=tiny"], ["cfg.yaml"], ["--data-path", "/data"]],
)
def test_a_recipe_data_or_a_model_in_any_spelling_is_not_the_demo(
    folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in ([], ["num_steps=5", "--Ckpt-Save-Path=data_path"], ["optimizer=sgdm", "train.max_steps=100"]):
        assert demo.settings_beside(read_words(TrainConfig, chosen))
    assert not demo.settings_beside(read_words(TrainConfig, words))
    monkeypatch.delenv("PRETRAINING_DEMO")
    assert not demo.settings_beside([])  # without train.sh


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), (-15, 75)])
def test_a_failed_preparation_exits_with_its_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code))
    with pytest.raises(SystemExit) as end:
        main(["train"])
    assert end.value.code == exit_code
