from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment

BUFFERED = plain_environment({"PYTHONUNBUFFERED": ""})
BEGIN = "import atexit, ctypes, os, sys, threading\nfrom pretraining.launch.program import run_as_program\n"


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate process with buffered output."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=ROOT,
        env=BUFFERED,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [("3", 0, ""), ("sys.exit('no such thing')", 1, "no such thing\n"), ("sys.exit(75)", 75, "")],
)
@pytest.mark.parametrize("begin", ["", "os.close(1)\nsys.stdout = None\n"], ids=["", "without output"])
def test_the_exit_code_of_a_command_is_the_programs(begin: str, command: str, code: int, stderr: str) -> None:
    done = run_program(f"{begin}run_as_program(lambda: {command})")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", stderr)


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
    done = run_program(program)
    assert done.returncode == 0 and done.stderr == "no line"
    assert done.stdout.splitlines() == [*map(str, range(20_000)), "the last word", "from C"]


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
