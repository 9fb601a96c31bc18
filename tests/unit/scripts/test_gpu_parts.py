"""What waits for a GPU runs in parts that fit their time, with flags that exist; what fails is named."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_starts import pretend_a_gpu, start
from helpers import ROOT, plain_environment

from scripts.benchmark import gpu_parts
from scripts.benchmark.gpu_parts import PART_SECONDS, PARTS, Task, listing, main, reason_of_failure, run_part

TASKS = [task for tasks in PARTS.values() for task in tasks]
FINE = "pass"


def test_no_part_takes_more_than_nine_minutes() -> None:
    assert PART_SECONDS == 9 * 60
    assert {part: sum(task.seconds for task in tasks) for part, tasks in PARTS.items() if tasks} == {
        part: pytest.approx(PART_SECONDS, abs=PART_SECONDS * 0.15) for part in PARTS
    }
    assert all(sum(task.seconds for task in tasks) <= PART_SECONDS for tasks in PARTS.values())


@pytest.mark.parametrize("task", [task for task in TASKS if "benchmark" in task.arguments], ids=lambda t: t.arguments)
def test_every_benchmark_takes_the_flags_that_it_is_given(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *flags = shlex.split(task.arguments)
    pretend_a_gpu(monkeypatch)
    assert start(module.removeprefix("scripts.benchmark."), *flags, "--check_flags") is None


def test_every_test_of_a_gpu_is_in_the_part_of_tests() -> None:
    named = {word for task in TASKS for word in task.arguments.split() if word.endswith(".py")}
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


@pytest.mark.thorough
def test_pytest_takes_its_flags() -> None:
    words = [word for word in PARTS["tests"][0].arguments.split() if not word.endswith(".py")]
    command = [sys.executable, "-m", *words, "--collect-only", "tests/gpu/test_loss.py"]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "test_loss.py" in done.stdout, done.stderr


def test_the_listing_has_all_commands_with_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PARTS) + len(TASKS)
    assert lines[0].startswith("# tests, at most 540 s") and "timeout --kill-after=10 240 python -m pytest" in lines[1]
    assert listing(["races"]).count("\n") == len(PARTS["races"])


@pytest.mark.parametrize(("flags", "problem"), [([], "which part? One of tests"), (["all"], "invalid choice: 'all'")])
def test_a_part_has_to_be_named(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2 and problem in capsys.readouterr().err


def test_without_a_gpu_the_script_says_so_in_a_line(tmp_path: Path) -> None:
    environment = plain_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable})
    command = ["bash", "scripts/benchmark/on_gpu.sh", "tests", f"--output={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("on_gpu: error: PyTorch ") and line.endswith(" sees no GPU here")
    assert not (tmp_path / "out").exists()


def test_the_script_ends_where_its_wheels_are_not_there(tmp_path: Path) -> None:
    environment = plain_environment({"PYTHON": sys.executable, "TMPDIR": str(tmp_path)})
    command = ["bash", "scripts/benchmark/on_gpu.sh", "tests", f"--wheels={tmp_path / 'none'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "error: there is no wheel in" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules `python -m` finds."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    return folder


def test_what_fails_is_named_and_the_next_command_goes_on(
    modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "measures.py").write_text(
        "import json, os\n"
        "with open(os.environ['BENCHMARK_RESULTS'], 'a') as file:\n"
        "    file.write(json.dumps({'command': 'c', 'machine': 'm', 'row': {'model': '1b', 'MFU': '51%'}}) + '\\n')\n"
        "print('measured')\n"
    )
    (modules / "fails.py").write_text("import no_such_package\n")
    (modules / "hangs.py").write_text("while True: pass\n")
    tasks = [Task(100, "fails"), Task(1, "hangs"), Task(100, "measures", "MFU", 0.5)]
    assert run_part("races", tasks, tmp_path / "out", FINE) == 1
    results = [json.loads(line) for line in (tmp_path / "out" / "races.jsonl").read_text().splitlines()]
    failures = [result["failure"] for result in results if "failure" in result]
    assert failures == ["ModuleNotFoundError: No module named 'no_such_package'", "it ran past its 1 s", None]
    text = (tmp_path / "out" / "races.md").read_text()
    assert "| 1b    | 51% |" in text and "Goal: MFU of at least 0.5: reached, 0.51." in text
    assert "measured" in (tmp_path / "out" / "races.log").read_text()
    out = capsys.readouterr().out
    assert "races 2/3  timeout --kill-after=10 1 python -m hangs" in out
    assert "races: 1 of 3 commands ended well" in out


@pytest.mark.parametrize(
    ("name", "failure"), [("SIGKILL", "it was killed, for memory perhaps"), ("SIGSEGV", "it was ended by SIGSEGV")]
)
def test_a_command_that_a_signal_has_ended_is_named_so(name: str, failure: str, modules: Path, tmp_path: Path) -> None:
    (modules / "dies.py").write_text(f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    assert run_part("races", [Task(100, "dies")], tmp_path, FINE) == 1
    assert json.loads((tmp_path / "races.jsonl").read_text())["failure"] == failure
    assert f"s: {failure}" in (tmp_path / "races.md").read_text()


def test_a_gpu_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_parts, "PREFLIGHT_SECONDS", 1)
    assert run_part("races", [], tmp_path / "out", "while True: pass") == 1
    assert "the GPU, or the import of the project, did not answer within 1 s" in capsys.readouterr().err


def test_a_part_that_ended_well_says_so_and_begins_with_empty_files(modules: Path, tmp_path: Path) -> None:
    (modules / "fine.py").write_text("print('done')\n")
    for _ in range(2):
        assert run_part("kernels", [Task(100, "fine")], tmp_path, FINE) == 0
    [outcome] = map(json.loads, (tmp_path / "kernels.jsonl").read_text().splitlines())
    assert outcome["failure"] is None and outcome["said"] == "done"
    assert (tmp_path / "kernels.log").read_text() == "done\n"


def test_no_command_is_tried_where_none_could_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_part("races", [Task(100, "fine")], tmp_path / "out", "import no_such_package") == 1
    assert capsys.readouterr().err == "on_gpu: error: ModuleNotFoundError: No module named 'no_such_package'\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("error: --batch_size=0: too small\n", "--batch_size=0: too small"),
        ("step 1\ntorch.OutOfMemoryError: CUDA out of memory.\nmore\n", "torch.OutOfMemoryError: CUDA out of memory."),
        (
            "FAILED tests/gpu/test_loss.py::test_x - assert 1 | 2\n1 failed\n",
            "FAILED tests/gpu/test_loss.py::test_x - assert 1 / 2",
        ),
        ("usage: x\nx: the end\n", "x: the end"),
        ("", "failed without a word"),
    ],
)
def test_the_reason_is_the_line_that_tells_it(printed: str, reason: str) -> None:
    assert reason_of_failure(printed) == reason
