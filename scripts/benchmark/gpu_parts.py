"""Tests and benchmarks that need a GPU, in parts of at most nine minutes, without a network.

    bash scripts/benchmark/on_gpu.sh --list
    bash scripts/benchmark/on_gpu.sh throughput --output=results

The commands of a part have a time limit each, and their output goes to PART.log. After a command that fails, the next
one runs. No command runs without a GPU, or if the project cannot be imported.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PART_SECONDS = 540
KILL_AFTER_SECONDS = 10
SHOWN_LINES = 25
FAILURES = {124: "it exceeded its time limit", **dict.fromkeys((137, -9), "it was killed, perhaps out of memory")}
"""Failures by exit code of `timeout`, or minus the number of a signal."""
PREFLIGHT = """
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"error: PyTorch {torch.__version__} sees no GPU here")
import pretraining.train.build
matrix = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
(matrix @ matrix).sum().item()
"""


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
TRAIN = "pretraining train --use_dummy_dataset=true --num_steps=30 --report_interval=5"
"""Prints tokens/s, MFU and peak memory at its end."""

PARTS = {
    "tests": (
        Task(
            240,
            f"{PYTEST} tests/gpu/test_attention.py tests/gpu/test_shared_rows.py tests/gpu/test_loss.py "
            "tests/gpu/test_no_waiting.py tests/gpu/test_profiler.py tests/gpu/test_training.py",
        ),
        Task(300, f"{PYTEST} tests/gpu/test_whole_runs.py"),
    ),
    # Tests that compile are separate parts: the first compilation takes minutes.
    "levers_tests": (Task(540, f"{PYTEST} tests/gpu/test_levers.py"),),
    "float8_tests": (Task(540, f"{PYTEST} tests/gpu/test_float8.py"),),
    "throughput": (
        Task(90, f"{TRAIN} {SMALL} --batch_size=64 {COMPILED}"),
        Task(100, f"{TRAIN} {ONE_B} --batch_size=8 {COMPILED}"),
        Task(110, f"{TRAIN} {EIGHT_B} --batch_size=2 {COMPILED}"),
        Task(70, f"{TRAIN} {ONE_B} --batch_size=8"),
        Task(70, f"{TRAIN} {ONE_B} --batch_size=8 {CHECKPOINTED}"),
        Task(100, f"{TRAIN} {ONE_B} --batch_size=8 {CHECKPOINTED} {COMPILED}"),
    ),
    "float8_8b": tuple(Task(180, f"{TRAIN} --float8={each} {EIGHT_B} --batch_size=2 {COMPILED}") for each in SCALINGS),
    "float8_1b": tuple(Task(180, f"{TRAIN} --float8={each} {ONE_B} --batch_size=8 {COMPILED}") for each in SCALINGS),
    "races": (
        Task(110, f"{COMPARE}.against_trainer {SMALL} --batch_size=16 {COMPILED} --rounds=8"),
        Task(120, f"{COMPARE}.against_trainer {ONE_B} --batch_size=2 {COMPILED} --rounds=6"),
        Task(80, f"{COMPARE}.against_ddp {SMALL} --batch_size=16 --processes=1 --rounds=8"),
        Task(110, f"{MEASURE}.training_loop {SMALL} --batch_size=16 {COMPILED} --rounds=8"),
        Task(110, f"{COMPARE}.peak_memory {SMALL} --batch_size=8 --rounds=1"),
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
        sys.exit(run_part(PARTS[flags.part], flags.output / f"{flags.part}.log"))


def run_part(tasks: Sequence[Task], log: Path, preflight: str = PREFLIGHT) -> int:
    """Run the commands of a part with their output in a file, and return how many failed.

    Args:
        preflight: Python program that must succeed before the first command.
    """
    if subprocess.run([sys.executable, "-c", preflight], cwd=ROOT).returncode:
        return 1
    log.parent.mkdir(parents=True, exist_ok=True)
    # Commands share compiled code.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "inductor"), **os.environ, "PYTHONUNBUFFERED": "1"}
    failed = 0
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        for number, task in enumerate(tasks, start=1):
            print(f"\n{number}/{len(tasks)}  {' '.join(task.command())}", flush=True)
            output.write(f"\n$ {' '.join(task.command())}\n")
            output.flush()
            before = output.tell()
            # A file, not a pipe: a process left behind by a killed command would keep a pipe open.
            code = subprocess.run(
                task.command(sys.executable), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            ).returncode
            output.seek(before)
            print("\n".join(output.read().splitlines()[-SHOWN_LINES:]))
            outcome = "succeeded" if code == 0 else f"failed: {FAILURES.get(code, f'exit code {code}')}"
            print(outcome, flush=True)
            output.write(f"{outcome}\n")
            failed += code != 0
    print(f"\n{len(tasks) - failed} of {len(tasks)} commands succeeded; the output is in {log}")
    return failed


if __name__ == "__main__":
    main()
