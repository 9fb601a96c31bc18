"""Two machines whose names resolve to loopback, one that dies, a link that is cut.

gloo on CPUs; NCCL chooses interfaces by itself and is not tested here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, free_ports
from network_nodes import Nodes, reason_to_skip
from training_runs import TINY, losses_of

PROGRAM = ROOT / "main_training.py"
ENDLESS = ["num_steps=1000000", "report_interval=5"]
HUNG = 124


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    made = Nodes()
    try:
        made.open()
        yield made
    finally:
        made.close()


def start(nodes: Nodes, run: Path, flags: Sequence[str], **variables: str) -> list[subprocess.Popen[str]]:
    """Starts a process on each of two machines; they meet at the name of the first."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": nodes.names[0]}
    line: list[str | Path] = [sys.executable, PROGRAM, *TINY, "use_dummy_dataset=true", f"ckpt_save_path={run}", *flags]
    return [
        nodes.start(rank, line, {**common, "MASTER_PORT": str(port), "RANK": str(rank), **variables})
        for rank in range(2)
    ]


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    if not any(line.startswith(f"step {step}/") for line in process.stdout):
        pytest.fail(f"the run has ended: {process.communicate()}")


def test_machines_whose_names_resolve_to_loopback_find_each_other(nodes: Nodes, tmp_path: Path) -> None:
    processes = start(nodes, tmp_path, ["num_steps=3"])
    (said, errors), others = (process.communicate(timeout=PATIENCE_SECONDS) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], said + errors + "".join(others)
    assert "gloo reaches other machines through 10.231.77.1 (way0)" in said
    assert len(losses_of(tmp_path)) == 3


@pytest.mark.slow
def test_an_interface_that_leads_nowhere_is_one_error_on_every_machine(nodes: Nodes, tmp_path: Path) -> None:
    processes = start(nodes, tmp_path, ["num_steps=3"], GLOO_SOCKET_IFNAME="lo")
    said = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], said
    errors = [text[text.index("error: ") :].splitlines() for text in said]
    assert errors[0] == errors[1]
    assert "GLOO_SOCKET_IFNAME (there lo)" in errors[0][1] and len(errors[0]) == 2
    assert "Traceback" not in "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_the_processes_of_other_machines_exit_when_one_dies(dead: int, nodes: Nodes, tmp_path: Path) -> None:
    processes = start(nodes, tmp_path, ENDLESS)
    wait_for_step(processes[0], 5)
    nodes.kill(dead)
    _, said = processes[1 - dead].communicate(timeout=PATIENCE_SECONDS)
    assert processes[1 - dead].returncode == 1
    assert "another process of the job exited" in said


@pytest.mark.slow
def test_a_cut_link_is_a_hang_that_stops_every_machine(nodes: Nodes, tmp_path: Path) -> None:
    processes = start(nodes, tmp_path, [*ENDLESS, "hang_timeout=20s"])
    wait_for_step(processes[0], 5)
    nodes.cut_link()
    said = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [HUNG, HUNG], said
    assert f"rank 1 on {nodes.names[1]} sends no heartbeats any more" in said[0]
    assert "beside rank 0, does not" in said[1]
