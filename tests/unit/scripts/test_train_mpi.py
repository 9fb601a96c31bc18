"""train_mpi.sh speaks the dialect of the mpirun it finds, and says where rank 0 is when there are several hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers import run_command
from stand_in import StandIn

MPIRUN = """#!/usr/bin/env bash
if [[ $* == --version ]]; then
    echo "{version}"
else
    echo "$*"
fi
"""
OPEN_MPI = "mpirun (Open MPI) 4.1.4"
HYDRA = "HYDRA build details:"


def train(stand_in: StandIn, version: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    stand_in.add_program("mpirun", MPIRUN.format(version=version))
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train_mpi.sh", "--flag=1"]
    return run_command(command, stand_in.variables(**variables), check=check, cwd=stand_in.root)


@pytest.mark.parametrize(
    ("version", "options"), [(OPEN_MPI, "-n 2 --bind-to none -x PATH"), (HYDRA, "-n 2")], ids=["openmpi", "mpich"]
)
def test_on_one_machine_the_meeting_place_is_left_to_be_derived(tmp_path: Path, version: str, options: str) -> None:
    done = train(StandIn(tmp_path), version, NPROC="2")
    assert done.stdout == f"{options} python {tmp_path}/main_training.py --flag=1\n"


@pytest.mark.parametrize(
    ("version", "hosts", "options"),
    [
        (OPEN_MPI, "node07 slots=8\nnode08 slots=8", "--hostfile hosts -x MASTER_ADDR=node07 -x MASTER_PORT=29500"),
        (HYDRA, "# two\n\n  node07:8\n  node08:8", "-f hosts -genv MASTER_ADDR node07 -genv MASTER_PORT 29500"),
    ],
    ids=["openmpi", "mpich"],
)
def test_over_several_hosts_rank_0_is_on_the_first(tmp_path: Path, version: str, hosts: str, options: str) -> None:
    (tmp_path / "hosts").write_text(hosts)
    done = train(StandIn(tmp_path), version, NPROC="16", HOSTFILE="hosts")
    assert f" {options} python " in done.stdout


def test_a_given_meeting_place_wins(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node07 slots=8")
    done = train(StandIn(tmp_path), OPEN_MPI, NPROC="8", HOSTFILE="hosts", MASTER_ADDR="10.0.0.7", MASTER_PORT="4000")
    assert "-x MASTER_ADDR=10.0.0.7 -x MASTER_PORT=4000" in done.stdout


def test_a_host_file_without_hosts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none yet\n")
    done = train(StandIn(tmp_path), OPEN_MPI, check=False, NPROC="8", HOSTFILE="hosts")
    assert done.returncode == 1 and "no host in HOSTFILE=hosts" in done.stderr


def test_the_number_of_processes_has_to_be_given(tmp_path: Path) -> None:
    done = train(StandIn(tmp_path), OPEN_MPI, check=False)
    assert done.returncode != 0 and "NPROC: number of processes" in done.stderr
