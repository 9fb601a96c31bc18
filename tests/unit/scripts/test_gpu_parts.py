"""What waits for a GPU runs in parts that fit their time, with flags that exist; what fails is named."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from benchmark_starts import pretend_a_gpu, start
from helpers import ROOT

from scripts.benchmark.gpu_parts import PART_SECONDS, PARTS, Task, run_part

TASKS = [task for tasks in PARTS.values() for task in tasks]


def test_no_part_takes_more_than_nine_minutes() -> None:
    assert all(0 < sum(task.seconds for task in tasks) <= PART_SECONDS == 9 * 60 for tasks in PARTS.values())


@pytest.mark.thorough
@pytest.mark.parametrize("task", [task for task in TASKS if "benchmark" in task.arguments], ids=lambda t: t.arguments)
def test_every_benchmark_takes_the_flags_that_it_is_given(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *flags = shlex.split(task.arguments)
    pretend_a_gpu(monkeypatch)
    assert start(module.removeprefix("scripts.benchmark."), *flags, "--check_flags") is None


def test_every_test_of_a_gpu_is_in_the_part_of_tests() -> None:
    named = {word for task in TASKS for word in task.arguments.split() if word.endswith(".py")}
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_what_fails_is_named_and_the_next_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    for name, code in (
        ("measures", "print('measured')"),
        ("fails", "import no_such_package"),
        ("hangs", "while True: pass"),
        ("dies", "import os; os.kill(os.getpid(), 9)"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
    tasks = [Task(100, "fails"), Task(1, "hangs"), Task(100, "dies"), Task(100, "measures")]
    assert run_part("races", tasks, tmp_path / "out", "pass") == 1
    results = map(json.loads, (tmp_path / "out" / "races.jsonl").read_text().splitlines())
    assert [result["failure"] for result in results] == [
        "ModuleNotFoundError: No module named 'no_such_package'",
        "it ran past its time",
        "it was killed, for memory perhaps",
        None,
    ]
    assert "measured" in (tmp_path / "out" / "races.log").read_text()
