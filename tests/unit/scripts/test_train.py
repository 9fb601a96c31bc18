"""train.sh: what its block does, and which processes it starts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from helpers import run_command
from stand_in import WHOLE_BLOCK, StandIn
from tiers import first_quick

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import values_of
from pretraining.config.training import OptimizerConfig

CHOICE = "--use_dummy_dataset=true"


def train(
    stand_in: StandIn, *flags: str, check: bool = True, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run train.sh, which leaves its calls in `stand_in.calls()`."""
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train.sh", *flags]
    return run_command(command, stand_in.variables(**variables), check=check, cwd=stand_in.root)


# The block


def test_the_block_shows_the_defaults_of_a_real_run(stand_in: StandIn) -> None:
    text = (stand_in.root / "scripts" / "train.sh").read_text()
    lines = re.findall(r"^    #--(\S+)", text.partition("FLAGS=(\n")[2].partition("\n)\n")[0], re.MULTILINE)
    examples = ("ckpt_", "data_path=", "datasets=", "weights=", "tokenizer_path=", "use_dummy_dataset=")
    shown = values_of(load_train_config([line for line in lines if not line.startswith(examples)] + ["data_path=d"]))
    defaults = values_of(load_train_config(["data_path=d"]))
    named = {"model_variant": "7b", "learning_rate": OptimizerConfig().peak_learning_rate}  # none means these
    assert {name: value for name, value in shown.items() if value != defaults[name]} == named


def test_the_flags_of_the_block_come_before_those_of_the_command_line(stand_in: StandIn) -> None:
    stand_in.edit_block(WHOLE_BLOCK, '    --seed=1  # mine\n    "--prompt=two  words"\n')
    train(stand_in, CHOICE, "--seed=2")
    assert stand_in.calls()[0] == f"main --seed=1 --prompt=two  words {CHOICE} --seed=2"


def test_the_other_systems_block_may_be_pasted(stand_in: StandIn) -> None:
    pasted = (
        'MODEL_ARGS="\\\n--model_variant="7b"\n--sharding_strategy="HSDP"\n--use_dummy_dataset=False\n'
        '--weights="7725,500"\n--ckpt_save_path=/ckpt"'
    )
    stand_in.edit_block('MODEL_ARGS=""', pasted)
    train(stand_in, "--seed=1", variables={"MODEL_ARGS": "not this"})
    expected = "--model_variant=7b --sharding_strategy=HSDP --use_dummy_dataset=False --weights=7725,500"
    assert stand_in.calls()[0] == f"main {expected} --ckpt_save_path=/ckpt --seed=1"


# Processes


MACHINES = {"NPROC": "1", "NNODES": "2", "MASTER_ADDR": "node01"}
ELASTIC = {**MACHINES, "NNODES": "1:4", "JOB_ID": "seven"}


@pytest.mark.parametrize(
    ("variables", "start"),
    first_quick(
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": "3"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1,5"}, "--standalone --nproc-per-node=3 --max-restarts=0"),
        (
            {**MACHINES, "NODE_RANK": "1"},
            "--nnodes=2 --node-rank=1 --master-addr=node01 --master-port=29500 --nproc-per-node=1 --max-restarts=0",
        ),
        (
            ELASTIC,
            "--nnodes=1:4 --rdzv-backend=c10d --rdzv-id=seven --rdzv-endpoint=node01:29500 --nproc-per-node=1 "
            "--max-restarts=3",
        ),
        (
            {
                **{"NPROC": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"},
                **{"PET_MASTER_PORT": "23456", "PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "2", "RANK": "1"},
            },
            "--nnodes=2 --node-rank=1 --master-addr=pod-0 --master-port=23456 --nproc-per-node=2 --max-restarts=0",
        ),
        (
            {
                **{"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "pod-0:23456"},
                **{"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "seven", "PET_MAX_RESTARTS": "9"},
            },
            "--nnodes=1:4 --rdzv-backend=c10d --rdzv-id=seven --rdzv-endpoint=pod-0:23456 --nproc-per-node=2 "
            "--max-restarts=9",
        ),
        ({"NPROC": "2", "NNODES": "1", "PET_NNODES": "2"}, "--standalone --nproc-per-node=2 --max-restarts=0"),
        quick=6,
    ),
)
def test_variables_choose_processes_and_rendezvous(stand_in: StandIn, variables: dict[str, str], start: str) -> None:
    train(stand_in, CHOICE, variables=variables)
    expected = f"torchrun {start} {stand_in.root}/main_training.py {CHOICE}" if start else f"main {CHOICE}"
    assert stand_in.calls()[0] == expected


OF_PLATFORM = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
ALONE = "(?s)WORLD_SIZE=2.*would train alone.*NNODES=<machines>"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        ({"NNODES": "1:4"}, "MASTER_ADDR"),
        ({**OF_PLATFORM, "NPROC": "2"}, ALONE),
    ],
)
def test_machines_that_would_not_meet_are_refused(stand_in: StandIn, variables: dict[str, str], said: str) -> None:
    done = train(stand_in, CHOICE, check=False, variables=variables)
    assert done.returncode == 1 and re.search(said, done.stderr) and stand_in.calls() == []


def test_no_variable_of_torchrun_reaches_it_behind_the_scripts_back(stand_in: StandIn) -> None:
    stand_in.torchrun.write_text("import os\nprint(sorted(name for name in os.environ if name.startswith('PET_')))")
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "NPROC_PER_NODE", "STANDALONE")
    variables = {f"PET_{name}": "1" for name in (*names, "RDZV_BACKEND", "RDZV_ID", "RDZV_ENDPOINT", "LOG_DIR")}
    assert train(stand_in, CHOICE, variables={**variables, "NPROC": "2"}).stdout == "['PET_LOG_DIR']\n"


# Under srun


STEP = {
    **{"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"},
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_NUM_TASKS": "2"},
}


@pytest.mark.parametrize(
    ("variables", "start"),
    first_quick(
        (
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            "torchrun --nnodes=2 --node-rank=1 --master-addr=gpu03 --master-port=16498 --nproc-per-node=8",
        ),
        (
            {"MAX_RESTARTS": "3", "NPROC": "8"},
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-id=7.2 --rdzv-endpoint=gpu03:16498 --nproc-per-node=8",
        ),
        ({"SLURM_STEP_NUM_TASKS": "4"}, f"main {CHOICE}"),
        quick=3,
    ),
    ids=["nodes", "restarts", "a task per process"],
)
def test_a_task_per_node_is_a_machine_of_the_job(stand_in: StandIn, variables: dict[str, str], start: str) -> None:
    train(stand_in, CHOICE, variables={**STEP, **variables})
    assert stand_in.calls()[0].startswith(start)
