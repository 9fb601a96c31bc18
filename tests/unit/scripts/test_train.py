"""train.sh: which processes it starts, when it is the demo, and what goes in and out unchanged."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, heed_interrupts, plain_environment, run_command
from stand_in import WHOLE_BLOCK, StandIn

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import values_of

CHOICE = "--use_dummy_dataset=true"


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    made = StandIn(tmp_path)
    run_command(["bash", made.root / "scripts" / "setup.sh"], made.variables())
    return made


def train(
    stand_in: StandIn, *flags: str, check: bool = True, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train.sh", *flags]
    environment = stand_in.variables(**variables)
    return run_command(command, environment, check=check, cwd=cwd or stand_in.root)


def block_of(stand_in: StandIn) -> list[str]:
    """The flags of the block as it stands."""
    text = (stand_in.root / "scripts" / "train.sh").read_text()
    lines = re.findall(r"^    (--\S+)", text.partition("FLAGS=(\n")[2].partition("\n)\n")[0], re.MULTILINE)
    return [line.replace('"', "").replace("$root", str(stand_in.root)) for line in lines]


# The demo


def test_without_flags_the_demo_is_prepared_and_trained(stand_in: StandIn) -> None:
    train(stand_in)
    prepare, main, _ = stand_in.calls()
    assert prepare == f"pretrain prepare --source=stdlib --vocab_size=4096 --output_path={stand_in.root}/data/demo"
    assert main == " ".join(["main", *block_of(stand_in)])


def test_the_block_is_the_recipe_of_the_demo(stand_in: StandIn) -> None:
    block = [flag.removeprefix("--").replace(f"{stand_in.root}/", "") for flag in block_of(stand_in)]
    of_block, of_recipe = values_of(load_train_config(block)), values_of(load_train_config(["recipe=demo"]))
    differing = {name for name, value in of_recipe.items() if value != of_block[name]}
    assert differing == {"datasets", "weights"}  # one dataset, named and weighed for those who edit the block


def test_the_block_has_all_flags_of_the_system_that_it_is_for(stand_in: StandIn) -> None:
    names = {flag.removeprefix("--").partition("=")[0] for flag in block_of(stand_in)}
    assert names == {
        *("model_variant", "ckpt_load_path", "ckpt_save_path", "use_dummy_dataset", "data_path", "datasets", "weights"),
        *("seq_length", "sep_token", "logical_shards", "num_workers", "file_type", "col_name", "bos_token"),
        *("strip_tokens", "sharding_strategy", "hsdp_group_size", "tokenizer_path", "held_out_fraction"),
        *("eval_interval", "eval_batches", "mixed_precision", "mp_dtype", "fsdp_activation_checkpointing"),
        *("selective_checkpointing", "low_cpu_fsdp", "seed", "batch_size", "num_steps", "learning_rate"),
        *("use_profiler", "profiler_rank0_only", "report_interval", "checkpoint_interval", "use_torch_compile"),
        *("grad_clip_thresh", "training_stage", "tracker", "tracker_dir", "tracker_project_name", "tracker_run_id"),
        *("min_lr_ratio", "optimizer"),  # the demo's own choices
    }


def test_prepared_data_of_the_demo_is_used_again(stand_in: StandIn) -> None:
    done = stand_in.root / "data" / "demo" / "stdlib" / "prepare.json"
    done.parent.mkdir(parents=True)
    done.touch()
    train(stand_in)
    assert [call.split()[0] for call in stand_in.calls()] == ["main", "in"]


def test_other_flags_change_the_demo_and_win_over_its_own(stand_in: StandIn) -> None:
    train(stand_in, "num_steps=5", "--Schedule.Min-LR-Ratio=0.2", "--eos_token=3", "--ckpt_save_path=elsewhere")
    left = ("--num_steps", "--ckpt_save_path", "--sep_token", "--min_lr_ratio")
    block = [flag for flag in block_of(stand_in) if not flag.startswith(left)]
    given = "num_steps=5 --Schedule.Min-LR-Ratio=0.2 --eos_token=3 --ckpt_save_path=elsewhere"
    assert stand_in.calls()[1] == f"main {' '.join(block)} {given}"


def test_the_demo_stops_where_its_data_cannot_be_prepared(stand_in: StandIn) -> None:
    stand_in.add_program("pretrain", "#!/usr/bin/env bash\nexit 3\n")
    assert train(stand_in, check=False).returncode == 3
    assert stand_in.calls() == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--recipe=my.yaml"],
        ["--config", "my.yaml"],
        ["--data_path=/data"],
        ["--data-path", "/data"],
        ["data_path=/data"],
        ["--data.data_path=/data"],
        ["-data_path=/data"],
        ["--use_dummy_dataset"],
        ["num_steps=5", "model.model_variant=tiny"],
        ["cfg.yaml", "num_steps=5"],
        ["config/mine.py"],
    ],
)
def test_a_recipe_data_or_a_model_in_any_spelling_is_not_the_demo(stand_in: StandIn, flags: list[str]) -> None:
    done = train(stand_in, *flags)
    assert stand_in.calls()[0] == f"main {' '.join(flags)}"
    assert "the block of flags in train.sh, which is the demo, is left out" in done.stderr


@pytest.mark.parametrize("flags", [["--ckpt_save_path", "data_path"], ["--sample_prompt=data_path"]])
def test_a_value_that_looks_like_a_name_chooses_nothing(stand_in: StandIn, flags: list[str]) -> None:
    train(stand_in, *flags)
    assert stand_in.calls()[0].startswith("pretrain prepare")


def test_an_edited_block_is_taken_whatever_the_command_line_says_and_the_command_line_wins(stand_in: StandIn) -> None:
    stand_in.edit_block(WHOLE_BLOCK, '    --seed=1  # mine\n    --data_path=/data\n    "--sample_prompt=two  words"\n')
    done = train(stand_in, "--data_path=/other")
    assert stand_in.calls()[0] == "main --seed=1 --sample_prompt=two  words --data_path=/other"
    assert "left out" not in done.stderr and "demo" not in done.stderr


def test_one_edited_line_leaves_the_demo_of_the_others(stand_in: StandIn) -> None:
    stand_in.edit_block("--num_steps=600 ", "--num_steps=20 ")
    train(stand_in)
    prepare, main, _ = stand_in.calls()
    assert prepare.startswith("pretrain prepare") and "--num_steps=20" in main and "--model_variant=demo" in main


def test_an_empty_block_leaves_all_to_the_command_line(stand_in: StandIn) -> None:
    stand_in.edit_block(WHOLE_BLOCK, "")
    train(stand_in, "--seed=1")
    assert stand_in.calls()[0] == "main --seed=1"


def test_the_other_systems_block_may_be_pasted(stand_in: StandIn) -> None:
    pasted = (
        'MODEL_ARGS="\\\n--model_variant="7b"\n--sharding_strategy="HSDP"\n--use_dummy_dataset=False\n'
        '--weights="7725,500"\n--ckpt_save_path=/ckpt"'
    )
    stand_in.edit_block('MODEL_ARGS=""', pasted)
    train(stand_in, "--seed=1", MODEL_ARGS="not this")
    expected = "--model_variant=7b --sharding_strategy=HSDP --use_dummy_dataset=False --weights=7725,500"
    assert stand_in.calls()[0] == f"main {expected} --ckpt_save_path=/ckpt --seed=1"


def test_dotted_names_replace_the_blocks_flags_of_the_same_settings(stand_in: StandIn) -> None:
    names = ["optimizer.lr_config.lr=1.0", "train.max_steps=5", "checkpoint.save_path=x", "logging.wandb_project=p"]
    train(stand_in, "optimizer=sgdm", *names)
    given = next(call for call in stand_in.calls() if call.startswith("main ")).split()
    replaced = ("learning_rate", "num_steps", "ckpt_save_path", "tracker", "tracker_project_name")
    assert not [word for word in given if word.startswith(tuple(f"--{name}=" for name in replaced))]
    assert given[-5:] == ["optimizer=sgdm", *names]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_goes_to_the_program_at_once(stand_in: StandIn, flag: str) -> None:
    train(stand_in, flag, NPROC="4")
    assert stand_in.calls()[0] == f"main {flag}"


# Processes


def processes_of(stand_in: StandIn, variables: Mapping[str, str]) -> str:
    """The number of processes that torchrun is told, or "one" where it is not used."""
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train.sh", CHOICE]
    run_command(command, stand_in.variables(**variables))
    first = stand_in.calls()[0]
    if first.startswith("main"):
        return "one"
    return first.partition("--nproc-per-node=")[2].split()[0]


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({}, "one"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "one"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "one"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,5"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,5", "NPROC": "2"}, "2"),
        ({"NPROC": "2"}, "2"),
    ],
)
def test_one_process_a_gpu_unless_told_otherwise(stand_in: StandIn, variables: dict[str, str], processes: str) -> None:
    assert processes_of(stand_in, variables) == processes


@pytest.mark.parametrize(("listing", "processes"), [("GPU 0: A\nGPU 1: A\n  MIG 1g: B", "2"), ("", "one")])
def test_without_a_choice_of_devices_the_driver_says_how_many(stand_in: StandIn, listing: str, processes: str) -> None:
    stand_in.add_program("nvidia-smi", f"#!/usr/bin/env bash\nprintf '{listing}\\n'\n")
    script = stand_in.root / "scripts" / "train.sh"
    script.write_text(
        script.read_text().replace("set -euo pipefail\n", "set -euo pipefail\nunset CUDA_VISIBLE_DEVICES\n", 1)
    )
    assert processes_of(stand_in, {}) == processes


def test_several_processes_are_torchruns(stand_in: StandIn) -> None:
    train(stand_in, CHOICE, NPROC="2")
    (call,) = stand_in.calls()
    program = f"{stand_in.root}/main_training.py {CHOICE}"
    assert call == f"torchrun --standalone --nproc-per-node=2 --max-restarts=0 {program}"


def test_a_process_that_is_to_be_started_again_is_torchruns(stand_in: StandIn) -> None:
    train(stand_in, CHOICE, NPROC="1", MAX_RESTARTS="3")
    assert stand_in.calls()[0].startswith("torchrun --standalone --nproc-per-node=1 --max-restarts=3 ")


def test_machines_that_may_come_and_go_meet_at_one_of_them(stand_in: StandIn) -> None:
    train(stand_in, CHOICE, NPROC="1", NNODES="1:4", MASTER_ADDR="node01", JOB_ID="seven")
    meeting = "--nnodes=1:4 --rdzv-backend=c10d --rdzv-id=seven --rdzv-endpoint=node01:29500"
    assert stand_in.calls()[0].startswith(f"torchrun {meeting} --nproc-per-node=1 --max-restarts=3 ")


def test_restarts_where_machines_come_and_go_are_the_users_choice(stand_in: StandIn) -> None:
    train(stand_in, CHOICE, NPROC="1", NNODES="1:4", MASTER_ADDR="node01", MAX_RESTARTS="0")
    assert " --max-restarts=0 " in stand_in.calls()[0]


def test_threads_are_the_processes_own_matter(stand_in: StandIn) -> None:
    names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")
    stand_in.torchrun.write_text(f"import os\nprint(*(os.environ.get(name) or '-' for name in {names}))\n")
    unset = {"OMP_NUM_THREADS": "", "GOMP_SPINCOUNT": "", "OMP_WAIT_POLICY": ""}
    for variables, said in (
        ({"NPROC": "8"}, "- -\n"),
        ({"NPROC": "8", "OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "7"}, "3 7\n"),
    ):
        command = ["bash", str(stand_in.root / "scripts" / "train.sh"), CHOICE]
        assert run_command(command, stand_in.variables(**{**unset, **variables}), cwd=stand_in.root).stdout == said


def test_several_machines_meet_where_they_are_told(stand_in: StandIn) -> None:
    train(stand_in, CHOICE, NPROC="1", NNODES="2", NODE_RANK="1", MASTER_ADDR="node01")
    expected = "torchrun --nnodes=2 --node-rank=1 --master-addr=node01 --master-port=29500 --nproc-per-node=1"
    assert stand_in.calls()[0].startswith(expected)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 needs MASTER_ADDR, the host of machine 0"),
        ({"NNODES": "2", "MASTER_ADDR": "node01"}, "NNODES=2 needs NODE_RANK, the number of this machine, from 0"),
        ({"NNODES": "1:4"}, "NNODES=1:4 needs MASTER_ADDR, the host that the machines meet at"),
    ],
)
def test_several_machines_that_are_not_told_where_to_meet_do_not_start(
    stand_in: StandIn, variables: dict[str, str], said: str
) -> None:
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train.sh", CHOICE]
    done = run_command(command, stand_in.variables(**variables), check=False)
    assert done.returncode == 1 and done.stderr.endswith(f"train: {said}\n")
    assert stand_in.calls() == []


# In and out


def test_relative_paths_stay_relative_to_the_callers_folder(stand_in: StandIn, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    train(stand_in, "--data_path=mine", cwd=elsewhere)
    assert stand_in.calls() == ["main --data_path=mine", f"in {elsewhere}"]


@pytest.mark.parametrize("code", [0, 5])
def test_the_exit_code_of_one_process_is_returned(stand_in: StandIn, code: int) -> None:
    assert train(stand_in, CHOICE, check=False, EXIT_CODE=str(code)).returncode == code


def test_the_exit_code_of_torchrun_is_returned(stand_in: StandIn) -> None:
    stand_in.torchrun.write_text("raise SystemExit(9)\n")
    assert train(stand_in, CHOICE, check=False, NPROC="2").returncode == 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_one_process(stand_in: StandIn, number: signal.Signals) -> None:
    command = ["bash", str(stand_in.root / "scripts" / "train.sh"), CHOICE, "--wait"]
    environment = plain_environment(stand_in.variables())
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_SECONDS) == 7
    assert stand_in.calls()[-1] == f"signal {number.name}"
