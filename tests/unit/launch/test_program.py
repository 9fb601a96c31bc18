from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment

BUFFERED = plain_environment({"PYTHONUNBUFFERED": ""})
BEGIN = "import atexit, ctypes, os, sys, threading\nfrom pretraining.launch.program import run_as_program\n"


def run_program(program: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate process with buffered output."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=ROOT,
        env=BUFFERED,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("lambda: 3", (0, "", "")),
        ("lambda: sys.exit('no such thing')", (1, "", "no such thing\n")),
        ("lambda: sys.exit(75)", (75, "", "")),
    ],
)
def test_the_exit_code_of_a_command_is_the_programs(command: str, ended: tuple[int, str, str]) -> None:
    assert outcome(run_program(f"run_as_program({command})")) == ended
    without_output = "os.close(1)\nsys.stdout = None\n"
    assert outcome(run_program(f"{without_output}run_as_program({command})")) == ended


@pytest.mark.parametrize(("error", "code"), [("ZeroDivisionError", 1), ("KeyboardInterrupt", 130)])
def test_a_bug_keeps_its_traceback(error: str, code: int) -> None:
    done = run_program(f"def command():\n    print('begun')\n    raise {error}\nrun_as_program(command)")
    assert (done.returncode, done.stdout) == (code, "begun\n")
    assert done.stderr.startswith("Traceback") and "in command\n" in done.stderr


def test_all_output_is_written_also_of_exit_handlers_and_libraries() -> None:
    program = (
        "def command():\n"
        "    for number in range(20_000):\n        print(number)\n"
        "    ctypes.CDLL(None).puts(b'from C')\n"
        "    sys.stderr.write('no line')\n"
        "    atexit.register(print, 'the last word')\n"
        "run_as_program(command)"
    )
    code, stdout, stderr = outcome(run_program(program))
    assert code == 0 and stderr == "no line"
    assert stdout.splitlines() == [*map(str, range(20_000)), "the last word", "from C"]


@pytest.mark.parametrize(
    "trouble",
    {
        "a thread that never ends": "threading.Thread(target=threading.Event().wait).start()",
        "C code that aborts in its exit handler": "ctypes.CDLL(None).__cxa_atexit(ctypes.CDLL(None).abort, None, None)",
        "a destructor that aborts": "sys.kept = type('Kept', (), {'__del__': lambda self, abort=os.abort: abort()})()",
        "a handler that fails": "atexit.register(lambda: 1 / 0)",
    }.values(),
)
def test_errors_during_shutdown_do_not_change_the_exit_code(trouble: str) -> None:
    program = f"def command():\n    {trouble}\n    print('done')\n    sys.exit(75)\nrun_as_program(command)"
    done = run_program(program)
    assert (done.returncode, done.stdout) == (75, "done\n")
