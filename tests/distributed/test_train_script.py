"""train.sh with several processes hands signals to all of them, through a real torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import plain_environment, run_command
from stand_in import StandIn

TORCHRUN = f'#!/usr/bin/env bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_every_process_gets_the_signal_once(tmp_path: Path, number: signal.Signals) -> None:
    stand_in = StandIn(tmp_path)
    stand_in.add_program("torchrun", TORCHRUN)
    run_command(["bash", stand_in.root / "scripts" / "setup.sh"], stand_in.variables())
    command = ["bash", str(stand_in.root / "scripts" / "train.sh"), "--use_dummy_dataset=true", "--wait"]
    environment = plain_environment(stand_in.variables(NPROC="2"))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
    assert stand_in.calls().count(f"signal {number.name}") == 2
    assert sum(call.startswith("signal") for call in stand_in.calls()) == 2


def test_a_process_that_fails_makes_the_script_fail(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path)
    stand_in.add_program("torchrun", TORCHRUN)
    command: list[str | Path] = ["bash", stand_in.root / "scripts" / "train.sh", "--use_dummy_dataset=true"]
    done = run_command(command, stand_in.variables(NPROC="2", EXIT_CODE="5"), check=False)
    assert done.returncode == 1
