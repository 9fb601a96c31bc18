"""Every launcher's environment gives one layout, and what contradicts itself is refused by name."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pretraining.errors import LaunchError
from pretraining.launch import layout as layout_module
from pretraining.launch.layout import (
    FIRST_PORT,
    PORTS,
    ProcessLayout,
    ancestor_named,
    first_node,
    free_port,
    port_of_name,
    port_of_slurm_step,
    resolve_layout,
    tasks_of_nodes,
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


# One process


def test_an_empty_environment_is_one_process_on_a_free_port() -> None:
    assert resolve({}) == ProcessLayout(0, 1, 0, 1, "single", "127.0.0.1", FREE_PORT)


def test_one_process_meets_nobody_so_an_exported_meeting_place_does_not_matter() -> None:
    assert resolve({"MASTER_ADDR": "node07", "MASTER_PORT": "29500"}).master_addr == "127.0.0.1"


def test_a_world_of_one_is_one_process() -> None:
    assert resolve({"WORLD_SIZE": "1"}).launcher == "single"
    assert resolve({"WORLD_SIZE": "1", "RANK": "0"}) == ProcessLayout(0, 1, 0, 1, "environment", "127.0.0.1", FREE_PORT)


def test_the_shell_of_a_batch_script_is_one_process_however_many_tasks_the_job_has() -> None:
    assert place(resolve(SLURM_BATCH)) == (0, 1, 0, 1)


# torchrun


def test_torchrun_says_everything() -> None:
    assert resolve(TORCHRUN) == ProcessLayout(5, 8, 1, 4, "torchrun", "node07", 29511)


@pytest.mark.parametrize("outer", [SLURM, OPEN_MPI, MPICH], ids=["srun", "openmpi", "mpich"])
def test_torchrun_inside_a_task_of_another_launcher_wins(outer: dict[str, str]) -> None:
    assert resolve({**outer, **TORCHRUN}) == resolve(TORCHRUN)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_of_torchrun_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"\b{name} is not set.*torchrun"):
        resolve(without(TORCHRUN, name))


def test_torchrun_with_one_process_still_has_to_say_where_its_store_is() -> None:
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert resolve(alone).master_port == 29511
    with pytest.raises(LaunchError, match="MASTER_PORT is not set"):
        resolve(without(alone, "MASTER_PORT"))


# Open MPI


def test_open_mpi_on_one_node_meets_on_this_host_at_a_port_of_its_job() -> None:
    layout = resolve(OPEN_MPI)
    assert place(layout) == (1, 2, 1, 2)
    assert (layout.launcher, layout.master_addr) == ("openmpi", "127.0.0.1")
    assert layout.master_port == resolve({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).master_port
    assert layout.master_port != resolve({**OPEN_MPI, "PMIX_NAMESPACE": "2072444930"}).master_port


def test_open_mpi_inside_a_slurm_job_counts_its_own_ranks() -> None:
    assert place(resolve({**SLURM, **OPEN_MPI})) == (1, 2, 1, 2)


def test_open_mpi_on_several_nodes_has_to_be_told_the_host_of_rank_0() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is not set.*4 processes, 2 of them.*mpirun -x MASTER_ADDR="):
        resolve(OPEN_MPI_TWO_NODES)
    layout = resolve({**OPEN_MPI_TWO_NODES, "MASTER_ADDR": "node01"})
    assert (layout.master_addr, layout.local_world_size) == ("node01", 2)


def test_open_mpi_without_a_name_for_its_job_has_to_be_told_a_port() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_PORT is not set.*mpirun -x"):
        resolve(without(OPEN_MPI, "PMIX_NAMESPACE"))


# MPICH


def test_mpich_on_one_node_meets_at_a_port_of_its_proxy() -> None:
    layout = resolve(MPICH, proxy=4711)
    assert place(layout) == (1, 2, 1, 2)
    assert (layout.launcher, layout.master_addr) == ("mpich", "127.0.0.1")
    assert layout.master_port != resolve(MPICH, proxy=4712).master_port


def test_mpich_whose_proxy_is_not_found_has_to_be_told_a_port() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_PORT is not set.*mpirun -genv"):
        resolve(MPICH, proxy=None)


def test_mpich_on_several_nodes_has_to_be_told_host_and_port() -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        resolve(MPICH_TWO_NODES, proxy=4711)
    with pytest.raises(LaunchError, match="MASTER_PORT is not set"):
        resolve({**MPICH_TWO_NODES, "MASTER_ADDR": "node01"}, proxy=4711)
    told = resolve({**MPICH_TWO_NODES, "MASTER_ADDR": "node01", "MASTER_PORT": "29500"})
    assert (told.master_addr, told.master_port) == ("node01", 29500)


def test_one_process_of_mpirun_takes_a_free_port() -> None:
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert resolve(alone) == ProcessLayout(0, 1, 0, 1, "mpich", "127.0.0.1", FREE_PORT)


# SLURM


def test_a_task_of_srun_meets_at_the_first_node_of_its_step() -> None:
    layout = resolve(SLURM)
    assert place(layout) == (6, 8, 2, 4)
    assert (layout.launcher, layout.master_addr) == ("slurm", "node01")
    assert FIRST_PORT <= layout.master_port < FIRST_PORT + PORTS


def test_srun_with_pmi2_is_still_srun() -> None:
    assert resolve({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8"}) == resolve(SLURM)


def test_a_step_on_one_node_meets_on_this_host() -> None:
    layout = resolve(SLURM_ONE_NODE)
    assert place(layout) == (2, 4, 2, 4)
    assert layout.master_addr == "127.0.0.1"


def test_nodes_may_have_different_numbers_of_tasks() -> None:
    uneven = {**SLURM, "SLURM_PROCID": "7", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "7,1"}
    assert place(resolve(uneven)) == (7, 8, 0, 1)


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = {
        resolve({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(123_400, 123_500)
        for step in range(16)
    }
    assert len(ports) == 1600


def test_a_given_meeting_place_wins_over_a_derived_one() -> None:
    layout = resolve({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"})
    assert (layout.master_addr, layout.master_port) == ("10.0.0.9", 29500)


def test_a_step_without_its_node_list_has_to_be_told_the_first_host() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is not set.*export MASTER_ADDR"):
        resolve(without(SLURM, "SLURM_STEP_NODELIST"))


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"])
def test_a_variable_of_srun_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"\b{name} is not set.*slurm"):
        resolve(without(SLURM, name))


@pytest.mark.parametrize("wrong", [{"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, {"SLURM_NODEID": "2"}])
def test_left_over_variables_of_another_step_are_noticed(wrong: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="contradict each other"):
        resolve({**SLURM, **wrong})


# By hand


def test_rank_and_world_size_by_hand_on_one_node() -> None:
    assert resolve(BY_HAND) == ProcessLayout(1, 2, 1, 2, "environment", "localhost", 29500)


def test_processes_on_one_node_need_only_a_port_beside_their_ranks() -> None:
    layout = resolve(without(BY_HAND, "MASTER_ADDR"))
    assert (layout.master_addr, layout.local_world_size) == ("127.0.0.1", 2)
    with pytest.raises(LaunchError, match="MASTER_PORT is not set"):
        resolve(without(BY_HAND, "MASTER_PORT"))


def test_several_nodes_by_hand_have_to_say_who_shares_a_node() -> None:
    remote = {**BY_HAND, "MASTER_ADDR": "node01"}
    with pytest.raises(LaunchError, match="LOCAL_RANK is not"):
        resolve(remote)
    with pytest.raises(LaunchError, match="LOCAL_WORLD_SIZE is not"):
        resolve({**remote, "LOCAL_RANK": "0"})
    assert place(resolve({**remote, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})) == (1, 2, 0, 1)


def test_several_nodes_by_hand_have_to_say_where_rank_0_is() -> None:
    spread = {**without(BY_HAND, "MASTER_ADDR"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        resolve(spread)


@pytest.mark.parametrize("half", [{"RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": ""}])
def test_half_of_rank_and_world_size_is_refused(half: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="cannot know its place"):
        resolve(half)


# Contradictions


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (TORCHRUN, "RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (MPICH, "MPI_LOCALNRANKS"),
        (SLURM, "SLURM_PROCID"),
        (BY_HAND, "WORLD_SIZE"),
        ({**BY_HAND, "LOCAL_RANK": "0"}, "LOCAL_RANK"),
    ],
)
def test_a_value_that_is_no_number_is_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name}='two' is not an integer"):
        resolve({**environ, name: "two"})


@pytest.mark.parametrize("rank", ["-1", "2"])
@pytest.mark.parametrize(
    ("environ", "name"), [(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (MPICH, "PMI_RANK"), (BY_HAND, "RANK")]
)
def test_a_rank_outside_the_world_is_refused(environ: dict[str, str], name: str, rank: str) -> None:
    with pytest.raises(LaunchError, match=f"{name}={rank} does not fit"):
        resolve({**environ, name: rank})


@pytest.mark.parametrize("wrong", [{"LOCAL_RANK": "4"}, {"LOCAL_RANK": "-1"}, {"LOCAL_WORLD_SIZE": "9"}])
def test_a_local_rank_outside_its_node_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="local ranks go from 0"):
        resolve({**TORCHRUN, **wrong})


@pytest.mark.parametrize("port", ["0", "65536", "-5", "http", "²"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(LaunchError, match="is not a port"):
        resolve({**BY_HAND, "MASTER_PORT": port})


@pytest.mark.parametrize("environ", [SLURM, OPEN_MPI, MPICH], ids=["srun", "openmpi", "mpich"])
def test_two_launchers_that_disagree_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="Two launchers claim this process"):
        resolve({**environ, "RANK": "0", "WORLD_SIZE": "16"}, proxy=1)


def test_rank_and_world_size_that_repeat_what_srun_says_are_fine() -> None:
    assert resolve({**SLURM, "RANK": "6", "WORLD_SIZE": "8"}) == resolve(SLURM)


def test_the_layout_as_environment_resolves_to_itself() -> None:
    layout = resolve(SLURM)
    again = resolve(layout.as_environment())
    assert place(again) == place(layout)
    assert (again.master_addr, again.master_port) == (layout.master_addr, layout.master_port)


# SLURM's compressed notations


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,7],gpu-a", "node01"),
        ("gpu-a,node[01-03]", "gpu-a"),
        ("node[7,01-03]", "node7"),
        ("rack[1-2]node[004-010]", "rack1node004"),
        ("node[1-2].cluster.example", "node1.cluster.example"),
        ("10.0.0.5,10.0.0.6", "10.0.0.5"),
    ],
)
def test_the_first_node_of_a_list(node_list: str, first: str) -> None:
    assert first_node(node_list) == first


@pytest.mark.parametrize("node_list", ["", "node[", "node[a-b]", ",node1", "node 1"])
def test_a_node_list_of_another_form_is_refused(node_list: str) -> None:
    with pytest.raises(LaunchError, match="Cannot read the node list"):
        first_node(node_list)


@pytest.mark.parametrize(("text", "tasks"), [("2", (2,)), ("4(x2),1", (4, 4, 1)), ("1,8(x3)", (1, 8, 8, 8))])
def test_tasks_on_each_node(text: str, tasks: tuple[int, ...]) -> None:
    assert tasks_of_nodes(text) == tasks


@pytest.mark.parametrize("text", ["", "two", "4(x)", "4x2", "4(x2),"])
def test_tasks_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_of_nodes(text)


# Ports


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_derived_ports_stay_below_the_range_of_outgoing_connections() -> None:
    for port in (port_of_slurm_step(2**31, 15), port_of_slurm_step(0, 0), port_of_name(""), port_of_name("job" * 99)):
        assert 16384 <= port < 32768


def test_a_name_gives_the_same_port_in_every_process() -> None:
    assert port_of_name("prterun-node01-4711@1") == 18482


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


def test_a_machine_without_a_process_file_system_has_no_named_ancestors(tmp_path: Path) -> None:
    assert ancestor_named("hydra_pmi_proxy", proc=tmp_path / "missing") is None


def test_this_process_is_found_in_the_real_process_file_system() -> None:
    if Path("/proc/self/stat").exists():
        command = Path("/proc/self/comm").read_text().rstrip("\n")
        assert ancestor_named(command) == os.getpid()
