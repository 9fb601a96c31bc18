"""Tokens/s, step time, MFU and memory of the project's training loop on one device, with dummy data.

    python -m scripts.benchmark.measure.throughput --model_variant=1b --seq_length=4096 --batch_size=8

The numbers are medians over the reports in metrics.jsonl, without the first. `pretrain sweep` compares combinations of
settings.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from scripts.benchmark.common import (
    LENGTH,
    Number,
    Over,
    announce,
    describe,
    flag_parser,
    parse_with_settings,
    print_table,
    read_settings,
    train_project,
)

OWN = (*LENGTH, "report_interval")
COMMON = ("use_dummy_dataset=true", "report_interval=5", "tracker=none", "progress=plain")


def main() -> None:
    parser = flag_parser(
        "Throughput of the training loop.",
        steps=Number(30, "steps; the first 5 are a warm-up", least=10),
    )
    flags, settings = parse_with_settings(parser, OWN)
    if not settings:
        parser.error("describe a model, for example --model_variant=tiny --seq_length=256 --batch_size=4")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        own = (f"num_steps={flags.steps + 1}", f"ckpt_save_path={folder}/run")
        config = read_settings([*COMMON, *settings, *own])
        announce(flags)
        print(f"model     {describe(config, 1)}", flush=True)
        begun = itertools.count()

        def before_step(loss: float | None) -> None:
            if next(begun) == flags.steps:
                raise Over

        with Path(folder, "log").open("w") as log, redirect_stdout(log):
            train_project(config, before_step)
        lines = Path(folder, "run", "logs", "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines][1:]

    def median(name: str) -> float:
        return float(statistics.median(report[name] for report in reports))

    row = (
        " ".join(settings),
        f"{median('tokens_per_second_per_gpu'):,.0f}",
        f"{1000 * median('step_seconds'):,.0f}",
        "-" if reports[0]["mfu"] is None else f"{median('mfu'):.1%}",
        f"{max(report['memory_gib'] for report in reports):.1f}",
        f"{reports[-1]['loss']:.4f}",
    )
    print_table(("settings", "tokens/s", "step, ms", "MFU", "peak GiB", "loss"), [row])


if __name__ == "__main__":
    main()
