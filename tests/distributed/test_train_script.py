"""train.sh with real processes: signals go in to all of them, and exit codes and messages come out as they are."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, free_ports, plain_environment, run_command
from stand_in import StandIn
from tiers import first_quick

CHOICE = "--use_dummy_dataset=true"


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    made = StandIn(tmp_path, real_torchrun=True)
    run_command(["bash", made.root / "scripts" / "setup.sh"], made.variables())
    return made


def train(stand_in: StandIn, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train.sh", CHOICE, *flags]
    return run_command(command, stand_in.variables(**{"NPROC": "2", **variables}), check=False)


def said_of_the_end(stderr: str) -> list[str]:
    """What stands in stderr after the script's own first lines."""
    return [line for line in stderr.splitlines() if not line.startswith(("setup: ", "train: "))]


def start_waiting(stand_in: StandIn, processes: int) -> subprocess.Popen[str]:
    """Starts processes that wait for a signal; returns once they do."""
    command = ["bash", str(stand_in.root / "scripts" / "train.sh"), CHOICE, "--wait"]
    environment, pipe = plain_environment(stand_in.variables(NPROC=str(processes))), subprocess.PIPE
    script = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert script.stdout is not None
    assert [script.stdout.readline() for _ in range(processes)] == ["ready\n"] * processes
    return script


@pytest.mark.parametrize(
    ("number", "processes", "code"),
    first_quick(
        *((signal.SIGTERM, 2, 7), (signal.SIGTERM, 1, 7), (signal.SIGINT, 2, 128 + signal.SIGINT)),
        *((signal.SIGINT, 1, 7), (signal.SIGUSR1, 2, 7), (signal.SIGUSR1, 1, 7)),
        quick=2,
    ),
)
def test_every_process_gets_one_signal(stand_in: StandIn, number: signal.Signals, processes: int, code: int) -> None:
    """What the processes make of it is the exit code, but for an interrupt of several."""
    script = start_waiting(stand_in, processes)
    script.send_signal(number)
    _, stderr = script.communicate(timeout=PATIENCE_SECONDS)
    assert script.returncode == code
    assert said_of_the_end(stderr) == []
    assert [call for call in stand_in.calls() if call.startswith("signal")] == [f"signal {number.name}"] * processes


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_a_script_that_is_killed_leaves_no_process_behind(stand_in: StandIn) -> None:
    """The workers are told to end by SIGTERM, in their own time."""
    script = start_waiting(stand_in, 2)
    script.kill()
    assert script.communicate()[0] == ""  # until everybody who could write there has ended
    assert stand_in.calls().count("signal SIGTERM") == 2


@pytest.mark.parametrize(("code", "processes"), first_quick((75, 2), (5, 1), (0, 2), (1, 2), quick=2))
def test_the_exit_code_of_the_processes_is_returned_alone(stand_in: StandIn, code: int, processes: int) -> None:
    done = train(stand_in, EXIT_CODE=str(code), NPROC=str(processes))
    assert done.returncode == code
    assert said_of_the_end(done.stderr) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("code", "starts"), [("1", 3), ("75", 1), ("130", 1)])
def test_a_failed_run_is_restarted_and_a_stopped_one_is_not(stand_in: StandIn, code: str, starts: int) -> None:
    done = train(stand_in, NPROC="1", EXIT_CODE=code, MAX_RESTARTS="2")
    assert done.returncode == int(code)
    assert sum(call.startswith("main ") for call in stand_in.calls()) == starts


@pytest.mark.thorough
@pytest.mark.parametrize(("time_is_over", "starts"), [(False, 3), (True, 1)])
def test_a_stopped_elastic_job_restarts_in_its_time_limit(stand_in: StandIn, time_is_over: bool, starts: int) -> None:
    note = "from pathlib import Path\nPath(os.environ['PRETRAINING_TIME_IS_OVER']).touch()\n"
    program = stand_in.root / "main_training.py"
    program.write_text(program.read_text().replace("sys.exit(int(", f"{note if time_is_over else ''}sys.exit(int("))
    (port,) = free_ports(1)
    meeting = {"NNODES": "1:1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = train(stand_in, NPROC="1", EXIT_CODE="75", MAX_RESTARTS="2", **meeting)
    assert done.returncode == 75
    assert sum(call.startswith("main ") for call in stand_in.calls()) == starts


@pytest.mark.thorough
def test_a_process_that_is_killed_is_named(stand_in: StandIn) -> None:
    done = train(stand_in, "--killed=1", "--wait")
    assert done.returncode == 128 + signal.SIGKILL
    worker = f"rank 1 (local rank 1) on {socket.gethostname()}"
    assert said_of_the_end(done.stderr) == [f"error: {worker} was killed by signal 9 (SIGKILL)"]


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, ROOT / "scripts" / "torchrun.py", *arguments], check=False)


@pytest.mark.thorough
def test_torchruns_own_errors_are_shown() -> None:
    done = torchrun("--no-such-option", ROOT / "main_training.py")
    assert done.returncode == 2 and done.stderr.startswith("usage: torchrun")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=0,read_timeout=1", "--rdzv-id=job")
    done = torchrun("--nnodes=2", "--rdzv-backend=c10d", *meeting, ROOT / "main_training.py")
    assert done.returncode == 1 and "RendezvousConnectionError" in done.stderr
