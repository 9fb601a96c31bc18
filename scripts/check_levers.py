"""Does every lever leave the loss curve alone? Trains one model in many ways and compares the losses of each step.

    python scripts/check_levers.py            every combination of the factors below: some 300 runs, an hour or two
    python scripts/check_levers.py --cover    few of them, in which any two values of any two factors meet

The model is tiny, in float32, on the CPU, with made-up data; the reference is one process without any lever. A batch of
12 sequences is cut into micro-batches of 1 or 3 and among the processes, so accumulation goes from 1 to 12. There is
one launch for each number of processes. Ends with 1 if a loss of any run differs by more than the tolerance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLOBAL_BATCH = 12
TOLERANCE = 1e-5
"""Largest relative difference of a loss: float32 rounds to 6e-8, and AdamW makes much of the last bits."""

FACTORS: dict[str, tuple[str, ...]] = {
    "processes": ("1", "2", "4"),
    "sharding_strategy": ("ddp", "fsdp", "zero2", "hsdp", "hsdp_zero2"),
    "selective_checkpointing": ("none", "1", "op", "2", "1/3"),
    "batch_size": ("3", "1"),
    "use_torch_compile": ("false", "true"),
}
SETTINGS = (
    *("model_variant=tiny", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=3"),
    *("num_attention_heads=4", "num_key_value_heads=2", "vocab_size=64", "seq_length=32", "use_dummy_dataset=true"),
    *("mixed_precision=false", "learning_rate=1e-3", f"global_batch_size={GLOBAL_BATCH}"),
    *("report_interval=1", "checkpoint_interval=0", "tracker=none", "progress=plain"),
)
Combination = tuple[str, ...]
Value = tuple[int, str]  # of the factor of that number
Pair = tuple[Value, Value]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cover", action="store_true", help="few combinations, in which any two values meet")
    parser.add_argument("--steps", type=int, default=50, help="of each run (default 50)")
    arguments = parser.parse_args()
    everything = list(itertools.product(*FACTORS.values()))
    chosen = cover_pairs(everything) if arguments.cover else everything
    with tempfile.TemporaryDirectory() as folder:
        losses: dict[Combination, list[float]] = {}
        for processes in FACTORS["processes"]:
            losses |= train_all([each for each in chosen if each[0] == processes], arguments.steps, Path(folder))
    return report(losses, losses[everything[0]])


def cover_pairs(everything: Sequence[Combination]) -> list[Combination]:
    """Few combinations in which any two values of any two factors meet; the first of all is the first.

    Greedy: always the one that brings most pairs which have not met; of several, that whose values were chosen least,
    and without compiling, which takes its time.
    """
    left = set().union(*map(_pairs, everything))
    chosen: list[Combination] = []
    used: Counter[Value] = Counter()
    best = everything[0]
    while left:
        chosen.append(best)
        used.update(enumerate(best))
        left -= _pairs(best)
        best = max(everything, key=partial(_worth, left, used))
    return chosen


def _worth(left: set[Pair], used: Counter[Value], combination: Combination) -> tuple[int, int]:
    *others, _ = enumerate(combination)
    return len(left & _pairs(combination)), -sum(used[value] for value in others)


def _pairs(combination: Combination) -> set[Pair]:
    return set(itertools.combinations(enumerate(combination), 2))


def settings_of(combination: Combination) -> Iterator[str]:
    """The settings of a run, but for its length and folder."""
    processes, strategy, selective, batch_size, compiled = combination
    yield from SETTINGS
    yield f"sharding_strategy={strategy}"
    if strategy.startswith("hsdp"):
        yield f"hsdp_group_size={max(1, int(processes) // 2)}"
    if selective != "none":
        yield from ("fsdp_activation_checkpointing=true", f"selective_checkpointing={selective}")
    yield f"batch_size={batch_size}"
    yield f"use_torch_compile={compiled}"


def train_all(combinations: Sequence[Combination], steps: int, folder: Path) -> dict[Combination, list[float]]:
    """Train combinations of as many processes in one launch; returns the losses of each."""
    runs = {combination: folder / "_".join(combination).replace("/", ":") for combination in combinations}
    jobs = [
        (free_port(), [*settings_of(each), f"num_steps={steps}", f"ckpt_save_path={run}"]) for each, run in runs.items()
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={combinations[0][0]}"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, WORKER: json.dumps(jobs)}
    done = subprocess.run([*launcher, __file__], env={**os.environ, **own}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}")
    return {each: losses_of(run) for each, run in runs.items()}


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def report(losses: dict[Combination, list[float]], reference: list[float]) -> int:
    """Print how far each run is from the reference; returns the exit code."""
    differences = {each: difference(curve, reference) for each, curve in losses.items()}
    print("  ".join(FACTORS), "  largest relative difference of a loss")
    for combination, found in differences.items():
        cells = [f"{value:{len(name)}}" for name, value in zip(FACTORS, combination, strict=True)]
        print("  ".join(cells), f"  {found:.1e}" + ("" if found <= TOLERANCE else "   TOO LARGE"))
    worst = max(differences.values())
    fell = f"the reference's loss goes from {reference[0]:.4f} to {reference[-1]:.4f}"
    print(f"{len(losses)} runs of {len(reference)} steps; {fell}; largest difference {worst:.1e}, allowed {TOLERANCE}")
    return int(not worst <= TOLERANCE)


def difference(curve: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference of a loss; infinite where one is missing."""
    if len(curve) != len(reference):
        return float("inf")
    return max(abs(loss / wanted - 1) for loss, wanted in zip(curve, reference, strict=True))


WORKER = "CHECK_LEVERS_JOBS"


def work(jobs: Sequence[tuple[int, list[str]]]) -> None:
    """Train one run after the other, as one process of several."""
    import torch

    from pretraining.config.flags import load_train_config
    from pretraining.launch.layout import resolve_layout
    from pretraining.train.run import train

    torch.set_num_threads(1)
    # A run needs a meeting place of its own: in torchrun's, it would find the addresses that the run before it left.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, settings in jobs:
        os.environ["MASTER_PORT"] = str(port)
        train(load_train_config(settings), resolve_layout(os.environ))
    sys.stdout.flush()
    os._exit(0)  # after several process groups, the usual end may abort


if __name__ == "__main__":
    if WORKER in os.environ:
        work(json.loads(os.environ[WORKER]))
    sys.exit(main())
