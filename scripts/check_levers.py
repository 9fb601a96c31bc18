"""Does every lever leave the loss curve alone? Trains one model in many ways and compares the losses of each step.

    python scripts/check_levers.py            every combination of the factors below: 300 runs, some 20 minutes
    python scripts/check_levers.py --cover    few of them, in which any two values of any two factors meet

The model is tiny, in float32, on the CPU, with made-up data; the reference is one process without any lever. A batch of
6 sequences is cut among the processes (unevenly among 4) and into micro-batches of 1 or 2, so accumulation goes from 1
to 6. There is one launch for each number of processes. Ends with 1 if a loss of any run differs by more than the
tolerance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLOBAL_BATCH = 6
TOLERANCE = 1e-5
"""Largest relative difference of a loss: float32 rounds to 6e-8, and AdamW makes much of the last bits."""

FACTORS: dict[str, tuple[str, ...]] = {
    "processes": ("1", "2", "4"),
    "sharding_strategy": ("ddp", "fsdp", "zero2", "hsdp", "hsdp_zero2"),
    "selective_checkpointing": ("none", "1", "op", "2", "2/3"),
    "batch_size": ("2", "1"),
    "use_torch_compile": ("false", "true"),
}
SETTINGS = (
    *("model_variant=tiny", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2"),
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
    # For the processes to come. The compiler's own processes would import torch once more, each of them.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ.update(PYTHONPATH=path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
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
    """Trains combinations of as many processes in one launch; returns the losses of each."""
    world_size = int(combinations[0][0])
    runs = {combination: folder / "_".join(combination).replace("/", ":") for combination in combinations}
    jobs = [
        (free_port(), [*settings_of(each), f"num_steps={steps}", f"ckpt_save_path={run}"]) for each, run in runs.items()
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretraining.train.run", "torch._inductor.compile_fx"])  # once for all
    logs = [folder / f"{world_size}_{rank}.log" for rank in range(world_size)]
    ranks = [
        context.Process(target=work, args=(rank, world_size, jobs, log), daemon=True) for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    while left := [process.sentinel for process in ranks if process.exitcode is None]:
        connection.wait(left)
        if any(process.exitcode for process in ranks):
            for process in ranks:  # they wait for the one that has ended, and write into the folder
                process.terminate()
                process.join()
            sys.exit("\n".join(log.read_text() for log in logs))
    return {each: losses_of(run) for each, run in runs.items()}


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def report(losses: dict[Combination, list[float]], reference: list[float]) -> int:
    """Prints how far each run is from the reference; returns the exit code."""
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


def work(rank: int, world_size: int, jobs: Sequence[tuple[int, list[str]]], log: Path) -> None:
    """Trains one run after the other, as one process of several, which prints to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    import torch

    from pretraining.config.command_line import load_train_config
    from pretraining.launch.layout import resolve_layout
    from pretraining.train.run import train

    torch.set_num_threads(1)
    for port, settings in jobs:
        os.environ["MASTER_PORT"] = str(port)
        train(load_train_config(settings), resolve_layout(os.environ))


if __name__ == "__main__":
    sys.exit(main())
