"""Steps/s of the demo's model while other programs use the same cores, by how PyTorch's threads wait.

    python -m scripts.benchmark.measure.shared_cpu
    python -m scripts.benchmark.measure.shared_cpu --rounds=3 --seconds=2

The load is empty Python loops. One process per way of waiting (launch/shared_cores.py) trains on dummy data, and is
stopped outside of its turns. Turns alternate, so that all ways meet each load in the same minutes. No other program may
use the machine meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pretraining.launch.cpu_threads import THREADS
from pretraining.launch.shared_cores import WAITING
from scripts.benchmark.common import (
    PRETRAIN,
    ROOT,
    Number,
    announce,
    flag_parser,
    parse_with_settings,
    print_table,
    read_settings,
)

DEMO = (
    *("recipe=demo", "use_dummy_dataset=true", "data_path=none", "tokenizer_path=none", "held_out_fraction=0"),
    *("num_steps=1000000", "checkpoint_interval=0", "report_interval=1", "tracker=none", "progress=plain"),
)
LOADS = (0, 1, 2)
BASELINE = "libgomp's default"
WAYS: dict[str, dict[str, str]] = {
    "chosen": {},
    BASELINE: {"GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=3000": {"GOMP_SPINCOUNT": "3000"},
}
SETTLING_SECONDS = 2.5
"""Training time before each turn: a run checks every half second whether other programs need its cores."""


class Contender:
    """A training process that is stopped between its turns."""

    def __init__(self, process: subprocess.Popen[bytes], metrics: Path) -> None:
        self._process, self._metrics = process, metrics

    def train(self, seconds: float) -> float:
        """Let the process train for some seconds after it settled; return steps per second."""
        self._process.send_signal(signal.SIGCONT)
        settled = self._reports_after(SETTLING_SECONDS)  # they include the step that was interrupted
        reports = self._reports_after(seconds)[len(settled) :]
        self._process.send_signal(signal.SIGSTOP)
        return len(reports) / sum(float(json.loads(report)["step_seconds"]) for report in reports)

    def _reports_after(self, seconds: float) -> list[str]:
        """Wait for some seconds and for a step; return the reports of all steps."""
        before = len(self._steps())
        time.sleep(seconds)
        while len(self._steps()) == before:
            if self._process.poll() is not None:
                sys.exit("a measured process failed: see its error above")
            time.sleep(0.05)
        return self._steps()

    def _steps(self) -> list[str]:
        """Return the complete lines of the run's metrics.jsonl."""
        text = self._metrics.read_text() if self._metrics.exists() else ""
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def contender(variables: dict[str, str], settings: list[str]) -> Iterator[Contender]:
    """Start a training process, and kill it at the end of the `with` block."""
    environment = {name: value for name, value in os.environ.items() if name not in (THREADS, *WAITING)}
    command = [*PRETRAIN, "train", *DEMO, *settings]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        process = subprocess.Popen(
            [*command, f"ckpt_save_path={folder}/run"],
            cwd=ROOT,
            env=environment | variables,
            stdout=subprocess.DEVNULL,
        )
        with process:
            try:
                started = Contender(process, Path(folder, "run", "logs", "metrics.jsonl"))
                started.train(0)
                yield started
            finally:
                process.kill()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run programs that use a core each during a `with` block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = flag_parser(
        "Steps/s while other programs run.",
        rounds=Number(5, "turns of each way at each load"),
        seconds=Number(3, "seconds per turn"),
    )
    flags, settings = parse_with_settings(parser)
    read_settings([*DEMO, *settings])
    announce(flags)
    rates: dict[tuple[str, int], list[float]] = {(way, load): [] for way in WAYS for load in LOADS}
    with ExitStack() as stack:
        contenders = {way: stack.enter_context(contender(variables, settings)) for way, variables in WAYS.items()}
        for _, load in itertools.product(range(flags.rounds), LOADS):
            for way, running in contenders.items():
                with busy_loops(load):
                    rates[way, load].append(running.train(flags.seconds))
    medians = {key: statistics.median(values) for key, values in rates.items()}
    baseline = medians[BASELINE, 0]
    print(f"\nfraction of the rate of libgomp's default without load, {baseline:.2f} steps/s")
    rows = [(way, *(f"{medians[way, load] / baseline:.2f}" for load in LOADS)) for way in WAYS]
    print_table(("busy loops", *map(str, LOADS)), rows)


if __name__ == "__main__":
    main()
