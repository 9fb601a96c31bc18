from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers import ROOT, plain_environment

from scripts.benchmark.measure.sweep import Combination, take_turn

SWEEP = [sys.executable, "-m", "scripts.benchmark.measure.sweep"]
SMALL = ("--model_variant=tiny", "--hidden_size=32", "--num_attention_heads=4", "--intermediate_size=64")
SMALLER = (*SMALL, "--num_hidden_layers=1", "--vocab_size=64", "--seq_length=32", "--steps=10")


def sweep(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWEEP, *flags], cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_every_combination_has_a_row_and_a_bar_and_what_is_refused_its_reason(tmp_path: Path) -> None:
    done = sweep("--vary=batch_size:2,0", *SMALLER, f"--output={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "out" / "sweep.md").read_text().splitlines()[2:]
    assert rows[0].startswith("| 2 ") and "batch_size=0: the smallest value is 1" in rows[1]
    good, bad = (json.loads(line) for line in (tmp_path / "out" / "sweep.jsonl").read_text().splitlines())
    assert [report["step"] for report in good["reports"]] == [10] and good["failure"] is None
    assert bad["reports"] == [] and "batch_size" in bad["failure"]
    picture = ElementTree.parse(tmp_path / "out" / "sweep.svg")
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"batch_size=2", "batch_size=0"} <= set(texts) and bad["failure"] in texts


@pytest.mark.slow
def test_what_is_no_sweep_is_refused() -> None:
    for flags, message in (
        (["--vary=batch_size"], "is not of the form"),
        (["--vary=batch_size:1,"], "is not of the form"),
        (["--vary=batch_size:1", "--steps=5"], "--steps: must be 10 or more"),
        ([], "--vary"),
    ):
        done = sweep(*flags)
        assert done.returncode == 2 and message in done.stderr


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
