"""Steps/s of the demo's model beside programs that use the same cores, by how PyTorch's threads wait.

    python -m scripts.benchmark.measure.shared_cpu
    python -m scripts.benchmark.measure.shared_cpu --rounds=3 --seconds=2

It makes the load itself: loops of Python that do nothing. One process for each way of waiting (launch/shared_cores.py)
trains on made-up tokens and stands still but for its turns; turns alternate, so that all ways meet each load in the
same minutes. Nothing else may use the machine meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pretraining.launch.cpu_threads import THREADS
from pretraining.launch.shared_cores import WAITING

ROOT = Path(__file__).parents[3]
DEMO = (
    *("recipe=demo", "use_dummy_dataset=true", "data_path=none", "tokenizer_path=none", "held_out_fraction=0"),
    *("num_steps=1000000", "checkpoint_interval=0", "tracker=", "progress=plain"),
)
LOADS = (0, 1, 2, 6)
BASELINE = "libgomp's default"
WAYS: dict[str, dict[str, str]] = {
    "chosen": {},
    BASELINE: {"GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {THREADS: "1"},
}
SETTLING_SECONDS = 2.5
"""Of training ahead of each turn: a run looks every half second whether others want its cores."""


def measured_run(settings: list[str]) -> None:
    """In a measured process: trains as the command does, for as many seconds as each line of its input says."""
    from pretraining.cli import train_command
    from pretraining.launch.cpu_threads import set_threads
    from pretraining.launch.layout import resolve_layout

    set_threads(None, resolve_layout())  # before the loop is imported, and torch with it
    from pretraining.train import loop

    step = loop.train_step
    steps, began, ends = 0, 0.0, 0.0

    def in_turns(*arguments: object) -> object:
        nonlocal steps, began, ends
        now = time.perf_counter()
        if now >= ends:
            print(json.dumps({"steps": steps, "seconds": now - began}), flush=True)
            asked = sys.stdin.readline()
            if not asked:
                raise SystemExit  # an error ends the loop without a checkpoint
            began = time.perf_counter()
            steps, ends = 0, began + float(asked)
        steps += 1
        return step(*arguments)  # type: ignore[arg-type]

    loop.train_step = in_turns  # type: ignore[assignment]
    train_command(settings, {})


@dataclass(frozen=True)
class Contender:
    """A process that trains when it is its turn."""

    process: subprocess.Popen[str]

    def answer(self) -> float:
        """Waits for the end of a turn; returns its steps a second."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                turn = json.loads(line)
                return float(turn["steps"] / turn["seconds"])
        sys.exit("a measured process failed: its error stands above")

    def train(self, seconds: float) -> float:
        """Trains that long; returns its steps a second."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return self.answer()


@contextmanager
def contender(environment: Mapping[str, str], settings: list[str]) -> Iterator[Contender]:
    """Start a process that trains, and end it with the `with` block."""
    program = (sys.executable, "-m", "scripts.benchmark.measure.shared_cpu", "measure")
    own = {name: value for name, value in os.environ.items() if name not in (THREADS, *WAITING)}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        process = subprocess.Popen(
            [*program, *DEMO, f"ckpt_save_path={folder}/run", *settings],
            cwd=ROOT,
            env={**own, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            started = Contender(process)
            started.answer()
            yield started
            process.kill()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run programs that want a core each, for the time of a `with` block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    from scripts.benchmark.common import Number, announce, announce_rest, parse, print_table, read_settings

    flags, settings = parse(
        "Steps/s beside other programs.",
        rounds=Number(5, "turns of each way at each load"),
        seconds=Number(3, "of a turn"),
    )
    read_settings([*DEMO, *settings])
    announce(flags)
    announce_rest(flags.rounds * len(LOADS) * len(WAYS) * (flags.seconds + SETTLING_SECONDS))
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        contenders = {way: stack.enter_context(contender(variables, settings)) for way, variables in WAYS.items()}
        for _, load in itertools.product(range(flags.rounds), LOADS):
            for way, running in contenders.items():
                with busy_loops(load):
                    running.train(SETTLING_SECONDS)
                    rates.setdefault((way, load), []).append(running.train(flags.seconds))
    medians = {key: statistics.median(values) for key, values in rates.items()}
    baseline = medians[BASELINE, 0]
    print(f"\nshare of the rate that libgomp's default has alone, {baseline:.2f} steps/s\n")
    rows = [(way, *(f"{medians[way, load] / baseline:.2f}" for load in LOADS)) for way in WAYS]
    print_table(("busy loops", *map(str, LOADS)), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measured_run(sys.argv[2:])
    else:
        main()
