"""A user's mistake is one message, a non-zero exit of every process, no traceback and no hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked
from helpers import free_ports
from training_runs import TINY, train_runs, write_dataset

from pretraining.cli import main

WORKER = Path(__file__).with_name("bad_input_worker.py")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets good and bad, and a finished run of another model."""
    root = tmp_path_factory.mktemp("bad_input")
    write_dataset(root / "data" / "first")
    write_dataset(root / "data" / "second", documents=200, seed=1)
    write_dataset(root / "empty" / "first", documents=0)
    (root / "no_files" / "first").mkdir(parents=True)
    train_runs(1, root / "data", [["num_steps=1", f"ckpt_save_path={root / 'finished'}"]])
    (root / "a_file").write_text("in the way")
    return root


# Flags on top of a good command line, and what the one message has to say: what, where, and what to do.
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown flag": (["--learning_rat=1"], ["learning_rat", "learning_rate"]),
    "wrong type": (["--seq_length=long"], ["--seq_length", "long"]),
    "two run lengths": (["--num_steps=5", "--max_tokens=1M"], ["num_steps", "max_tokens"]),
    "heads that do not divide": (["--num_attention_heads=3"], ["num_attention_heads", "32", "3"]),
    "weights without their datasets": (["--datasets=first,second", "--weights=1,2,3"], ["weights", "3", "2"]),
    "a missing folder": (["--data_path={root}/nowhere"], ["{root}/nowhere", "not a folder"]),
    "a missing dataset": (["--datasets=frist"], ["frist", "first"]),
    "an empty dataset": (["--data_path={root}/empty"], ["'first'", "empty"]),
    "a dataset without files": (["--data_path={root}/no_files", "--datasets=first"], ["'first'", "*.arrow"]),
    "samples longer than the data": (["--seq_length=100000"], ["seq_length", "100,001"]),
    "no place to write": (["--ckpt_save_path={root}/a_file/run"], ["{root}/a_file/run", "--ckpt_save_path"]),
    "a checkpoint of another model": (
        ["--ckpt_save_path={root}/finished", "--hidden_size=64"],
        ["another model", "hidden_size: 32 in the checkpoint, 64 in this run"],
    ),
    "a checkpoint of other data": (
        ["--ckpt_save_path={root}/finished", "--seed=1"],
        ["seed", "2023"],
    ),
    "a load path without a checkpoint": (["--ckpt_load_path={root}/data"], ["--ckpt_load_path={root}/data"]),
    "groups that do not divide": (
        ["--sharding_strategy=hsdp", "--hsdp_group_size=3"],
        ["--hsdp_group_size", "divisor"],
    ),
    "a model that cannot fit": (
        ["--model_variant=70b", "--num_hidden_layers=4000", "--hidden_size=8192", "--num_attention_heads=64"],
        ["the model cannot fit", "What would fit: --model_variant=", "--ignore_memory=true"],
    ),
    "a tokenizer that is not there": (["--tokenizer_path={root}/nowhere"], ["{root}/nowhere"]),
    "a missing recipe": (["--recipe={root}/nowhere.yaml"], ["{root}/nowhere.yaml"]),
    "nothing held out long enough": (["--held_out_fraction=1e-6"], ["held_out_fraction"]),
}


def command_line(root: Path, flags: list[str]) -> list[str]:
    """A command line that would train, with a mistake at its end."""
    good = [f"--{override}" for override in TINY]
    good += [f"--data_path={root / 'data'}", "--num_steps=3", f"--ckpt_save_path={root / 'run'}"]
    mistake = [flag.format(root=root) for flag in flags]
    names = {flag.partition("=")[0] for flag in mistake}
    return [flag for flag in good if flag.partition("=")[0] not in names] + mistake


def assert_one_error(stderr: str, fragments: list[str], root: Path) -> None:
    """One message that names what is wrong, and nothing of Python's."""
    assert "Traceback" not in stderr
    assert stderr.count("error:") == 1, stderr
    for fragment in fragments:
        assert fragment.format(root=root) in stderr


@pytest.mark.parametrize("also", [[], ["--dry_run=true"]], ids=["start", "dry_run"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_status_one(
    name: str, also: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, fragments = MISTAKES[name]
    with pytest.raises(SystemExit) as ending:
        main(["train", *command_line(workplace, flags), *also])
    assert ending.value.code == 1
    assert_one_error(capsys.readouterr().err, fragments, workplace)


@pytest.mark.thorough
def test_every_process_of_a_job_ends_and_one_speaks(workplace: Path) -> None:
    lines = [command_line(workplace, flags) for flags, _ in MISTAKES.values()]
    jobs = json.dumps(list(zip(free_ports(len(lines)), lines, strict=True)))
    done = run_forked(WORKER, 2, [jobs])
    for number, name in enumerate(MISTAKES):
        for rank in (0, 1):
            assert f"mistake {number} rank {rank} status 1" in done.stdout, name
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == len(MISTAKES)
    for name, (_, fragments) in MISTAKES.items():
        for fragment in fragments:
            assert fragment.format(root=workplace) in done.stderr, name
