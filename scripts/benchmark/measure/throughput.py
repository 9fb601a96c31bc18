r"""Tokens/s, step time, MFU and memory of the project's training loop on one device, with made-up data.

    python -m scripts.benchmark.measure.throughput --model_variant=1b --seq_length=4096 --batch_size=8
    python -m scripts.benchmark.measure.throughput --vary=batch_size:2,4 --vary=use_torch_compile:true,false \
        --model_variant=tiny --seq_length=256

`--vary=<setting>:<value>,<value>` may be given several times: each combination is a row, in a process of its own. What
is refused, or does not fit into memory, stands in the table with the reason. The numbers are those of the run's own
metrics.jsonl: medians over all reports after the first. `pretrain sweep` compares combinations on several GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

from pretraining.config.command_line import load_train_config
from scripts.benchmark.common import (
    LENGTH,
    Number,
    Over,
    Table,
    announce,
    describe,
    flag_parser,
    parse_with_settings,
    read_settings,
    setting_name,
    train_project,
)

OWN = (*LENGTH, "report_interval")
COMMON = ("use_dummy_dataset=true", "report_interval=5", "tracker=none", "progress=plain")
MEASURED = ("tokens/s", "step, ms", "MFU", "peak GiB", "loss")


def measure(settings: list[str], steps: int) -> tuple[str, ...]:
    """Train with some settings, and return what was measured; raises what the training raises."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        config = load_train_config([*COMMON, f"num_steps={steps + 1}", *settings, f"ckpt_save_path={folder}/run"])
        begun = itertools.count()

        def before_step(loss: float | None) -> None:
            if next(begun) == steps:
                raise Over

        with Path(folder, "log").open("w") as log, redirect_stdout(log):
            train_project(config, before_step)
        lines = Path(folder, "run", "logs", "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines][1:]

    def median(name: str) -> float:
        return float(statistics.median(report[name] for report in reports))

    return (
        f"{median('tokens_per_second_per_gpu'):,.0f}",
        f"{1000 * median('step_seconds'):,.0f}",
        "-" if reports[0]["mfu"] is None else f"{median('mfu'):.1%}",
        f"{max(report['memory_gib'] for report in reports):.1f}",
        f"{reports[-1]['loss']:.4f}",
    )


def measured_or_reason(settings: list[str], steps: int) -> tuple[str, ...]:
    """`measure` in a process in which no earlier run has left memory behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        try:
            return executor.submit(measure, settings, steps).result()
        except Exception as error:  # of the settings, of memory, of a kernel: a row says it
            reason = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")
            return (reason, *[""] * (len(MEASURED) - 1))


def main() -> None:
    parser = flag_parser(
        "Throughput of the training loop.", steps=Number(30, "in reports of 5, the first to warm up", least=10)
    )
    parser.add_argument("--vary", action="append", type=_varied, default=[], metavar="SETTING:VALUE,VALUE")
    flags, same = parse_with_settings(parser, OWN)
    for name, _ in flags.vary:
        if setting_name(name) in OWN:
            parser.error(f"--vary={name}: that is the benchmark's own choice")
    names = [name for name, _ in flags.vary]
    combinations = list(itertools.product(*(values for _, values in flags.vary)))
    all_settings = [
        [*same, *(f"{name}={value}" for name, value in zip(names, values, strict=True))] for values in combinations
    ]
    if not all_settings[0]:
        parser.error("describe a model, for example --model_variant=tiny --seq_length=256 --batch_size=4")
    config = read_settings([*COMMON, *all_settings[0]])
    announce(flags)
    print(f"model     {describe(config, 1)}", flush=True)
    table = Table(*(names or ["model"]), *MEASURED)
    for values, settings in zip(combinations, all_settings, strict=True):
        row = (*(values or [config.model.model_variant or "-"]), *measured_or_reason(settings, flags.steps))
        print("  ".join(row), flush=True)
        table.add(*row)
    table.print()
    if not any(row[-1] for row in table.rows):
        sys.exit("error: nothing was measured, for the reasons in the table")


def _varied(text: str) -> tuple[str, list[str]]:
    name, colon, values = text.partition(":")
    if not (name.isidentifier() and colon and all(values.split(","))):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form setting:value,value")
    return name, values.split(",")


if __name__ == "__main__":
    main()
