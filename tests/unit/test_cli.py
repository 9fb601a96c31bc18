from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import ROOT, plain_environment

from pretraining.cli import main


def test_help_explains_every_flag_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    train = capsys.readouterr().out
    assert "--learning_rate" in train and "--sharding_strategy" in train and "--recipe" in train
    main(["prepare", "-h"])
    assert "--input_path" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "stream", "text"),
    [
        (["--help"], 0, "out", "pretrain prepare"),
        ([], 1, "err", "Commands:"),
        (["trian"], 1, "err", "unknown command 'trian'"),
    ],
)
def test_without_a_command_the_commands_are_listed(
    arguments: list[str], status: int, stream: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == status
    assert text in getattr(capsys.readouterr(), stream)


def test_values_reach_the_settings_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    # fire alone would make 12345e67 a float, `false` a true string, and let a misspelt flag through.
    with pytest.raises(SystemExit):
        main(["train", "--use_dummy_dataset=false", "--data_path=12345e67", "--weigths=1"])
    error = capsys.readouterr().err
    assert "weigths" in error and "weights" in error
    with pytest.raises(SystemExit):
        main(["train", "--use_dummy_dataset=false", "--data_path=12345e67", "--tracker=none", "--num_steps=1"])
    assert "12345e67 is not a folder" in capsys.readouterr().err


def test_interrupting_a_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pretraining.cli.load_train_config", interrupted)
    with pytest.raises(SystemExit) as ending:
        main(["train"])
    assert ending.value.code == 130 and "interrupted" in capsys.readouterr().err


def test_a_wrong_flag_is_said_without_loading_torch_and_by_the_first_process_only() -> None:
    program = (
        "import sys\nfrom pretraining.cli import main\n"
        "try:\n    main(['train', '--nonsense=1'])\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    layout = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    outputs = []
    for rank in ("0", "1"):
        place = {**layout, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": "29500"}
        command = [sys.executable, "-c", program]
        environment = plain_environment(place)
        outputs.append(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60))
    assert [output.returncode for output in outputs] == [1, 1]
    assert [output.stdout.strip() for output in outputs] == ["False", "False"]
    assert "nonsense" in outputs[0].stderr and outputs[1].stderr == ""


def test_before_processes_have_joined_each_node_speaks_for_itself() -> None:
    layout = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    said = []
    for rank, local_rank in (("2", "0"), ("3", "1")):  # the second node's
        place = {**layout, "RANK": rank, "LOCAL_RANK": local_rank, "MASTER_PORT": "29500"}
        command = [sys.executable, "main_training.py", "--recipe=/nowhere.yaml"]
        done = subprocess.run(
            command, cwd=ROOT, env=plain_environment(place), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        said.append(done.stderr.count("error:"))
    assert said == [1, 0]


def test_main_training_is_the_train_command() -> None:
    command = [sys.executable, "main_training.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("pretrain train")
