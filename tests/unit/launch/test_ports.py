"""Ports are free, or the same in all processes of one job."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pretraining.launch.layout import ancestor_named, free_port, port_of_name, port_of_slurm_step


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
