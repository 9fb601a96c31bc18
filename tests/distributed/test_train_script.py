"""train.sh with several processes: signals go in to all of them, and exit codes and messages come out as they are."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, free_ports, heed_interrupts, plain_environment, run_command
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


@pytest.mark.parametrize(
    ("number", "code"), first_quick((signal.SIGTERM, 7), (signal.SIGINT, 128 + signal.SIGINT), (signal.SIGUSR1, 7))
)
def test_every_process_gets_the_signal_once(stand_in: StandIn, number: signal.Signals, code: int) -> None:
    """What the processes make of it is the exit code, but for an interrupt."""
    command = ["bash", str(stand_in.root / "scripts" / "train.sh"), CHOICE, "--wait"]
    environment = plain_environment(stand_in.variables(NPROC="2"))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_interrupts
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code
    assert said_of_the_end(stderr) == []
    assert stand_in.calls().count(f"signal {number.name}") == 2
    assert sum(call.startswith("signal") for call in stand_in.calls()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_a_script_that_is_killed_leaves_no_process_behind(stand_in: StandIn) -> None:
    """The workers are told to end by SIGTERM, in their own time."""
    command = ["bash", str(stand_in.root / "scripts" / "train.sh"), CHOICE, "--wait"]
    environment = plain_environment(stand_in.variables(NPROC="2"))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert [script.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        script.kill()
        assert script.stdout.read() == ""  # until everybody who could write there has ended
    assert stand_in.calls().count("signal SIGTERM") == 2


def test_torchrun_does_not_begin_where_its_script_is_gone(tmp_path: Path) -> None:
    done = torchrun("--standalone", tmp_path / "program.py", PRETRAINING_SCRIPT_PID="1")
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")


@pytest.mark.parametrize("code", first_quick(75, 0, 1))
def test_the_exit_code_of_the_processes_is_returned_and_nothing_is_added(stand_in: StandIn, code: int) -> None:
    done = train(stand_in, EXIT_CODE=str(code))
    assert done.returncode == code
    assert said_of_the_end(done.stderr) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("code", "starts"), [("1", 3), ("75", 1), ("130", 1)])
def test_a_run_that_fails_is_started_again_and_one_that_was_told_to_end_is_not(
    stand_in: StandIn, code: str, starts: int
) -> None:
    done = train(stand_in, NPROC="1", EXIT_CODE=code, MAX_RESTARTS="2")
    assert done.returncode == int(code)
    assert sum(call.startswith("main ") for call in stand_in.calls()) == starts


@pytest.mark.thorough
@pytest.mark.parametrize(("time_is_over", "starts"), [(False, 3), (True, 1)])
def test_where_machines_come_and_go_only_a_time_limit_keeps_a_run_that_was_told_to_end_from_going_on(
    stand_in: StandIn, time_is_over: bool, starts: int
) -> None:
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
    assert said_of_the_end(done.stderr) == [f"error: {worker} was ended by signal 9 (SIGKILL)"]


def torchrun(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, ROOT / "scripts" / "torchrun.py", *arguments]
    return run_command(command, variables, check=False)


@pytest.mark.thorough
def test_a_wrong_flag_is_one_error_of_the_whole_job() -> None:
    done = torchrun("--standalone", "--nproc-per-node=2", ROOT / "main_training.py", "--modle_variant=tiny")
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "error" in line.lower())
    assert line.startswith("error: ")
    assert done.stderr.count("model_variant") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_torchruns_own_errors_are_shown() -> None:
    done = torchrun("--nproc-per-node=two", ROOT / "main_training.py")
    assert done.returncode == 1
    assert "Unsupported nproc_per_node value: two" in done.stderr
    done = torchrun("--no-such-option", ROOT / "main_training.py")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: torchrun")


@pytest.mark.thorough
def test_machines_that_do_not_meet_are_an_error_that_is_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=0,read_timeout=1", "--rdzv-id=job")
    done = torchrun("--nnodes=2", "--rdzv-backend=c10d", *meeting, ROOT / "main_training.py")
    assert done.returncode == 1
    assert "RendezvousConnectionError" in done.stderr
