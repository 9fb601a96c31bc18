"""The experiments of docs/experiments.md on optimizers, schedules and data: sweeps, tables and pictures.

    pretrain prepare --source=stdlib --vocab_size=4096 --output_path=data/demo
    python -m scripts.experiments --folder=runs/experiments              # all of them: some two hours on two cores
    python -m scripts.experiments --folder=runs/experiments --only=wsd,best_fit
    python -m scripts.experiments --folder=runs/experiments --collect    # tables and pictures of what is there

Each experiment is a `pretrain sweep`: what a kill has interrupted goes on with the same command, and what has ended is
not done again.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

from scripts.benchmark.tables import markdown_table

ROOT = Path(__file__).parents[1]
SHAPE = (
    *("--model_variant=tiny", "--hidden_size=160", "--intermediate_size=448", "--num_hidden_layers=4"),
    *("--num_attention_heads=5", "--num_key_value_heads=5", "--vocab_size=4096"),
)
"""2.6M parameters, of them 1.3M in hidden matrices."""
BUDGET = ("--seq_length=256", "--batch_size=8", "--global_batch_size=16", "--num_steps=256")
"""1,048,576 tokens in steps of 4,096."""
LOOKING = (
    *("--held_out_fraction=0.02", "--eval_interval=64", "--eval_batches=16", "--report_interval=16", "--tracker=none"),
    *("--checkpoint_interval=0", "--save_best=false", "--sample_tokens=0", "--straggler_factor=none"),
)
FIRST_SEED, MORE_SEEDS = "2023", ("1", "2")
RATES = {
    "adamw": ("3e-4", "1e-3", "3e-3", "1e-2"),
    "muon": ("1e-3", "3e-3", "1e-2", "3e-2"),
    "nadam": ("3e-4", "1e-3", "3e-3", "1e-2"),
    "sgdm": ("3e-2", "1e-1", "3e-1", "1"),
}
BEST = {"adamw": "3e-3", "muon": "1e-2", "nadam": "3e-3", "sgdm": "3e-1"}
"""Of the rates above, with the first seed; the winners are trained from two more."""
LEVERS = {
    "wsd": ("--schedule=wsd",),
    "linear_to_zero": ("--schedule=linear", "--min_lr_ratio=0"),
    "beta2_0.99": ("--adam_beta2=0.99",),
    "weight_decay_0": ("--weight_decay=0",),
    "document_mask": ("--document_mask=true",),
    "best_fit": ("--packing=best_fit",),
}
"""Each changes one thing of AdamW at its best rate."""
WINNERS_PICTURE, LEVERS_PICTURE = "experiments_optimizers.svg", "experiments_levers.svg"


Losses = list[tuple[int, float]]
"""(tokens, held-out loss) of each evaluation of a run."""


def experiments() -> dict[str, tuple[str, ...]]:
    """The flags of each experiment beyond the shape, the budget and the data, by its name."""
    found: dict[str, tuple[str, ...]] = {}
    for name, rates in RATES.items():
        found[f"r_{name}"] = (f"--optimizer={name}", f"--learning_rate={','.join(rates)}")
    for name, rate in BEST.items():
        flags = (f"--optimizer={name}", f"--learning_rate={rate}", f"--seed={','.join(MORE_SEEDS)}")
        found[f"seeds_{name}"] = flags
    seeds = ",".join((FIRST_SEED, *MORE_SEEDS))
    for name, lever in LEVERS.items():
        found[name] = ("--optimizer=adamw", f"--learning_rate={BEST['adamw']}", *lever, f"--seed={seeds}")
    return found


def command_of(name: str, folder: Path, data: Path) -> list[str]:
    """The sweep that an experiment is."""
    where = (f"--data_path={data}", "--sep_token=0", f"--tokenizer_path={data}/tokenizer.json")
    train = (*where, *SHAPE, *BUDGET, *LOOKING, *experiments()[name])
    return [sys.executable, "-m", "pretraining", "sweep", *train, f"--sweep_path={folder / name}"]


def runs_of(name: str, folder: Path) -> Iterator[tuple[dict[str, str], Losses]]:
    """Yield the values that vary and the held-out losses of each finished run of an experiment."""
    table = folder / name / "sweep.csv"
    with table.open(newline="") if table.is_file() else nullcontext(()) as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        if row["status"] == "finished":
            reports = map(json.loads, Path(row["run"], "logs", "metrics.jsonl").read_text().splitlines())
            losses = [(each["tokens_seen"], each["evaluation_loss"]) for each in reports if "evaluation_loss" in each]
            yield row, losses


def by_seed(name: str, folder: Path) -> dict[str, Losses]:
    """Return the losses of a winner (by its optimizer's name) or of a lever, by seed."""
    if name not in BEST:
        return {row["seed"]: losses for row, losses in runs_of(name, folder)}
    by_rate = {row["learning_rate"]: losses for row, losses in runs_of(f"r_{name}", folder)}
    first = {FIRST_SEED: by_rate[BEST[name]]} if BEST[name] in by_rate else {}
    return first | {row["seed"]: losses for row, losses in runs_of(f"seeds_{name}", folder)}


def tokens_until(loss: float, losses: Losses) -> float | None:
    """Return the tokens after which the held-out loss was as low, on a line between evaluations; None = never."""
    for (before, above), (after, below) in pairwise(losses):
        if below <= loss <= above:
            return before + (above - loss) / (above - below) * (after - before)
    return None


def print_rates(folder: Path) -> None:
    """Print held-out losses of one seed by optimizer and rate; a rate that is not there did not finish."""
    rows = [
        (name, row["learning_rate"], f"{losses[-1][1]:.3f}")
        for name in RATES
        for row, losses in runs_of(f"r_{name}", folder)
    ]
    print("\n" + markdown_table(("optimizer", "learning_rate", "held-out loss"), rows))


def print_winners(folder: Path) -> None:
    """Print mean and range over seeds at each optimizer's best rate, and the tokens that it takes to AdamW's loss."""
    rows = []
    reference = [losses[-1][1] for losses in by_seed("adamw", folder).values()]
    for name, rate in BEST.items():
        runs = list(by_seed(name, folder).values())
        if runs and reference:
            until = [tokens_until(statistics.fmean(reference), losses) for losses in runs]
            shares = [tokens / losses[-1][0] for tokens, losses in zip(until, runs, strict=True) if tokens is not None]
            share = f"{statistics.fmean(shares):.2f}" if len(shares) == len(runs) else "-"
            rows.append((name, rate, _mean_and_range([losses[-1][1] for losses in runs]), str(len(runs)), share))
    header = ("optimizer", "learning_rate", "held-out loss", "seeds", "share of the tokens until AdamW's last loss")
    print("\n" + markdown_table(header, rows))


def differences(name: str, folder: Path) -> list[float]:
    """Return how a lever's last losses differ from AdamW's, seed by seed."""
    base, runs = by_seed("adamw", folder), by_seed(name, folder)
    return [losses[-1][1] - base[seed][-1][1] for seed, losses in runs.items() if seed in base]


def spread_of_seeds(folder: Path) -> float:
    """Return the range of AdamW's last losses: what seeds alone make."""
    last = [losses[-1][1] for losses in by_seed("adamw", folder).values()] or [0.0]
    return max(last) - min(last)


def print_levers(folder: Path) -> None:
    """Print differences to AdamW by lever beside what seeds alone make."""
    rows, spread = [], spread_of_seeds(folder)
    for name, flags in LEVERS.items():
        if found := differences(name, folder):
            counts = "yes" if abs(statistics.fmean(found)) > 2 * spread else "no"
            rows.append((" ".join(flags), _mean_and_range(found, "+"), str(len(found)), counts))
    header = ("lever", "held-out loss, difference", "seeds", f"above twice {spread:.3f}")
    print("\n" + markdown_table(header, rows))


def _mean_and_range(values: Sequence[float], sign: str = "") -> str:
    mean, low, high = (format(value, f"{sign}.3f") for value in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def draw(folder: Path, pictures: Path) -> None:
    """Draws the winners' held-out losses, and the levers' differences with those of each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, rate) in enumerate(BEST.items()):
        for seed, losses in by_seed(name, folder).items():
            label = f"{name}, {rate}" if seed == FIRST_SEED else None
            axes.plot(*zip(*losses, strict=True), color=f"C{number}", marker=".", label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("held-out loss, a line a seed")
    axes.legend()
    figure.savefig(pictures / WINNERS_PICTURE, metadata={"Date": None})

    figure = Figure(figsize=(7.0, 3.5), layout="constrained")
    axes, spread = figure.add_subplot(), spread_of_seeds(folder)
    for name in LEVERS:
        found = differences(name, folder)
        axes.plot(found, [name.replace("_", " ")] * len(found), "o", color="C0", alpha=0.7)
    axes.axvspan(-2 * spread, 2 * spread, color="0.9", label="twice the range of AdamW's seeds")
    axes.axvline(0, color="0.5")
    axes.set_xlabel("held-out loss, difference to AdamW's with the same seed")
    axes.legend()
    figure.savefig(pictures / LEVERS_PICTURE, metadata={"Date": None})


def main() -> None:
    """Trains what has not been trained, and prints and draws what came of it."""
    parser = argparse.ArgumentParser(description="The experiments of docs/experiments.md.", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="where the sweeps are, or go")
    parser.add_argument("--data", type=Path, default=ROOT / "data/demo", help="of `pretrain prepare --source=stdlib`")
    parser.add_argument("--only", default=",".join(experiments()), help="a comma list; by default all in turn")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures; none without it")
    flags = parser.parse_args()
    chosen = flags.only.split(",")
    if unknown := [name for name in chosen if name not in experiments()]:
        parser.error(f"--only={','.join(unknown)}: the experiments are {', '.join(experiments())}")
    for name in [] if flags.collect else chosen:
        print(f"== {name}", flush=True)
        subprocess.run(command_of(name, flags.folder, flags.data), check=True)
    for print_table in (print_rates, print_winners, print_levers):
        print_table(flags.folder)
    if flags.pictures is not None:
        draw(flags.folder, flags.pictures)


if __name__ == "__main__":
    main()
