"""Peak memory of the project against the Trainer of transformers, with the vocabulary of Llama 3.

    python -m scripts.benchmark.compare.peak_memory
    python -m scripts.benchmark.compare.peak_memory --model_variant=1b --seq_length=4096 --batch_size=4

The Trainer computes the logits of all tokens before the loss; the project computes both for a few tokens at a time. The
contenders are those of `against_trainer.py`. They run in turns, each time in a new process that trains a few steps. The
memory is the process's peak resident set on a CPU, and the peak of allocated memory on a GPU.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pretraining.config.training import TrainConfig
from scripts.benchmark.common import (
    Number,
    Over,
    announce,
    describe,
    flag_parser,
    parse_with_settings,
    print_table,
    read_settings,
    spread,
)
from scripts.benchmark.compare.against_trainer import trainer
from scripts.benchmark.race import RACE, Contender, Turn, project

MODEL = ("model_variant=tiny", "vocab_size=128256", "seq_length=1024", "batch_size=4", "report_interval=1")
CONTENDERS: Mapping[str, Contender] = {"project": project, "Trainer": trainer}


class Steps(Turn):
    """Ends a contender after some steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.loss: float | None = None

    def before_step(self, loss: float | None) -> None:
        self.loss = loss
        if self._left == 0:
            raise Over
        self._left -= 1


def main() -> None:
    parser = flag_parser(
        "Peak memory of the project against the Trainer.",
        rounds=Number(3, "runs of each"),
        steps=Number(3, "optimizer steps of a run"),
    )
    flags, settings = parse_with_settings(parser)
    config = read_settings([*RACE, *MODEL, f"num_steps={flags.steps + 1}", *settings])
    announce()
    print(f"model     {describe(config, 1)}", flush=True)
    gib: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: dict[str, float] = {}
    for _ in range(flags.rounds):
        for name in CONTENDERS:
            memory, losses[name] = run_alone(name, config, flags.steps)
            gib[name].append(memory)
    rows = [(name, *spread(peaks, ".2f"), f"{losses[name]:.4f}") for name, peaks in gib.items()]
    print_table(("", "peak GiB", "quartiles", "loss at the end"), rows)
    middle, quartiles = spread([b / a for a, b in zip(*gib.values(), strict=True)], ".2f")
    print(f"\nTrainer / project: {middle} ({quartiles}), median of {flags.rounds} rounds")


def run_alone(name: str, config: TrainConfig, steps: int) -> tuple[float, float]:
    """Return the peak memory in GiB, and the last loss, of a contender in a process of its own."""
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(name, config, steps, there))
    process.start()
    there.close()
    try:
        result: tuple[float, float] = here.recv()
    except EOFError:
        sys.exit(f"{name} failed: see its error above")
    process.join()
    return result


def _train(name: str, config: TrainConfig, steps: int, results: Connection) -> None:
    turn = Steps(steps)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        own = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=f"{folder}/run"))
        with Path(folder, "log").open("w") as log, redirect_stdout(log), suppress(Over):
            CONTENDERS[name](own, turn)
    results.send((_peak_bytes() / 2**30, turn.loss))


def _peak_bytes() -> int:
    """Return the peak memory of the GPU, or the peak resident set of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
