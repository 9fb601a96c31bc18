"""kubernetes/jobset.yaml: fits its schema, train.sh and the exit codes; no cluster has run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, run_command
from stand_in import StandIn

from pretraining.config.command_line import load_train_config
from pretraining.errors import Interrupted, Preempted

MANIFEST = ROOT / "scripts" / "kubernetes" / "jobset.yaml"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@pytest.fixture
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return loaded


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job: dict[str, Any] = replicated["template"]["spec"]
    return job


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = job_of(manifest)["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_each_pod_starts_its_part_of_one_job(manifest: dict[str, Any], stand_in: StandIn) -> None:
    job, flags = job_of(manifest), container_of(manifest)["args"]
    assert job["parallelism"] == job["completions"] == 2 and job["completionMode"] == "Indexed"
    for index in range(2):
        entries = container_of(manifest)["env"]  # Kubernetes fills in those without a value
        assert all("value" in each or each["valueFrom"]["fieldRef"]["fieldPath"] == INDEX for each in entries)
        variables = {each["name"]: each.get("value", str(index)) for each in entries} | {"NPROC": "8"}
        run_command(["bash", stand_in.root / "scripts" / "train.sh", *flags], stand_in.variables(**variables))
        name, job_name = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
        meeting = f"--nnodes=2 --node-rank={index} --master-addr={name}-{job_name}-0-0.{name} --master-port=29500"
        program = f"{stand_in.root}/main_training.py {' '.join(flags)}"
        assert stand_in.calls()[index:] == [f"torchrun {meeting} --nproc-per-node=8 --max-restarts=0 {program}"]


def test_its_flags_are_settings_of_training(manifest: dict[str, Any]) -> None:
    config = load_train_config([flag.removeprefix("--") for flag in container_of(manifest)["args"]])
    (volume,) = (each for each in container_of(manifest)["volumeMounts"] if each["name"] == "shared")
    for path in (config.data.data_path, config.checkpoint.ckpt_save_path):
        assert path is not None and Path(path).is_relative_to(volume["mountPath"])


def test_a_run_that_was_told_to_end_goes_on_without_a_limit_and_one_that_failed_has_one(
    manifest: dict[str, Any],
) -> None:
    by_code, by_condition = job_of(manifest)["podFailurePolicy"]["rules"]
    assert by_code["onExitCodes"]["values"] == [Preempted.exit_code] != [Interrupted.exit_code]
    assert by_code["onExitCodes"]["containerName"] == container_of(manifest)["name"]
    assert by_code["action"] == by_condition["action"] == "FailJob"
    policy = manifest["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]  # of the job, by either rule above
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and policy["maxRestarts"] > 0
    assert job_of(manifest)["backoffLimit"] == 0 and job_of(manifest)["template"]["spec"]["restartPolicy"] == "Never"
