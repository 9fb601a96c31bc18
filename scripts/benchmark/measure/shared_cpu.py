"""Tokens/s of the demo's model beside programs that use the same cores, and in a control group of one CPU.

    python -m scripts.benchmark.measure.shared_cpu
    python -m scripts.benchmark.measure.shared_cpu --rounds=3 --seconds=2

It makes the load itself: loops of Python that do nothing. One process for each way of waiting (launch/shared_cores.py)
trains on made-up tokens and stands still but for its turns; turns alternate, so that all ways meet each load in the
same minutes. A turn counts only if nothing but the benchmark has used the machine: others are waited for, and a turn
that they have disturbed is repeated.
"""

from __future__ import annotations

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
from pretraining.launch.machine import CGROUPS, read_text, usable_cores
from pretraining.launch.shared_cores import WAITING

ROOT = Path(__file__).parents[3]
DEMO = (
    *("recipe=demo", "use_dummy_dataset=true", "data_path=none", "tokenizer_path=none", "held_out_fraction=0"),
    *("num_steps=1000000", "checkpoint_interval=0", "tracker=", "progress=plain"),
)
LOADS = (0, 1, 2, 6)
WAYS: dict[str, dict[str, str]] = {
    "chosen": {},
    "always awake (libgomp's default)": {"GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {THREADS: "1"},
}
SETTLING_SECONDS = 2.5
"""Of training ahead of each turn: a run looks every half second whether others want its cores."""
TICKS = os.sysconf("SC_CLK_TCK")


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
def contender(environment: Mapping[str, str], settings: list[str], group: Path | None = None) -> Iterator[Contender]:
    """Starts a process that trains, in a control group if one is given, and ends it with the `with` block."""
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
            preexec_fn=None if group is None else lambda: _enter(group),
        )
        with process:
            started = Contender(process)
            started.answer()
            yield started
            process.kill()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def busy_loops(count: int) -> Iterator[list[int]]:
    """Programs that want a core each, for the time of a `with` block; yields their process ids."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def group_of_one_cpu() -> Iterator[Path]:
    """A control group that leaves its processes the time of one CPU; an OSError where none may be made."""
    is_old = (CGROUPS / "cpu").is_dir()
    group = (CGROUPS / "cpu" if is_old else CGROUPS) / f"benchmark-{os.getpid()}"
    group.mkdir()
    try:
        if is_old:
            (group / "cpu.cfs_quota_us").write_text("100000")
        else:
            (group / "cpu.max").write_text("100000 100000")
        yield group
    finally:
        group.rmdir()


class Quiet:
    """Tells whether others use this machine, and waits until they do not.

    Args:
        patience: seconds to wait in all.
        allowed: share of the machine that others may use in a turn that counts.
    """

    def __init__(self, patience: float, allowed: float) -> None:
        self.waited, self._patience, self._allowed = 0.0, patience, allowed

    def turn(self, running: Contender, seconds: float, load: int = 0) -> float:
        """Trains for a turn beside so many busy loops, disturbed by nobody else; returns its steps a second."""
        while True:
            self._wait()
            with busy_loops(load) as loops:
                running.train(SETTLING_SECONDS)
                own = (os.getpid(), running.process.pid, *loops)
                began, busy, used = time.perf_counter(), _machine_seconds(), _process_seconds(own)
                rate = running.train(seconds)
                elapsed = time.perf_counter() - began
                others = _machine_seconds() - busy - (_process_seconds(own) - used)
            if others / elapsed / (os.cpu_count() or 1) <= self._allowed:
                return rate
            self._lose(elapsed)

    def _wait(self) -> None:
        """Waits for a second in which others leave the machine alone."""
        while True:
            began, busy = time.perf_counter(), _machine_seconds()
            time.sleep(1.0)
            elapsed = time.perf_counter() - began
            if (_machine_seconds() - busy) / elapsed / (os.cpu_count() or 1) <= self._allowed:
                return
            self._lose(elapsed)

    def _lose(self, seconds: float) -> None:
        self.waited += seconds
        if self.waited > self._patience:
            sys.exit(f"others use this machine: {self.waited:.0f} s were lost to them, and nothing was measured")


def _machine_seconds() -> float:
    """Time that all CPUs of the machine have worked, but for what a hypervisor has taken."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, read_text(Path("/proc/stat")).splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICKS


def _process_seconds(processes: tuple[int, ...]) -> float:
    """Time that CPUs have worked for some processes."""
    fields = [read_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split() for process in processes]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


def main() -> None:
    from scripts.benchmark.common import Number, announce, announce_rest, parse, read_settings

    flags, settings = parse(
        "Tokens/s beside other programs.",
        rounds=Number(5, "turns of each way at each load"),
        seconds=Number(3, "of a turn"),
        patience=Number(1200, "seconds to wait for other programs, in all"),
        others=Number(5, "percent of the machine that they may use in a turn that counts; 200 = whatever they do"),
    )
    read_settings([*DEMO, *settings])
    announce(flags)
    turns = len(LOADS) * len(WAYS) + 2
    announce_rest(flags.rounds * turns * (flags.seconds + SETTLING_SECONDS))  # and what it waits for other programs
    quiet = Quiet(flags.patience, flags.others / 100)
    _print_loads(flags.rounds, flags.seconds, settings, quiet)
    _print_quota(flags.rounds, flags.seconds, settings, quiet)
    print(f"\ndisturbed by others and repeated: {quiet.waited:.0f} s")


def _print_loads(rounds: int, seconds: float, settings: list[str], quiet: Quiet) -> None:
    from scripts.benchmark.common import print_table

    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        contenders = {way: stack.enter_context(contender(variables, settings)) for way, variables in WAYS.items()}
        for _ in range(rounds):
            for load in LOADS:
                for way, running in contenders.items():
                    rates.setdefault((way, load), []).append(quiet.turn(running, seconds, load))
    medians = {key: statistics.median(values) for key, values in rates.items()}
    baseline = medians["always awake (libgomp's default)", 0]
    print(f"\nshare of the rate that libgomp's default has alone, {baseline:.2f} steps/s; {usable_cores()} cores\n")
    rows = [(way, *(f"{medians[way, load] / baseline:.2f}" for load in LOADS)) for way in WAYS]
    print_table(("busy loops", *map(str, LOADS)), rows)


def _print_quota(rounds: int, seconds: float, settings: list[str], quiet: Quiet) -> None:
    try:
        with (
            group_of_one_cpu() as group,
            contender({}, settings, group) as limited,
            contender(WAYS["one thread"], settings) as single,
        ):
            pairs = [(quiet.turn(limited, seconds), quiet.turn(single, seconds)) for _ in range(rounds)]
    except OSError as error:
        print(f"\nin a control group of one CPU: not measured, none can be made here ({error})")
        return
    ratio = statistics.median(mine / free for mine, free in pairs)
    print(f"\nin a control group of one CPU: {ratio:.2f} of the rate of one thread without a limit")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measured_run(sys.argv[2:])
    else:
        main()
