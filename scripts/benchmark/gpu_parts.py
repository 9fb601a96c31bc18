"""What waits for a GPU, in parts of at most nine minutes, without a network.

    bash scripts/benchmark/on_gpu.sh --list
    bash scripts/benchmark/on_gpu.sh throughput --output=results

    part -> is there a GPU, and does the project run on it? -> its commands, each with a time limit
         -> PART.log what they printed, PART.jsonl their results as they came, PART.md the tables made from these

A command that fails, or runs out of time, is named with the reason, and the next one goes on; what was measured is
kept. No command is tried where none could run: without a GPU, or where the project cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmark.tables import Outcome, report

ROOT = Path(__file__).parents[2]
PART_SECONDS = 540
KILL_AFTER_SECONDS = 10
SHOWN_LINES = 25
PREFLIGHT = """
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"PyTorch {torch.__version__} sees no GPU here")
import pretraining.train.build
matrix = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
(matrix @ matrix).sum().item()
"""
PREFLIGHT_SECONDS = 90


@dataclass(frozen=True)
class Task:
    """A command of a part: the arguments of `python -m`, and the seconds after which it is ended."""

    seconds: int
    arguments: str

    def command(self, python: str = "python") -> list[str]:
        """Return the command with its time limit."""
        limit = ["timeout", f"--kill-after={KILL_AFTER_SECONDS}", str(self.seconds)]
        return [*limit, python, "-m", *self.arguments.split()]


PYTEST = "pytest -p no:cacheprovider -v --durations=5"
SMALL = "--model_variant=125m --seq_length=1024"
ONE_B = "--model_variant=1b --seq_length=4096"
EIGHT_B = "--model_variant=llama3_8b --num_hidden_layers=8 --seq_length=8192"
"""As wide as 8b and as deep as one GPU holds with its optimizer."""
COMPILED, CHECKPOINTED = "--use_torch_compile=true", "--fsdp_activation_checkpointing=true"
SCALINGS = ("none", "tensorwise", "rowwise")
MEASURE, COMPARE = "scripts.benchmark.measure", "scripts.benchmark.compare"

PARTS = {
    "tests": (
        Task(
            240,
            f"{PYTEST} tests/gpu/test_attention.py tests/gpu/test_loss.py tests/gpu/test_no_waiting.py "
            "tests/gpu/test_profiler.py tests/gpu/test_training.py",
        ),
        Task(300, f"{PYTEST} tests/gpu/test_whole_runs.py"),
    ),
    # What compiles has a part of its own: a first time takes minutes.
    "levers_tests": (Task(540, f"{PYTEST} tests/gpu/test_levers.py"),),
    "float8_tests": (Task(540, f"{PYTEST} tests/gpu/test_float8.py"),),
    "throughput": (
        Task(90, f"{MEASURE}.throughput {SMALL} --batch_size=64 {COMPILED}"),
        Task(100, f"{MEASURE}.throughput {ONE_B} --batch_size=8 {COMPILED}"),
        Task(110, f"{MEASURE}.throughput {EIGHT_B} --batch_size=2 {COMPILED}"),
        Task(70, f"{MEASURE}.throughput {ONE_B} --batch_size=8 --steps=20"),
        Task(70, f"{MEASURE}.throughput {ONE_B} --batch_size=8 --steps=20 {CHECKPOINTED}"),
        Task(100, f"{MEASURE}.throughput {ONE_B} --batch_size=8 --steps=20 {CHECKPOINTED} {COMPILED}"),
    ),
    "float8_8b": tuple(
        Task(180, f"{MEASURE}.throughput --float8={each} {EIGHT_B} --batch_size=2 {COMPILED}") for each in SCALINGS
    ),
    "float8_1b": tuple(
        Task(180, f"{MEASURE}.throughput --float8={each} {ONE_B} --batch_size=8 {COMPILED}") for each in SCALINGS
    ),
    "races": (
        Task(110, f"{COMPARE}.against_trainer {SMALL} --batch_size=16 {COMPILED} --rounds=8"),
        Task(110, f"{COMPARE}.against_torchtitan {SMALL} --batch_size=16 {COMPILED} --rounds=8"),
        Task(120, f"{COMPARE}.against_trainer {ONE_B} --batch_size=2 {COMPILED} --rounds=6"),
        Task(120, f"{COMPARE}.against_torchtitan {ONE_B} --batch_size=2 {COMPILED} --rounds=6"),
        Task(80, f"{COMPARE}.against_ddp {SMALL} --batch_size=16 --processes=1 --rounds=8"),
    ),
    "checkpoints": (Task(540, f"{MEASURE}.checkpoints {SMALL} --batch_size=16 --rounds=5 --runs=3"),),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What waits for a GPU.", allow_abbrev=False)
    parser.add_argument("part", nargs="?", choices=PARTS, help="what to run")
    parser.add_argument("--list", action="store_true", help="print the commands of a part, or of all, and run none")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/on_gpu"), help="folder for results (default %(default)s)"
    )
    flags = parser.parse_args(arguments)
    if flags.list:
        for part in [flags.part] if flags.part else PARTS:
            print(f"# {part}, at most {sum(task.seconds for task in PARTS[part])} s")
            for task in PARTS[part]:
                print(" ".join(task.command()))
    elif flags.part is None:
        parser.error(f"which part? One of {', '.join(PARTS)}")
    else:
        sys.exit(run_part(flags.part, PARTS[flags.part], flags.output))


def run_part(part: str, tasks: Sequence[Task], output: Path, preflight: str = PREFLIGHT) -> int:
    """Run the commands of a part, and write their results.

    Args:
        output: folder of the files, which have the name of the part.
        preflight: a program that has to end well before any command is tried.

    Returns:
        The exit code: 0 only if every command ended well.
    """
    command = ["timeout", str(PREFLIGHT_SECONDS), sys.executable, "-c", preflight]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if checked.returncode:
        print(f"error: {_reason_of_failure(checked.returncode, checked.stderr)}", file=sys.stderr)
        return 1
    output.mkdir(parents=True, exist_ok=True)
    log, results = output / f"{part}.log", output / f"{part}.jsonl"
    log.write_text("")
    results.write_text("")
    failed = 0
    for number, task in enumerate(tasks, start=1):
        print(f"\n{part} {number}/{len(tasks)}  {' '.join(task.command())}", flush=True)
        outcome, printed = _run(task, log, results)
        failed += outcome.failure is not None
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        (output / f"{part}.md").write_text(report(results.read_text(encoding="utf-8").splitlines()))
        print("\n".join(printed.splitlines()[-SHOWN_LINES:]))
        print(f"{outcome.seconds:.0f} s  {outcome.failure or 'ended well'}", flush=True)
    print(f"\n{part}: {len(tasks) - failed} of {len(tasks)} commands ended well; results are in {output}")
    return int(failed > 0)


def _run(task: Task, log: Path, results: Path) -> tuple[Outcome, str]:
    """Run a command to its end, and return how it ended and what it printed."""
    # Into a file: a process that a killed command leaves behind would keep a pipe open.
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "inductor"),  # what one command compiles serves the next
        **os.environ,
        "BENCHMARK_RESULTS": str(results.absolute()),
        "PYTHONUNBUFFERED": "1",
    }
    before, began = log.stat().st_size, time.perf_counter()
    with log.open("a") as file:
        done = subprocess.run(
            task.command(sys.executable), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    printed = log.read_bytes()[before:].decode(errors="replace")
    failure = _reason_of_failure(done.returncode, printed) if done.returncode else None
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    return Outcome(" ".join(task.command()), time.perf_counter() - began, failure, last), printed


def _reason_of_failure(code: int, printed: str) -> str:
    """Return why a command failed: what its time limit did, or the line of its output that says why."""
    if code == 124:  # of `timeout`
        return "it ran past its time"
    if code in (137, -signal.SIGKILL):
        return "it was killed, for memory perhaps"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error:|torch\.OutOfMemoryError|[\w.]+Error:|FAILED |ERROR ", line)]
    return (errors or lines[-1:] or ["failed without a word"])[0].removeprefix("error: ").replace("|", "/")


if __name__ == "__main__":
    main()
