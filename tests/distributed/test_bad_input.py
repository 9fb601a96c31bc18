"""A user's mistake is one message, a non-zero exit of every process, no traceback and no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_runs import train_each
from training_runs import TINY, train_runs, write_dataset, write_two_datasets

from pretraining.cli import main


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets good and bad, and a finished run of another model."""
    root = tmp_path_factory.mktemp("bad_input")
    write_two_datasets(root / "data")
    write_dataset(root / "empty" / "first", documents=0)
    train_runs(1, root / "data", [["num_steps=1", f"ckpt_save_path={root / 'finished'}"]])
    (root / "a_file").write_text("in the way")
    return root


# Flags on top of a good command line, and what the one message has to name.
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown flag": (["--learning_rat=1"], ["learning_rat", "learning_rate"]),
    "settings that contradict": (["--global_batch_size=8", "--grad_accum_steps=9"], ["grad_accum_steps"]),
    "a missing folder": (["--data_path={root}/nowhere"], ["{root}/nowhere"]),
    "an empty dataset": (["--data_path={root}/empty"], ["'first'"]),
    "samples longer than the data": (["--seq_length=100000"], ["seq_length", "100,001"]),
    "no place to write": (["--ckpt_save_path={root}/a_file/run"], ["{root}/a_file/run", "--ckpt_save_path"]),
    "a checkpoint of another model": (["--ckpt_save_path={root}/finished", "--hidden_size=64"], ["hidden_size: 32"]),
    "a checkpoint of other data": (["--ckpt_save_path={root}/finished", "--seed=1"], ["seed", "2023"]),
    "a load path without a checkpoint": (["--ckpt_load_path={root}/data"], ["--ckpt_load_path={root}/data"]),
    "groups that do not divide": (["--sharding_strategy=hsdp", "--hsdp_group_size=3"], ["--hsdp_group_size"]),
    "ranks that do not divide": (
        ["--context_parallel_size=3", "--seq_length=36"],
        ["--context_parallel_size=3", "divisor"],
    ),
    "a sequence that does not divide": (
        ["--context_parallel_size=2", "--seq_length=30"],
        ["--seq_length=30 / (2 x --context_parallel_size=2) = 7.5", "such as 28"],
    ),
    "a model that cannot fit": (
        ["--model_variant=70b", "--num_hidden_layers=4000", "--hidden_size=8192", "--num_attention_heads=64"],
        ["--model_variant=", "--ignore_memory=true"],
    ),
    "a tokenizer that is not there": (["--tokenizer_path={root}/nowhere"], ["{root}/nowhere"]),
}


def command_line(root: Path, flags: list[str]) -> list[str]:
    """A command line that would train, with a mistake at its end."""
    good = [f"--{override}" for override in TINY]
    good += [f"--data_path={root / 'data'}", "--num_steps=3", f"--ckpt_save_path={root / 'run'}"]
    mistake = [flag.format(root=root) for flag in flags]
    names = {flag.partition("=")[0] for flag in mistake}
    return [flag for flag in good if flag.partition("=")[0] not in names] + mistake


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_code_1(name: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, fragments = MISTAKES[name]
    kinds = [[], ["--dry_run=true"]] if name != "no place to write" else [[]]  # a dry run writes nothing
    for also in kinds:
        with pytest.raises(SystemExit) as ending:
            main(["train", *command_line(workplace, flags), *also])
        said = capsys.readouterr().err
        assert ending.value.code == 1 and "Traceback" not in said and said.count("error:") == 1, said
        assert all(fragment.format(root=workplace) in said for fragment in fragments), said


@pytest.mark.thorough
def test_bad_input_stops_every_process_and_one_prints_the_error(workplace: Path) -> None:
    ended = train_each([(command_line(workplace, flags), []) for flags, _ in MISTAKES.values()])
    for (name, (_, fragments)), ranks in zip(MISTAKES.items(), ended, strict=True):
        said = "".join(each.stderr for each in ranks)
        assert [each.status for each in ranks] == [1, 1], name
        assert "Traceback" not in said and said.count("error:") == 1, said
        assert all(fragment.format(root=workplace) in said for fragment in fragments), said
