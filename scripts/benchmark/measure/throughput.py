"""Tokens/s, step time, MFU and memory of the project's training loop on one device, with made-up data.

    python -m scripts.benchmark.measure.throughput                        # 125m, 1b and a 7b as deep as fits, on a GPU
    python -m scripts.benchmark.measure.throughput --model_variant=tiny --seq_length=256 --batch_size=4

With settings given, only what they describe is measured, on a GPU or a CPU. The numbers are those of the run's own
metrics.jsonl: the median of all reports after the first.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from pretraining.config.variants import DEFAULT_VARIANT, parameter_count, resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.observability.out_of_memory import is_out_of_memory
from scripts.benchmark.common import (
    LENGTH,
    Number,
    Over,
    Table,
    announce,
    announce_rest,
    device,
    parse,
    read_settings,
    synchronize,
    train_project,
)

WARM_UP_STEPS = 5  # a report's
COMMON = ("use_dummy_dataset=true", "report_interval=5", "tracker=none", "progress=plain")
LARGEST_BATCHES = {"125m": (1024, (64, 32, 16, 8, 4)), "1b": (4096, (8, 4, 2, 1))}
DEPTHS_OF_7B = (32, 30, 28, 26, 24, 20, 16, 12, 8, 6, 4, 2)

# Each row of the table: settings to try, from the largest down, until one fits into memory.
SWEEP = [
    [[f"model_variant={name}", f"seq_length={length}", f"batch_size={size}"] for size in sizes]
    for name, (length, sizes) in LARGEST_BATCHES.items()
] + [[["model_variant=7b", "seq_length=4096", "batch_size=1", f"num_hidden_layers={depth}"] for depth in DEPTHS_OF_7B]]

HEADER = ("model", "parameters", "layers", "sequence", "batch", "dtype", "tokens/s", "step, ms", "MFU", "peak GiB")


def measure(settings: list[str], steps: int) -> tuple[str, ...] | None:
    """A row of the table, or None where the model does not fit into the device's memory."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        config = read_settings([*COMMON, f"num_steps={steps + 1}", *settings, f"ckpt_save_path={folder}/run"])
        done, began, terminal = -1, 0.0, sys.stdout

        def enough(loss: float | None) -> None:
            nonlocal done, began
            done += 1
            if done == WARM_UP_STEPS - 1:
                began = time.perf_counter()
            if done == WARM_UP_STEPS:
                synchronize()
                announce_rest((steps - done) * (time.perf_counter() - began), terminal)
            if done == steps:
                raise Over

        with Path(folder, "log").open("w") as log, redirect_stdout(log):
            try:
                train_project(config, enough)
            except Exception as error:  # cuBLAS and NCCL have errors of their own for it
                if not is_out_of_memory(error):
                    raise
                return None
        lines = Path(folder, "run", "logs", "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines][1:]

    def median(name: str) -> float:
        return float(statistics.median(report[name] for report in reports))

    shape = resolve_shape(config.model)
    dtype = compute_dtype(config.parallel, device())
    return (
        config.model.model_variant or DEFAULT_VARIANT,
        f"{parameter_count(shape) / 1e6:,.0f}M",
        str(shape.num_hidden_layers),
        str(config.data.seq_length),
        str(config.batch.batch_size * (config.batch.grad_accum_steps or 1)),
        str(dtype).removeprefix("torch."),
        f"{median('tokens_per_second_per_gpu'):,.0f}",
        f"{1000 * median('step_seconds'):,.0f}",
        "-" if reports[0]["mfu"] is None else f"{median('mfu'):.1%}",
        f"{max(report['memory_gib'] for report in reports):.1f}",
    )


def in_new_process(*arguments: Any) -> tuple[str, ...] | None:
    """`measure` where no earlier run has left memory behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(measure, *arguments).result()


def main() -> None:
    flags, settings = parse(
        "Throughput of the training loop.",
        (*LENGTH, "report_interval"),
        steps=Number(30, "in reports of 5, the first to warm up", least=10),
    )
    if not settings and not torch.cuda.is_available():
        sys.exit(
            "error: no GPU here: describe a model that suits a CPU, for example --model_variant=tiny --seq_length=256"
        )
    read_settings([*COMMON, *settings])
    announce(flags)
    table = Table(*HEADER)
    for attempts in [[settings]] if settings else SWEEP:
        for attempt in attempts:
            row = in_new_process(attempt, flags.steps)
            if row is not None:
                table.add(*row)
                break
            print(f"does not fit: {' '.join(attempt)}", flush=True)
    if not table.rows:
        sys.exit("error: nothing of this fits into the memory of the device")
    table.print()


if __name__ == "__main__":
    main()
