"""train.sh: when it is the demo, what its block does, which processes it starts, and what goes in and out unchanged."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, heed_interrupts, plain_environment, run_command
from stand_in import WHOLE_BLOCK, StandIn

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import values_of
from pretraining.config.training import OptimizerConfig

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


# The demo


def demo_of(stand_in: StandIn) -> list[str]:
    """What the demo is started with."""
    data = stand_in.root / "data" / "demo"
    paths = [f"--data_path={data}", f"--tokenizer_path={data}/tokenizer.json"]
    return ["--recipe=demo", *paths, f"--ckpt_save_path={stand_in.root}/runs/demo"]


def test_without_flags_the_demo_is_prepared_and_trained(stand_in: StandIn) -> None:
    train(stand_in)
    prepare, main, _ = stand_in.calls()
    assert prepare == f"pretrain prepare --source=stdlib --vocab_size=4096 --output_path={stand_in.root}/data/demo"
    assert main == " ".join(["main", *demo_of(stand_in)])


def test_prepared_data_of_the_demo_is_used_again(stand_in: StandIn) -> None:
    done = stand_in.root / "data" / "demo" / "stdlib" / "prepare.json"
    done.parent.mkdir(parents=True)
    done.touch()
    train(stand_in)
    assert [call.split()[0] for call in stand_in.calls()] == ["main", "in"]


def test_other_flags_change_the_demo_and_win_over_its_own(stand_in: StandIn) -> None:
    given = ["num_steps=5", "--Schedule.Min-LR-Ratio=0.2", "--Ckpt-Save-Path=elsewhere"]
    train(stand_in, *given)
    assert stand_in.calls()[1] == " ".join(["main", *demo_of(stand_in)[:-1], *given])


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
    train(stand_in, *flags)
    assert stand_in.calls()[0] == f"main {' '.join(flags)}"


@pytest.mark.parametrize("flags", [["--ckpt_save_path", "data_path"], ["--sample_prompt=data_path"]])
def test_a_value_that_looks_like_a_name_chooses_nothing(stand_in: StandIn, flags: list[str]) -> None:
    train(stand_in, *flags)
    assert stand_in.calls()[0].startswith("pretrain prepare")


# The block


def lines_of_block(stand_in: StandIn) -> list[str]:
    text = (stand_in.root / "scripts" / "train.sh").read_text()
    return re.findall(r"^    #--(\S+)", text.partition("FLAGS=(\n")[2].partition("\n)\n")[0], re.MULTILINE)


def test_the_block_shows_the_defaults_of_a_real_run(stand_in: StandIn) -> None:
    lines = lines_of_block(stand_in)
    examples = ("ckpt_", "data_path=", "datasets=", "weights=", "tokenizer_path=", "use_dummy_dataset=")
    shown = values_of(load_train_config([line for line in lines if not line.startswith(examples)] + ["data_path=d"]))
    defaults = values_of(load_train_config(["data_path=d"]))
    named = {"model_variant": "7b", "learning_rate": OptimizerConfig().peak_learning_rate}  # none means these
    assert {name: value for name, value in shown.items() if value != defaults[name]} == named


def test_the_block_has_all_flags_of_the_system_that_it_is_for(stand_in: StandIn) -> None:
    assert {line.partition("=")[0] for line in lines_of_block(stand_in)} == {
        *("model_variant", "ckpt_load_path", "ckpt_save_path", "use_dummy_dataset", "data_path", "datasets", "weights"),
        *("seq_length", "sep_token", "logical_shards", "num_workers", "file_type", "col_name", "bos_token"),
        *("strip_tokens", "sharding_strategy", "hsdp_group_size", "tokenizer_path", "held_out_fraction"),
        *("eval_interval", "eval_batches", "mixed_precision", "mp_dtype", "fsdp_activation_checkpointing"),
        *("selective_checkpointing", "low_cpu_fsdp", "seed", "batch_size", "num_steps", "learning_rate"),
        *("use_profiler", "profiler_rank0_only", "report_interval", "checkpoint_interval", "use_torch_compile"),
        *("grad_clip_thresh", "training_stage", "tracker", "tracker_dir", "tracker_project_name", "tracker_run_id"),
    }


def test_lines_of_the_block_that_count_are_passed_and_nothing_of_the_demo(stand_in: StandIn) -> None:
    for name in ("model_variant", "data_path", "datasets", "weights"):
        stand_in.edit_block(f"    #--{name}=", f"    --{name}=")
    train(stand_in, "--seed=1")
    block = "--model_variant=7b --data_path=/data/tokens --datasets=web,code,books --weights=6,3,1"
    assert stand_in.calls()[0] == f"main {block} --seed=1"


def test_the_command_line_wins_over_the_block(stand_in: StandIn) -> None:
    stand_in.edit_block(WHOLE_BLOCK, '    --seed=1  # mine\n    --data_path=/data\n    "--sample_prompt=two  words"\n')
    train(stand_in, "data.data-path=/other")
    assert stand_in.calls()[0] == "main --seed=1 --sample_prompt=two  words data.data-path=/other"


def test_a_line_that_chooses_neither_model_nor_data_changes_the_demo(stand_in: StandIn) -> None:
    stand_in.edit_block("    #--num_steps=1000 ", "    --num_steps=20 ")
    train(stand_in)
    assert stand_in.calls()[1] == " ".join(["main", *demo_of(stand_in), "--num_steps=20"])


def test_the_other_systems_block_may_be_pasted(stand_in: StandIn) -> None:
    pasted = (
        'MODEL_ARGS="\\\n--model_variant="7b"\n--sharding_strategy="HSDP"\n--use_dummy_dataset=False\n'
        '--weights="7725,500"\n--ckpt_save_path=/ckpt"'
    )
    stand_in.edit_block('MODEL_ARGS=""', pasted)
    train(stand_in, "--seed=1", MODEL_ARGS="not this")
    expected = "--model_variant=7b --sharding_strategy=HSDP --use_dummy_dataset=False --weights=7725,500"
    assert stand_in.calls()[0] == f"main {expected} --ckpt_save_path=/ckpt --seed=1"


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


def test_machines_that_start_again_agree_on_it(stand_in: StandIn) -> None:
    train(stand_in, CHOICE, NPROC="1", NNODES="2", MASTER_ADDR="node01", MAX_RESTARTS="2")
    meeting = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=pretraining --rdzv-endpoint=node01:29500"
    assert stand_in.calls()[0].startswith(f"torchrun {meeting} --nproc-per-node=1 --max-restarts=2 ")


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


# Under srun


def test_another_name_of_a_setting_wins_over_the_block_too(stand_in: StandIn) -> None:
    stand_in.edit_block(WHOLE_BLOCK, "    --num_steps=1000\n    --eos_token=0\n    --data_path=/data\n")
    train(stand_in, "--max_tokens=5B", "--sep_token=2")
    assert stand_in.calls()[0] == "main --data_path=/data --max_tokens=5B --sep_token=2"


STEP = {
    **{"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"},
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_GPUS_ON_NODE": "8"},
}


def train_in_step(stand_in: StandIn, variables: Mapping[str, str]) -> None:
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train.sh", CHOICE]
    run_command(command, stand_in.variables(**variables), cwd=stand_in.root)


@pytest.mark.parametrize(
    ("variables", "meeting"),
    [
        ({}, "--nnodes=2 --node-rank=1 --master-addr=gpu03 --master-port=16498 --nproc-per-node=8 --max-restarts=0"),
        (
            {"MASTER_ADDR": "here", "MASTER_PORT": "9", "NPROC": "2"},
            "--nnodes=2 --node-rank=1 --master-addr=here --master-port=9 --nproc-per-node=2 --max-restarts=0",
        ),
        (
            {"MAX_RESTARTS": "3"},
            "--nnodes=2 --rdzv-backend=c10d --rdzv-id=7.2 --rdzv-endpoint=gpu03:16498 "
            "--nproc-per-node=8 --max-restarts=3",
        ),
        ({"SLURM_STEP_NUM_NODES": "1"}, "--standalone --nproc-per-node=8 --max-restarts=0"),
    ],
)
def test_a_task_per_node_is_a_machine_of_the_job(stand_in: StandIn, variables: dict[str, str], meeting: str) -> None:
    (stand_in.root / "pretraining").symlink_to(ROOT / "pretraining")
    step = {**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", **variables}
    train_in_step(stand_in, {**step, "SLURM_STEP_NUM_TASKS": step["SLURM_STEP_NUM_NODES"]})
    assert stand_in.calls() == [f"torchrun {meeting} {stand_in.root}/main_training.py {CHOICE}"]


def test_a_shell_for_a_person_is_a_machine_of_its_own(stand_in: StandIn) -> None:
    """`srun --pty bash`, whatever tasks its step has."""
    train_in_step(stand_in, {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "40000", "NPROC": "2"})
    assert stand_in.calls()[0].startswith("torchrun --standalone --nproc-per-node=2 ")


def test_each_of_several_tasks_of_a_node_is_a_process(stand_in: StandIn) -> None:
    train_in_step(stand_in, {**STEP, "SLURM_STEP_NUM_TASKS": "4"})
    assert stand_in.calls()[0] == f"main {CHOICE}"


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 129)])
def test_a_signal_during_set_up_ends_it_before_anything_begins(
    stand_in: StandIn, number: signal.Signals, code: int
) -> None:
    setup = stand_in.root / "scripts" / "setup.sh"
    setup.write_text(f"kill -s {number.name.removeprefix('SIG')} $$\n")
    assert train(stand_in, CHOICE, check=False).returncode == code
    assert stand_in.calls() == []
