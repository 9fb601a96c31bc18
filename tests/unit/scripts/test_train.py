"""train.sh: what its block does and which processes it starts; train_mpi.sh and the Kubernetes manifest beside it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from helpers import ROOT, run_command
from stand_in import WHOLE_BLOCK, StandIn
from tiers import first_quick

from pretraining.config.fields import values_of
from pretraining.config.read import load_train_config
from pretraining.config.training import OptimizerConfig
from pretraining.errors import Interrupted, Preempted

STAMP = ".pretraining-setup"


@pytest.fixture(scope="session")
def stamp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what setup.sh writes into an environment that is ready, with {root} for the repository."""
    made = StandIn(tmp_path_factory.mktemp("set_up"))
    run_command(["bash", made.root / "scripts" / "setup.sh"], made.variables())
    return (made.environment / STAMP).read_text().replace(str(made.root), "{root}")


@pytest.fixture
def stand_in(tmp_path: Path, stamp: str) -> StandIn:
    """Make a repository whose environment is ready, so that its scripts install nothing."""
    made = StandIn(tmp_path)
    (made.environment / STAMP).write_text(stamp.replace("{root}", str(made.root)))
    return made


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


# train_mpi.sh speaks the dialect of the mpirun it finds, and says where rank 0 is

MPIRUN = """#!/usr/bin/env bash
if [[ $* == --version ]]; then
    echo "{version}"
else
    echo "$*"
fi
"""
OPEN_MPI = "mpirun (Open MPI) 4.1.4"
HYDRA = "HYDRA build details:"


def train_mpi(stand_in: StandIn, version: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    stand_in.add_program("mpirun", MPIRUN.format(version=version))
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train_mpi.sh", "--flag=1"]
    return run_command(command, stand_in.variables(**variables), cwd=stand_in.root)


@pytest.mark.parametrize(
    ("version", "hosts", "variables", "options"),
    [
        (OPEN_MPI, "", {}, "-n 2 --bind-to none -x PATH"),
        (OPEN_MPI, "node07 slots=8\nnode08 slots=8", {}, "--hostfile hosts -x MASTER_ADDR=node07 -x MASTER_PORT=29500"),
        (HYDRA, "# two\n\n  node07:8\n", {}, "-f hosts -genv MASTER_ADDR node07 -genv MASTER_PORT 29500"),
        (OPEN_MPI, "node07", {"MASTER_ADDR": "10.0.0.7"}, "-x MASTER_ADDR=10.0.0.7 -x MASTER_PORT=29500"),
    ],
)
def test_rank_0_is_on_the_first_host_by_default(
    stand_in: StandIn, version: str, hosts: str, variables: dict[str, str], options: str
) -> None:
    (stand_in.root / "hosts").write_text(hosts)
    done = train_mpi(stand_in, version, {"NPROC": "2", "HOSTFILE": "hosts" if hosts else "", **variables})
    assert done.stdout.endswith(f"{options} python {stand_in.root}/main_training.py --flag=1\n")


# kubernetes/jobset.yaml fits train.sh, the settings and the exit codes; no cluster has run it

MANIFEST = yaml.safe_load((ROOT / "scripts/kubernetes/jobset.yaml").read_text())
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
[REPLICATED] = MANIFEST["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
[CONTAINER] = JOB["template"]["spec"]["containers"]


def test_the_pods_start_the_machines_of_one_job(stand_in: StandIn) -> None:
    assert JOB["parallelism"] == JOB["completions"] == 2 and JOB["completionMode"] == "Indexed"
    for index in range(2):
        entries = CONTAINER["env"]  # Kubernetes fills in those without a value
        assert all("value" in each or each["valueFrom"]["fieldRef"]["fieldPath"] == INDEX for each in entries)
        variables = {each["name"]: each.get("value", str(index)) for each in entries} | {"NPROC": "8"}
        command = ["bash", stand_in.root / "scripts" / "train.sh", *CONTAINER["args"]]
        run_command(command, stand_in.variables(**variables))
        name = MANIFEST["metadata"]["name"]
        address = f"--master-addr={name}-{REPLICATED['name']}-0-0.{name} --master-port=29500"
        program = f"{stand_in.root}/main_training.py {' '.join(CONTAINER['args'])}"
        start = f"torchrun --nnodes=2 --node-rank={index} {address} --nproc-per-node=8 --max-restarts=0 {program}"
        assert stand_in.calls()[index:] == [start]


def test_its_flags_are_settings_of_training_with_paths_on_the_shared_volume() -> None:
    config = load_train_config([flag.removeprefix("--") for flag in CONTAINER["args"]])
    [volume] = (each for each in CONTAINER["volumeMounts"] if each["name"] == "shared")
    for path in (config.data.data_path, config.checkpoint.ckpt_save_path):
        assert path is not None and Path(path).is_relative_to(volume["mountPath"])


def test_preempted_pods_restart_without_limit_and_failed_pods_up_to_a_limit() -> None:
    by_code, by_condition = JOB["podFailurePolicy"]["rules"]
    codes = by_code["onExitCodes"]
    assert codes["values"] == [Preempted.exit_code] != [Interrupted.exit_code]
    assert codes["containerName"] == CONTAINER["name"] and by_code["action"] == by_condition["action"] == "FailJob"
    policy = MANIFEST["spec"]["failurePolicy"]
    [rule] = policy["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]  # of the job, by either rule above
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and policy["maxRestarts"] > 0
    assert JOB["backoffLimit"] == 0 and JOB["template"]["spec"]["restartPolicy"] == "Never"


def test_every_file_that_the_dockerfile_copies_exists() -> None:
    lines = (ROOT / "scripts" / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert len(copied) > 1 and all((ROOT / source).exists() for source in copied)
