"""train_mpi.sh speaks the dialect of the mpirun it finds, and says where rank 0 is when there are several hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
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


def train(stand_in: StandIn, version: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    stand_in.add_program("mpirun", MPIRUN.format(version=version))
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train_mpi.sh", "--flag=1"]
    return run_command(command, stand_in.variables(**variables), cwd=stand_in.root)


@pytest.mark.parametrize(
    ("version", "hosts", "variables", "options"),
    [
        (OPEN_MPI, "", {}, "-n 2 --bind-to none -x PATH"),
        (HYDRA, "", {}, "-n 2"),
        (OPEN_MPI, "node07 slots=8\nnode08 slots=8", {}, "--hostfile hosts -x MASTER_ADDR=node07 -x MASTER_PORT=29500"),
        (HYDRA, "# two\n\n  node07:8\n", {}, "-f hosts -genv MASTER_ADDR node07 -genv MASTER_PORT 29500"),
        (OPEN_MPI, "node07", {"MASTER_ADDR": "10.0.0.7"}, "-x MASTER_ADDR=10.0.0.7 -x MASTER_PORT=29500"),
    ],
)
def test_rank_0_is_on_the_first_host_by_default(
    stand_in: StandIn, version: str, hosts: str, variables: dict[str, str], options: str
) -> None:
    (stand_in.root / "hosts").write_text(hosts)
    done = train(stand_in, version, {"NPROC": "2", "HOSTFILE": "hosts" if hosts else "", **variables})
    assert done.stdout.endswith(f"{options} python {stand_in.root}/main_training.py --flag=1\n")
