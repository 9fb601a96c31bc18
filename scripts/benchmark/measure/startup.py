"""Seconds from the start of the process to the end of the first training step.

    pretrain prepare --source=stdlib --vocab_size=4096 --output_path=data/demo
    python -m scripts.benchmark.measure.startup
    python -m scripts.benchmark.measure.startup --files=100000     the data is so many files of 1000 tokens

The demo, with any other settings, runs for one step in new processes: in turns without an index of the data, and with
the index of the previous run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEMO = ("recipe=demo", "tracker=tensorboard", "progress=plain")
STARTED = "BENCHMARK_STARTED"
"""Environment variable with the start time of the measured process, in seconds since the epoch."""


def measured_run(settings: list[str]) -> None:
    """Train one step like `pretrain train`, and print the seconds since the start; runs in the measured process."""
    import torch

    from pretraining.cli import train_command
    from pretraining.config.command_line import read_words
    from pretraining.config.training import TrainConfig
    from pretraining.train import loop

    step = loop.train_step

    def only_step(*arguments: Any) -> None:
        step(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(time.time() - float(os.environ[STARTED]), flush=True)
        raise SystemExit  # stops the loop without a checkpoint

    loop.train_step = only_step  # type: ignore[assignment]
    train_command(read_words(TrainConfig, settings))


def start(settings: list[str], since: float | None = None) -> float:
    """Return the seconds to the end of the first step in a new process.

    Args:
        settings: settings of training, as name=value.
        since: start of the measurement, in seconds since the epoch; None = now.
    """
    result = subprocess.run(
        [sys.executable, "-m", "scripts.benchmark.measure.startup", "measure", *settings],
        cwd=Path(__file__).parents[3],
        env={**os.environ, STARTED: repr(since or time.time())},
        stdout=subprocess.PIPE,
        text=True,
    )
    if result.returncode:
        sys.exit("the measured process failed: see its error above")
    return float(result.stdout.splitlines()[-1])


def write_files(folder: Path, files: int) -> None:
    """Write files of a document of 1000 random tokens; token 0 ends it, as in the demo's data."""
    import numpy as np

    generator = np.random.default_rng(1)
    for number in range(files):
        path = folder / f"{number // 1000:04}" / f"{number:07}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.append(generator.integers(1, 4096, 999, dtype=np.uint16), np.uint16(0)))


def main() -> None:
    from scripts.benchmark import common

    parser = common.flag_parser(
        "Seconds to the first step.",
        rounds=common.Number(3, "starts of each kind"),
        files=common.Number(0, "files to write and to train on, in place of the demo's data; 0 = none", least=0),
    )
    flags, settings = common.parse_with_settings(parser, (*common.LENGTH, "index_path"))
    common.read_settings([*DEMO, *settings])
    with tempfile.TemporaryDirectory(prefix="benchmark-") as data:
        if flags.files:
            write_files(Path(data, "files"), flags.files)
            settings += [f"data_path={data}", "datasets=files", "tokenizer_path=none", "vocab_size=4096"]
        measure(flags.rounds, settings)


def measure(rounds: int, settings: list[str]) -> None:
    """Start in turns without and with an index, and print the seconds."""
    from scripts.benchmark import common

    common.announce()
    seconds: dict[str, list[float]] = {"without an index": [], "with an index": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            run = [*DEMO, f"ckpt_save_path={folder}/run", f"index_path={folder}/index", *settings]
            Path(folder, "index").mkdir()
            for kind in seconds.values():
                kind.append(start(run))
    rows = [(name, *common.spread(kind, ".2f")) for name, kind in seconds.items()]
    common.print_table(("seconds to the end of the first step", "median", "quartiles"), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        from pretraining.errors import PretrainError

        try:
            measured_run(sys.argv[2:])
        except PretrainError as error:
            sys.exit(f"error: {error}")
    else:
        main()
