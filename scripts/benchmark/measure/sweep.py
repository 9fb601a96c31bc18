r"""Which settings are fastest here? Trains every combination of them on made-up data; writes a table and a picture.

    python -m scripts.benchmark.measure.sweep --vary=batch_size:4,8,16 --vary=sharding_strategy:ddp,fsdp --processes=8 \
        --model_variant=1b --seq_length=4096 --output=runs/sweep
    python -m scripts.benchmark.measure.sweep --vary=sharding_strategy:ddp,zero2,fsdp --processes=2 \
        --model_variant=tiny --vocab_size=4096 --seq_length=256 --batch_size=2                  # on a CPU

`--vary=<setting>:<value>,<value>` may be given several times; all combinations are tried. Any other --name=value is the
same for all. Each run is a job of its own, as a user would start it, and its numbers are those of its metrics.jsonl:
the median of all reports after the first, over all rounds. In a round every combination has its turn, so that a machine
that is slow for a while is slow for all. What is refused, or does not fit into memory, stands in the table with the
reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretraining.config.command_line import load_train_config
from pretraining.errors import ConfigError
from scripts.benchmark.bars import Bar, draw_bars
from scripts.benchmark.common import (
    LENGTH,
    ROOT,
    Number,
    Table,
    announce,
    check_processes,
    flag_parser,
    in_turn,
    parse_with_settings,
    setting_name,
    spread,
)
from scripts.benchmark.gpu_parts import reason_of_failure
from scripts.benchmark.tables import markdown_table

EVERY = 5
OWN = (*LENGTH, "report_interval", "checkpoint_interval")
COMMON = (
    "use_dummy_dataset=true",
    f"report_interval={EVERY}",
    "checkpoint_interval=0",
    "tracker=none",
    "progress=plain",
)
MEASURED = ("tokens/s/GPU", "quartiles", "step, ms", "MFU", "peak GiB", "loss")


@dataclass
class Combination:
    """One choice of the varied settings, and what its runs reported.

    Attributes:
        settings: name -> value of those that vary.
        reports: lines of metrics.jsonl, the first of each run left out.
        failure: why there are none.
    """

    settings: dict[str, str]
    reports: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens a second of one GPU, in each report."""
        return [report["tokens_per_second_per_gpu"] for report in self.reports]

    def row(self) -> tuple[str, ...]:
        """Of the table."""
        if self.failure is not None:
            return (*self.settings.values(), self.failure, *[""] * (len(MEASURED) - 1))
        steps, _ = spread([1000 * report["step_seconds"] for report in self.reports], ",.0f")
        shares = [report["mfu"] for report in self.reports if report["mfu"] is not None]
        peak = max(report["memory_gib"] for report in self.reports)
        return (
            *self.settings.values(),
            *spread(self.speeds, ",.0f"),
            steps,
            spread(shares, ".1%")[0] if shares else "-",
            f"{peak:.1f}",
            f"{self.reports[-1]['loss']:.4f}",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sweep of a command line."""
    parser = flag_parser(
        "Train every combination of settings, and compare.",
        processes=Number(1, "of each run, on this machine"),
        rounds=Number(1, "turns of each combination"),
        steps=Number(30, "of each turn, in reports of 5, the first to warm up", least=10),
    )
    parser.add_argument("--vary", action="append", type=_varied, required=True, metavar="SETTING:VALUE,VALUE")
    parser.add_argument(
        "--output", type=Path, help="folder for sweep.md, sweep.jsonl and sweep.svg (default: only print)"
    )
    flags, same = parse_with_settings(parser, OWN, arguments)
    varied = [setting_name(name) for name, _ in flags.vary]
    if own := set(varied) & set(OWN):
        parser.error(f"--vary={min(own)}: that is the benchmark's own choice")
    if len(set(varied)) < len(varied):
        parser.error(f"--vary={max(varied, key=varied.count)} is there twice: give all its values in one")
    check_processes(flags.processes)
    combinations = list(_combinations(flags.vary))
    _refuse_if_none_is_possible(combinations, same)
    announce(flags)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a job is in a session of its own: it is ended on the way
    table = Table(*combinations[0].settings, *MEASURED)
    for number, combination in in_turn(list(itertools.product(range(1, flags.rounds + 1), combinations))):
        if combination.failure is None:
            take_turn(combination, same, flags.processes, flags.steps)
        print(f"round {number}  {_name(combination)}: {combination.failure or combination.row()[-6]}", flush=True)
        if number == flags.rounds:
            table.add(*combination.row())
    table.print()
    if flags.output is not None:
        _write(
            flags.output,
            markdown_table(table.header, table.rows),
            combinations,
            f"{' '.join(same)}, {flags.processes} processes",
        )


def _varied(text: str) -> tuple[str, list[str]]:
    name, colon, values = text.partition(":")
    if not (name.isidentifier() and colon and all(values.split(","))):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form setting:value,value")
    return name, values.split(",")


def _combinations(varied: Sequence[tuple[str, list[str]]]) -> Iterator[Combination]:
    names = [name for name, _ in varied]
    for values in itertools.product(*(values for _, values in varied)):
        yield Combination(dict(zip(names, values, strict=True)))


def _refuse_if_none_is_possible(combinations: Sequence[Combination], same: Sequence[str]) -> None:
    """Ends the sweep where no combination is a run; where some are, the others have their reason in the table."""
    problems = []
    for each in combinations:
        try:
            load_train_config([*COMMON, *same, *(f"{name}={value}" for name, value in each.settings.items())])
        except ConfigError as error:
            problems.append(error)
    if len(problems) == len(combinations):
        sys.exit(f"error: {problems[0]}")


def take_turn(combination: Combination, same: Sequence[str], processes: int, steps: int) -> None:
    """Runs a combination once, and notes its reports or why there are none."""
    launcher = [] if processes == 1 else ["scripts/torchrun.py", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        run, log = Path(folder, "run"), Path(folder, "log")
        # More steps than are measured: the run is killed before it saves, which would take long for a large model.
        settings = [*COMMON, *same, f"num_steps={100 * steps}", f"ckpt_save_path={run}"]
        settings += [f"{name}={value}" for name, value in combination.settings.items()]
        command = [sys.executable, *launcher, "main_training.py", *settings]
        with log.open("w") as file:
            job = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        reports: list[dict[str, Any]] = []
        try:
            while len(reports) < steps // EVERY and job.poll() is None:
                time.sleep(0.2)
                reports = _reports_of(run)
        finally:
            ended = job.poll() is not None
            if not ended:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        if ended and job.returncode != 0:
            combination.failure = reason_of_failure(log.read_text())
            return
    combination.reports += reports[1 : steps // EVERY]


def _reports_of(run: Path) -> list[dict[str, Any]]:
    path = run / "logs" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and "step_seconds" in line]


def _name(combination: Combination) -> str:
    return " ".join(f"{name}={value}" for name, value in combination.settings.items())


def _write(folder: Path, table: str, combinations: Sequence[Combination], what: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.md").write_text(table + "\n")
    with (folder / "sweep.jsonl").open("w") as file:
        for each in combinations:
            record = {"settings": each.settings, "failure": each.failure, "reports": each.reports}
            file.write(json.dumps(record) + "\n")
    bars = [Bar(_name(each), each.speeds, each.failure) for each in combinations]
    (folder / "sweep.svg").write_text(draw_bars(f"tokens/s/GPU: {what}", bars))
    print(f"\nwritten to {folder}: sweep.md, sweep.jsonl, sweep.svg")


if __name__ == "__main__":
    main()
