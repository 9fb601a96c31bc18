"""Every launcher's environment gives one layout; contradicting variables are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.errors import LaunchError
from pretraining.launch import layout as layout_module
from pretraining.launch.layout import (
    FIRST_PORT,
    PORTS,
    ProcessLayout,
    ancestor_named,
    port_of_name,
    resolve_layout,
)

FREE_PORT = 40123

TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "node07", "MASTER_PORT": "29511"},
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "2072444929"},
}
OPEN_MPI_TWO_NODES = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
MPICH_TWO_NODES = {**MPICH, "PMI_RANK": "3", "PMI_SIZE": "4"}
SLURM_BATCH = {
    **{"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"},
    **{"SLURM_JOB_NODELIST": "node[01-02]", "SLURM_TASKS_PER_NODE": "4(x2)"},
}
SLURM = {
    **SLURM_BATCH,
    **{"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"},
    **{"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "node[01-02]"},
}
SLURM_ONE_NODE = {
    **SLURM,
    **{"SLURM_PROCID": "2", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"},
}
PALS = {
    **{"PALS_RANKID": "5", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "1", "PALS_APID": "7f3c", "PMI_RANK": "5"},
    **{"PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "MASTER_ADDR": "node01"},
}
PALS_ONE_NODE = {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_APID": "7f3c", "PMI_RANK": "1", "PMI_SIZE": "2"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "5", "MASTER_PORT": "29500"}
SHELL = {**SLURM_ONE_NODE, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_PTY_PORT": "40155", "PMI_RANK": "0"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def resolve(environ: dict[str, str], proxy: int | None = None) -> ProcessLayout:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "free_port", lambda: FREE_PORT)
        patch.setattr(layout_module, "ancestor_named", lambda name: proxy)
        return resolve_layout(environ)


def place(layout: ProcessLayout) -> tuple[int, int, int, int]:
    return layout.rank, layout.world_size, layout.local_rank, layout.local_world_size


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


TORCHRUN_ALONE = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
MPICH_ALONE = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
UNEVEN = {**SLURM, "SLURM_PROCID": "7", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "7,1"}
REMOTE = {**BY_HAND, "MASTER_ADDR": "node01"}
ADDRESS = {"MASTER_ADDR": "node01", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TASKS = "SLURM_STEP_TASKS_PER_NODE"
DERIVED = -1
"""In place of a port that is made of the name of a job: another test says which."""


@pytest.mark.parametrize(
    ("environ", "layout"),
    [
        ({}, (0, 1, 0, 1, "single", "127.0.0.1", FREE_PORT)),
        # A single process ignores an exported address.
        ({"MASTER_ADDR": "node07", "MASTER_PORT": "29500"}, (0, 1, 0, 1, "single", "127.0.0.1", FREE_PORT)),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "0"}, (0, 1, 0, 1, "single", "127.0.0.1", FREE_PORT)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1, 0, 1, "environment", "127.0.0.1", FREE_PORT)),
        # The shell of a batch script is one process, whatever the tasks of the job.
        (SLURM_BATCH, (0, 1, 0, 1, "single", "127.0.0.1", FREE_PORT)),
        (TORCHRUN_ALONE, (0, 1, 0, 1, "torchrun", "node07", 29511)),
        # torchrun inside a task of another launcher wins.
        *(
            ({**outer, **TORCHRUN}, (5, 8, 1, 4, "torchrun", "node07", 29511))
            for outer in ({"PET_NNODES": "2"}, SLURM, OPEN_MPI, MPICH)
        ),
        ({**SLURM, **OPEN_MPI}, (1, 2, 1, 2, "openmpi", "127.0.0.1", DERIVED)),
        ({**OPEN_MPI_TWO_NODES, "MASTER_ADDR": "node01"}, (3, 4, 1, 2, "openmpi", "node01", DERIVED)),
        (MPICH, (1, 2, 1, 2, "mpich", "127.0.0.1", DERIVED)),
        (MPICH_ALONE, (0, 1, 0, 1, "mpich", "127.0.0.1", FREE_PORT)),
        ({**MPICH_TWO_NODES, **ADDRESS}, (3, 4, 1, 2, "mpich", "node01", 29500)),
        # srun --mpi=pmi2 sets PMI_RANK, too: SLURM's own variables count.
        ({**SLURM, "RANK": "6", "PMI_RANK": "6", "PMI_SIZE": "8"}, (6, 8, 2, 4, "slurm", "node01", DERIVED)),
        ({**SLURM, **ADDRESS}, (6, 8, 2, 4, "slurm", "node01", 29500)),
        (SLURM_ONE_NODE, (2, 4, 2, 4, "slurm", "127.0.0.1", DERIVED)),
        *(
            ({**UNEVEN, "SLURM_STEP_NODELIST": nodes}, (7, 8, 0, 1, "slurm", first, DERIVED))
            for nodes, first in (
                ("node[01-03,7],gpu-a", "node01"),
                ("node[7,01-03]", "node7"),
                ("rack[1-2]node[004-010]", "rack1node004"),
                ("node[1-2].cluster.example", "node1.cluster.example"),
            )
        ),
        (PALS, (5, 8, 1, 4, "pals", "node01", DERIVED)),
        (PALS_ONE_NODE, (1, 2, 1, 2, "pals", "127.0.0.1", DERIVED)),
        (
            {**PALS_ONE_NODE, "PMI_SIZE": "4", "PALS_LOCAL_SIZE": "2", "MASTER_ADDR": "n"},
            (1, 4, 1, 2, "pals", "n", DERIVED),
        ),
        (PMI, (1, 2, 1, 2, "pmi", "127.0.0.1", 29500)),
        ({**PMI, **ADDRESS, **LOCAL}, (1, 2, 0, 1, "pmi", "node01", 29500)),
        (BY_HAND, (1, 2, 1, 2, "environment", "localhost", 29500)),
        (without(BY_HAND, "MASTER_ADDR"), (1, 2, 1, 2, "environment", "127.0.0.1", 29500)),
        ({**REMOTE, **LOCAL}, (1, 2, 0, 1, "environment", "node01", 29500)),
    ],
)
def test_each_launcher_has_a_layout(environ: dict[str, str], layout: tuple[int, int, int, int, str, str, int]) -> None:
    found = resolve(environ, proxy=4711)
    *expected, port = layout
    assert [*place(found), found.launcher, found.master_addr] == expected
    assert found.master_port == port or (port == DERIVED and FIRST_PORT <= found.master_port < FIRST_PORT + PORTS)
    again = resolve(found.as_environment())
    assert place(again) == place(found) and again.master_addr == found.master_addr


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        *((without(TORCHRUN, name), name) for name in TORCHRUN if name[0] in "RWLM"),
        (OPEN_MPI_TWO_NODES, "MASTER_ADDR"),
        (without(OPEN_MPI, "PMIX_NAMESPACE"), "MASTER_PORT"),
        (MPICH, "MASTER_PORT"),  # its proxy is not found
        *((without(SLURM, f"SLURM_{name}"), f"SLURM_{name}") for name in ("PROCID", "NODEID", "JOB_ID", "STEP_ID")),
        *(({**SLURM, TASKS: text}, TASKS) for text in ("4(x3)", "two", "4(x2),")),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID"),
        *(({**SLURM, "SLURM_STEP_NODELIST": nodes}, "MASTER_ADDR") for nodes in ("", "node[a-b]", ",node1", "node 1")),
        (without(BY_HAND, "MASTER_ADDR", "MASTER_PORT"), "MASTER_PORT"),
        (REMOTE, "LOCAL_RANK"),
        ({**PMI, "MASTER_ADDR": "node01"}, "PMI_LOCAL_RANK or LOCAL_RANK"),
        (without(PALS, "PMI_LOCAL_SIZE"), "PALS_LOCAL_SIZE or PMI_LOCAL_SIZE or LOCAL_WORLD_SIZE"),
        (without(PMI, "MASTER_PORT"), "MASTER_PORT"),
        ({**PALS_ONE_NODE, "PALS_RANKID": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "9"}, "PALS_LOCAL_RANKID=9"),
        # A pod whose process torchrun did not start.
        *(({"PET_NNODES": count}, f"PET_NNODES={count} .* would train alone. Start it") for count in ("2", "1:4")),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "RANK"),
        ({**SLURM, "SLURM_PROCID": "two"}, "SLURM_PROCID"),
        *(({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank}, f"OMPI_COMM_WORLD_RANK={rank}") for rank in ("-1", "2")),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        *(({**BY_HAND, "MASTER_PORT": port}, "MASTER_PORT=") for port in ("0", "65536", "http", "²")),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "16"}, "WORLD_SIZE=16"),
    ],
)
def test_missing_and_contradictory_launcher_variables_are_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=rf"\b{named}"):
        resolve(environ)


def test_a_shell_of_srun_is_one_process_and_srun_in_it_is_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "_TERMINAL", str(tmp_path / "none"))
    inside = resolve(SHELL)  # inherits SLURM_PTY_PORT, without a terminal
    assert (*place(inside), inside.launcher) == (0, 4, 0, 4, "slurm")
    (tmp_path / "terminal").touch()
    monkeypatch.setattr(layout_module, "_TERMINAL", str(tmp_path / "terminal"))
    shell = resolve(SHELL)
    assert (*place(shell), shell.launcher) == (0, 1, 0, 1, "interactive")
    assert resolve({**SHELL, **BY_HAND}).launcher == "environment"
    assert resolve(SLURM_ONE_NODE).launcher == "slurm"


def test_jobs_and_steps_have_distinct_ports() -> None:
    ports = {
        resolve({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(123_400, 123_500)
        for step in range(16)
    }
    assert len(ports) == 1600 and max(ports) < 32768  # below the range of outgoing connections
    one, same, other = (
        resolve({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank, "PMIX_NAMESPACE": job}).master_port
        for rank, job in (("0", "7"), ("1", "7"), ("1", "8"))
    )
    assert port_of_name("prterun-node01-4711@1") == 18482  # in every process
    assert one == same != other and resolve(MPICH, proxy=1).master_port != resolve(MPICH, proxy=2).master_port


def write_process(proc: Path, pid: int, command: str, parent: int) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({command}) S {parent} 1 1 0")


def test_the_closest_ancestor_is_found_through_scripts_with_odd_names(tmp_path: Path) -> None:
    write_process(tmp_path, 10, "hydra_pmi_proxy", parent=1)
    write_process(tmp_path, 20, "hydra_pmi_proxy", parent=10)
    write_process(tmp_path, 30, "a) S 99 (b", parent=20)
    write_process(tmp_path, 40, "python", parent=30)
    assert ancestor_named("hydra_pmi_proxy", pid=40, proc=tmp_path) == 20
    assert ancestor_named("mpirun", pid=40, proc=tmp_path) is None
    assert ancestor_named("hydra_pmi_proxy", proc=tmp_path / "missing") is None
