"""kubernetes/jobset.yaml fits train.sh, the settings and the exit codes, and Dockerfile copies what is there.

No cluster has run the one, and nothing is built of the other here.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from helpers import ROOT, run_command
from stand_in import StandIn

from pretraining.config.command_line import load_train_config
from pretraining.errors import Interrupted, Preempted

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
