"""Speed on CPUs by how long waiting OpenMP threads spin, on idle cores and beside busy loops.

    python -m scripts.benchmark.measure.spinning
    python -m scripts.benchmark.measure.spinning --rounds=5 --steps=50 --loops=2

The demo's model trains on generated data in new processes, in turns: OpenMP's default, then 2,000 iterations, which a
start sets. The rate of a run is the median of its reports after the first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretraining.launch.cpu_threads import SPIN_COUNT
from pretraining.observability.trackers import LOGS, METRICS_FILE
from scripts.benchmark.common import (
    LENGTH,
    PRETRAIN,
    ROOT,
    Number,
    announce,
    flag_parser,
    parse_with_settings,
    print_table,
    read_settings,
    spread,
)

DEFAULT_COUNT = "300000"
"""Iterations of GNU's OpenMP if no variable is set and there are no more threads than CPUs."""
SETTINGS = (
    *("recipe=demo", "use_dummy_dataset=true", "data_path=none", "datasets=", "tokenizer_path=none", "sep_token=none"),
    *("held_out_fraction=0", "vocab_size=4096", "device=cpu", "tracker=none", "progress=plain", "report_interval=5"),
)
WARMUP_REPORTS = 1


def tokens_per_second(settings: list[str], spin_count: str) -> float:
    """Train in a new process, and return the median rate of its reports."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        result = subprocess.run(
            [*PRETRAIN, "train", *settings, f"ckpt_save_path={folder}"],
            cwd=ROOT,
            env={**os.environ, "GOMP_SPINCOUNT": spin_count},
            stdout=subprocess.DEVNULL,
        )
        if result.returncode:
            sys.exit("the measured process failed: see its error above")
        lines = (Path(folder) / LOGS / METRICS_FILE).read_text().splitlines()
    reports = [report for report in map(json.loads, lines) if "loss" in report]
    rates: list[float] = [report["tokens_per_second_per_gpu"] for report in reports]
    return statistics.median(rates[WARMUP_REPORTS:])


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run programs that want a core all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = flag_parser(
        "Speed by how long waiting threads spin.",
        rounds=Number(5, "runs of each kind"),
        steps=Number(50, "steps of a run", least=10),
        loops=Number(1, "busy loops beside the second half of the runs"),
    )
    flags, given = parse_with_settings(parser, LENGTH)
    settings = [*SETTINGS, f"num_steps={flags.steps}", *given]
    read_settings(settings)
    announce()
    counts = {f"default ({DEFAULT_COUNT})": DEFAULT_COUNT, SPIN_COUNT: SPIN_COUNT}
    rows = []
    for loops in (0, flags.loops):
        rates: dict[str, list[float]] = {name: [] for name in counts}
        with busy_loops(loops):
            for _ in range(flags.rounds):
                for name, count in counts.items():
                    rates[name].append(tokens_per_second(settings, count))
        first, last = rates.values()
        ratio = statistics.median(mine / theirs for mine, theirs in zip(last, first, strict=True))
        for name, values in rates.items():
            rows.append((str(loops), name, *spread(values, ",.0f"), f"{ratio:.2f}" if name == SPIN_COUNT else "1"))
    print_table(("busy loops", "iterations", "tokens/s", "quartiles", "ratio"), rows)


if __name__ == "__main__":
    main()
