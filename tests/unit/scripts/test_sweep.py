from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from scripts.benchmark.measure.sweep import Combination, take_turn


def test_a_sweep_that_is_ended_ends_its_job_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is in a session of its own: nothing else would end it."""
    real, started = subprocess.Popen, []

    def endless(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", "while True: pass"], start_new_session=True))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", endless)
    monkeypatch.setattr(time, "sleep", lambda seconds: sys.exit(143))  # as the handler of SIGTERM does
    with pytest.raises(SystemExit):
        take_turn(Combination({"batch_size": "1"}), [], processes=1, steps=10)
    [job] = started
    assert job.returncode == -signal.SIGKILL
