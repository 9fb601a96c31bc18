from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment

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
        text = (ROOT / "scripts" / script).read_text()
        assert re.findall(r"^trap (?:'exit 75'|:) ([A-Z0-9 ]*[A-Z0-9])", text, re.M) == [names], script


@pytest.mark.parametrize("number", PREEMPTION_SIGNALS)
def test_the_first_signal_is_recorded_and_ignored_ones_stay_ignored(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    for each in PREEMPTION_SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    ignored, *others = (each for each in PREEMPTION_SIGNALS if each is not number)
    signal.signal(ignored, signal.SIG_IGN)
    signals = ReceivedSignals().listen()
    assert signal.getsignal(ignored) is signal.SIG_IGN and signals.first is None
    for each in (ignored, number, *others, number):
        signal.raise_signal(each)
    lines = [f"\n{each.name}: the run stops before its next step\n" for each in (number, *others)]
    assert capfd.readouterr().err == "".join(lines)  # the first of each kind prints one
    assert signals.first is number


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, lambda *_: None])
def test_handlers_are_restored_after_the_block(handler: Any) -> None:
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, handler)
    with pytest.raises(ValueError), ReceivedSignals().listening() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert {n for n in PREEMPTION_SIGNALS if signal.getsignal(n) != handler} == set(EMBEDDED_SIGNALS)
        raise ValueError
    assert signals.first is signal.SIGUSR1 and not signals._listens
    assert {signal.getsignal(number) for number in PREEMPTION_SIGNALS} == {handler}


def run_python(program: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=plain_environment(environment),
        cwd=ROOT,
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
@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PALS_RANKID"])
def test_an_interrupt_during_imports_is_a_line_of_one_process(variable: str, rank: str, said: str) -> None:
    done = run_python(INTERRUPTED_IMPORT, {variable: rank})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_after_imports_python_handles_sigint_again_and_background_jobs_still_ignore_it(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with exit_at_interrupt(""):
        assert (signal.getsignal(signal.SIGINT) is handler) == (handler is signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is handler
