"""A CPU that other programs use, too, and control groups that leave a run less of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment
from training_runs import TINY, reports_of

from pretraining.launch.cpu_threads import WAITING
from pretraining.launch.machine import CGROUPS, physical_cores

STEPS = 4
SHORT_SPIN = "GOMP_SPINCOUNT = '2000'"
"""Line of GNU's OpenMP about itself, with OMP_DISPLAY_ENV."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch brings GNU's OpenMP on Linux")


def command(run: Path, *flags: str) -> list[str]:
    program = [sys.executable, str(ROOT / "main_training.py")]
    return [*program, *TINY, "use_dummy_dataset=true", "batch_size=4", f"ckpt_save_path={run}", *flags]


def variables(**changes: str) -> dict[str, str]:
    """Those of a user who has said nothing about threads."""
    unset = ("OMP_NUM_THREADS", *WAITING)
    return {name: value for name, value in plain_environment().items() if name not in unset} | changes


def train(run: Path, *flags: str, before: Callable[[], None] | None = None, **changes: str) -> str:
    """Trains to the end of an invocation; returns what was printed."""
    environment = variables(**changes)
    done = subprocess.run(
        command(run, *flags),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=before,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def world_of(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    world: dict[str, Any] = json.loads(newest.read_text())["world"]
    return world


@contextmanager
def busy_loops() -> Iterator[None]:
    """Two programs for each CPU that want it all the time."""
    count = 2 * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.thorough
def test_beside_busy_programs_threads_spin_briefly_and_compute_the_same(tmp_path: Path) -> None:
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    flags = ("cpu_threads=2", "hidden_size=128", "intermediate_size=256", "seq_length=128", f"num_steps={STEPS}")
    with busy_loops():
        said = train(shared, *flags, OMP_DISPLAY_ENV="VERBOSE")
    assert said.count(SHORT_SPIN) == 1
    assert SHORT_SPIN not in train(alone, *flags, OMP_DISPLAY_ENV="VERBOSE", OMP_WAIT_POLICY="ACTIVE")
    losses = [[report["loss"] for report in reports_of(run)] for run in (shared, alone)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert world_of(shared)["cpu_threads"] == 2


@pytest.mark.thorough
def test_every_worker_of_torchrun_and_the_console_script_spin_briefly(tmp_path: Path) -> None:
    torchrun = [sys.executable, str(ROOT / "scripts" / "torchrun.py"), "--standalone", "--nproc-per-node=2"]
    console = [sys.executable, "-m", "pretraining", "train"]
    settings = command(tmp_path / "run", "num_steps=1")[1:]
    for program, processes in (([*torchrun, *settings], 2), ([*console, *settings[1:]], 1)):
        done = subprocess.run(
            program,
            env=variables(OMP_DISPLAY_ENV="VERBOSE"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0 and done.stdout.count(SHORT_SPIN) == processes, done.stdout


@contextmanager
def group_of_one_cpu() -> Iterator[Path]:
    """A control group with the time of one CPU."""
    is_old = (CGROUPS / "cpu").is_dir()
    group = (CGROUPS / "cpu" if is_old else CGROUPS) / f"pretraining-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("cpu.cfs_quota_us" if is_old else "cpu.max")).write_text("100000" if is_old else "100000 100000")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.skipif(physical_cores(os.sched_getaffinity(0)) < 2, reason="one core is one thread anyway")
def test_a_quota_bounds_the_threads_and_a_resume_without_a_quota_keeps_them(tmp_path: Path) -> None:
    with group_of_one_cpu() as group:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        limited = train(tmp_path, "num_steps=4", "run_steps=2", before=enter, OMP_DISPLAY_ENV="VERBOSE")
    assert "over 1 x cpu, 1 thread each" in limited and SHORT_SPIN in limited
    assert world_of(tmp_path)["cpu_threads"] == 1
    assert "cpu_threads is 1 as before" in train(tmp_path, "num_steps=4")
    assert world_of(tmp_path)["cpu_threads"] == 1
