from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import PATIENCE_SECONDS, ROOT, heed_interrupts, plain_environment

from pretraining.launch.signals import EMBEDDED_SIGNALS, PREEMPTION_SIGNALS, ReceivedSignals, exit_at_interrupt


@pytest.fixture(autouse=True)
def handlers_restored() -> Iterator[None]:
    """Leave this process its handlers."""
    before = {number: signal.getsignal(number) for number in (*PREEMPTION_SIGNALS, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_scripts_list_the_signals_of_the_table() -> None:
    names = " ".join(number.name.removeprefix("SIG") for number in PREEMPTION_SIGNALS)
    for script in ("train.sh", "train.slurm"):
        (trapped,) = re.findall(
            r"^trap (?:'exit 75'|:) ([A-Z0-9 ]*[A-Z0-9])", (ROOT / "scripts" / script).read_text(), re.M
        )
        assert trapped == names, script


@pytest.mark.parametrize("number", PREEMPTION_SIGNALS)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    for each in PREEMPTION_SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    signal.signal(number, signal.SIG_IGN)
    ReceivedSignals().listen()
    handlers = {each: signal.getsignal(each) for each in PREEMPTION_SIGNALS}
    assert [each for each, handler in handlers.items() if handler is signal.SIG_IGN] == [number]
    assert signal.SIG_DFL not in handlers.values()


@pytest.mark.parametrize("number", PREEMPTION_SIGNALS)
def test_the_first_signal_is_recorded_and_nothing_else_happens(number: signal.Signals) -> None:
    for each in PREEMPTION_SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    signals = ReceivedSignals().listen()
    assert signals.first is None
    signal.raise_signal(number)
    for again in PREEMPTION_SIGNALS:
        signal.raise_signal(again)
    assert signals.first is number


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, lambda *_: None])
def test_handlers_are_restored_after_the_block(handler: Any) -> None:
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, handler)
    with pytest.raises(ValueError), ReceivedSignals().listening() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert {n for n in PREEMPTION_SIGNALS if signal.getsignal(n) != handler} == set(EMBEDDED_SIGNALS)
        with signals.recording_interrupts():
            pass
        raise ValueError
    assert signals.first is signal.SIGUSR1 and not signals._listens
    assert {signal.getsignal(number) for number in PREEMPTION_SIGNALS} == {handler}


def run_python(
    program: str, environment: dict[str, str] | None = None, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=plain_environment(environment),
        cwd=ROOT,
        preexec_fn=heed_interrupts,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


INTERRUPTED_IMPORT = """
import signal
from pretraining.launch.signals import exit_at_interrupt
with exit_at_interrupt("interrupted"):
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        raise SystemExit("a library made something else of it")
"""


@pytest.mark.parametrize(("rank", "said"), [("0", "interrupted\n"), ("3", "")])
def test_an_interrupt_during_imports_is_a_line_of_one_process(rank: str, said: str) -> None:
    done = run_python(INTERRUPTED_IMPORT, {"RANK": rank})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_after_imports_python_handles_sigint_again_and_background_jobs_still_ignore_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            with exit_at_interrupt(""):
                assert (signal.getsignal(signal.SIGINT) is handler) == (handler is signal.SIG_IGN)
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


WORKER = """
import signal, sys
from pretraining.launch.signals import terminate_with_launcher
signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
terminate_with_launcher()
print("ready", flush=True)
signal.pause()
"""

LAUNCHER = """
import os, signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_a_process_gets_sigterm_when_its_torchrun_is_killed() -> None:
    done = run_python(LAUNCHER, {"TORCHELASTIC_RUN_ID": "1"}, WORKER)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "told to end\n")  # the worker has the same stderr
