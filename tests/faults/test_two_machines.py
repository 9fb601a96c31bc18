"""Two machines whose names resolve to loopback, one that dies, a link that is cut.

gloo on CPUs; NCCL chooses interfaces by itself and is not tested here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, free_ports
from network_nodes import Nodes, reason_to_skip
from training_runs import TINY, losses_of, status_of

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


@pytest.mark.slow
def test_a_job_continues_without_a_machine_and_again_with_it(nodes: Nodes, tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def join(node: int) -> subprocess.Popen[str]:
        soon = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=10"
        elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=job"]
        meeting = [f"--rdzv-endpoint={nodes.names[0]}:{port}", f"--rdzv-conf=is_host={1 - node},{soon}"]
        flags = [*TINY, "use_dummy_dataset=true", "checkpoint_interval=2", "global_batch_size=4", *ENDLESS[:1]]
        launch: list[str | Path] = [
            sys.executable,
            ROOT / "scripts" / "torchrun.py",
            *elastic,
            *meeting,
            PROGRAM,
            *flags,
        ]
        return nodes.start(node, [*launch, f"ckpt_save_path={tmp_path}"], {})

    first, second = join(0), join(1)
    assert first.stdout is not None
    wait_for_processes(first, 2)
    nodes.kill(1)
    second.communicate(timeout=PATIENCE_SECONDS)
    wait_for_processes(first, 1)
    back = join(1)
    wait_for_processes(first, 2)
    first.terminate()
    _, errors = first.communicate(timeout=PATIENCE_SECONDS)
    back.communicate(timeout=PATIENCE_SECONDS)
    status = status_of(tmp_path)
    assert (first.returncode, status["status"]) == (75, "preempted"), errors
    assert status["starts"] >= 3 and status["started_at_step"] > 0


def wait_for_processes(launcher: subprocess.Popen[str], count: int) -> None:
    """Waits until a start of so many processes has trained."""
    assert launcher.stdout is not None
    is_right = False
    for line in launcher.stdout:
        if (header := re.search(r" over (\d+) x cpu", line)) is not None:
            is_right = int(header[1]) == count
        if is_right and line.startswith("step "):
            return
    pytest.fail(f"the job has ended: {launcher.communicate()}")
