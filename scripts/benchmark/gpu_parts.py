"""Tests and benchmarks that need a GPU, in parts of at most nine minutes, without a network.

    bash scripts/benchmark/on_gpu.sh --list
    bash scripts/benchmark/on_gpu.sh throughput --output=results

    part -> check that the project runs on a GPU -> commands of the part, each with a time limit
         -> PART.log (output), PART.jsonl (results as they are measured), PART.md (tables)

If a command fails or times out, the script reports the reason, keeps the results and runs the next command. It runs no
command without a GPU, or if the project cannot be imported.
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
    """A command of a part: arguments of `python -m`, and a time limit in seconds."""

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
"""The width of 8b, and the depth that fits on one GPU with the optimizer."""
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
    # Tests that compile are separate parts: the first compilation takes minutes.
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
    parser = argparse.ArgumentParser(description="Tests and benchmarks that need a GPU.", allow_abbrev=False)
    parser.add_argument("part", nargs="?", choices=PARTS, help="part to run")
    parser.add_argument("--list", action="store_true", help="print the commands of one part or all, and run none")
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
        parser.error(f"name a part: {', '.join(PARTS)}")
    else:
        sys.exit(run_part(flags.part, PARTS[flags.part], flags.output))


def run_part(part: str, tasks: Sequence[Task], output: Path, preflight: str = PREFLIGHT) -> int:
    """Run the commands of a part, and write their results.

    Args:
        output: folder of the files, which have the name of the part.
        preflight: Python program that must succeed before the first command.

    Returns:
        The exit code: 0 only if every command succeeded.
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
        print(f"{outcome.seconds:.0f} s  {outcome.failure or 'succeeded'}", flush=True)
    print(f"\n{part}: {len(tasks) - failed} of {len(tasks)} commands succeeded; results are in {output}")
    return int(failed > 0)


def _run(task: Task, log: Path, results: Path) -> tuple[Outcome, str]:
    # Output goes to a file, because a process left behind by a killed command would keep a pipe open.
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "inductor"),  # commands share compiled code
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
    """Return why a command failed: its time limit, or the error line of its output."""
    if code == 124:  # exit code of `timeout`
        return "it exceeded its time limit"
    if code in (137, -signal.SIGKILL):
        return "it was killed, perhaps out of memory"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error:|torch\.OutOfMemoryError|[\w.]+Error:|FAILED |ERROR ", line)]
    return (errors or lines[-1:] or ["failed without output"])[0].removeprefix("error: ").replace("|", "/")


if __name__ == "__main__":
    main()
