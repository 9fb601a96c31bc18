"""Which numbers are drawn together, and the data that the page's script draws them from.

Each plot names its numbers as metrics.jsonl does. A number that no plot names is drawn by itself, so that none is lost;
those of `DERIVED` follow from others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretraining.tools.report.curves import MOST_BUCKETS, Curve
from pretraining.tools.report.reports import Reports
from pretraining.tools.report.run_record import Event, RunRecord

TRAINING, EVALUATIONS = "training", "evaluations"
MOST_MARKS = 1000
"""Events of one kind and run on the page."""
DIGITS = 7
CUSTOM = "custom/"

DERIVED = (
    *("perplexity", "samples_per_second", "tokens_per_day", "time_left_seconds"),
    *("evaluation_perplexity", "evaluation_loss", "evaluation_token_accuracy", "evaluation_bits_per_byte"),
)
"""Left out: they follow from others. Those of evaluations are drawn for all sets together, or by set."""

PERCENT, SHORT, PLAIN, FIXED = ".1%", ".3~s", ".4~g", ".4~f"


@dataclass(frozen=True)
class Plot:
    """Numbers that share axes.

    Attributes:
        section: of the page.
        unit: of the vertical axis.
        numbers: (kind of reports, name in metrics.jsonl, name in the legend).
        format: of its values, as D3 writes it.
        about: what there is to know, a sentence.
    """

    key: str
    section: str
    title: str
    unit: str
    numbers: tuple[tuple[str, str, str], ...]
    format: str = PLAIN
    about: str = ""


def plots_of(runs: Sequence[RunRecord]) -> list[Plot]:
    """Returns the plots of what the runs have reported, in the order of the page; one without a number is left out."""
    known = {
        TRAINING: list(dict.fromkeys(name for run in runs for name in run.training_curves)),
        EVALUATIONS: list(dict.fromkeys(name for run in runs for name in run.evaluation_curves)),
    }
    plots = []
    for plot in (*_fixed_plots(runs, known), *_custom_plots(known)):
        numbers = tuple(number for number in plot.numbers if number[1] in known[number[0]])
        if numbers:
            plots.append(Plot(**{**vars(plot), "numbers": numbers}))
    drawn = {(kind, name) for plot in plots for kind, name, _ in plot.numbers}
    drawn |= {(kind, name) for kind in known for name in known[kind] if _is_derived(name)}
    return [*plots, *_other_plots(known, drawn)]


def _fixed_plots(runs: Sequence[RunRecord], known: Mapping[str, Sequence[str]]) -> Iterator[Plot]:
    def training(*numbers: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
        return tuple((TRAINING, name, label) for name, label in numbers)

    def by_part(kind: str, prefix: str, least: int = 1) -> tuple[tuple[str, str, str], ...]:
        names = [name for name in known[kind] if name.startswith(prefix)]
        return tuple((kind, name, name.removeprefix(prefix)) for name in names) if len(names) >= least else ()

    loss = (*training(("loss", "training")), (EVALUATIONS, "evaluation_loss", "evaluation"))
    yield Plot("loss", "loss", "Loss", "nats a token", loss, FIXED)
    sets = by_part(EVALUATIONS, "evaluation_loss/", least=2)
    yield Plot("evaluation-sets", "loss", "Evaluation loss by set", "nats a token", sets, FIXED)
    datasets = by_part(TRAINING, "loss/", least=2)
    yield Plot("datasets", "data", "Training loss by dataset", "nats a token", datasets, FIXED)
    several = len(by_part(EVALUATIONS, "evaluation_token_accuracy/")) > 1
    hits = training(("token_accuracy", "training"))
    hits += (
        by_part(EVALUATIONS, "evaluation_token_accuracy/")
        if several
        else ((EVALUATIONS, "evaluation_token_accuracy", "evaluation"),)
    )
    yield Plot("accuracy", "loss", "Token accuracy", "of tokens", hits, PERCENT)
    bits = by_part(EVALUATIONS, "evaluation_bits_per_byte/", least=2)
    bits = bits or ((EVALUATIONS, "evaluation_bits_per_byte", "evaluation"),)
    yield Plot("bits", "loss", "Bits a byte", "bits", bits, FIXED)

    yield Plot("learning-rate", "optimisation", "Learning rate", "", _learning_rates(runs, known[TRAINING]), ".3~e")
    yield Plot("grad-norm", "optimisation", "Gradient norm", "before clipping", training(("grad_norm", "gradient")))
    yield Plot("param-norm", "optimisation", "Parameter norm", "", training(("param_norm", "parameters")))
    skipped = "skipped_updates" if _ever_above_zero(runs, "skipped_updates") else ""
    yield Plot(
        *("skipped", "optimisation", "Updates left out", "in a report's interval"),
        training((skipped, "left out")),
        about="Loss or gradient was not finite, or the loss a spike.",
    )
    z_loss = "z_loss" if _ever_above_zero(runs, "z_loss") else ""
    yield Plot("z-loss", "optimisation", "z-loss", "", training((z_loss, "z-loss")))

    rates = training(
        ("tokens_per_second_per_gpu", "in the interval"), ("tokens_per_second_per_gpu_overall", "since the start")
    )
    yield Plot(
        *("throughput", "speed", "Throughput", "tokens/s a device", rates, SHORT),
        about="Evaluations and saves do not count.",
    )
    utilisation = training(("mfu", "MFU"), ("hfu", "HFU"))
    yield Plot("mfu", "speed", "Model FLOPs utilisation", "of the device's dense bfloat16 peak", utilisation, PERCENT)
    yield Plot("step-seconds", "speed", "Time of a step", "seconds", training(("step_seconds", "a step")))
    waiting = training(("data_share", "waiting for data"))
    yield Plot("data-share", "speed", "Waiting for data", "of the training time", waiting, PERCENT)

    memory = training(
        ("memory_gib", "peak"), ("memory_allocated_gib", "allocated"), ("memory_reserved_gib", "reserved")
    )
    yield Plot("memory", "memory", "Memory of the fullest process", "GiB", memory)


def _learning_rates(runs: Sequence[RunRecord], known: Sequence[str]) -> tuple[tuple[str, str, str], ...]:
    """The rate of each group where they differ, else the one rate."""
    groups = [name for name in known if name.startswith("learning_rate_group_")]

    def differs(name: str) -> bool:
        curves = [(run.training_curves.get(name), run.training_curves.get("learning_rate")) for run in runs]
        return any(a is not None and b is not None and not np.array_equal(a.values, b.values) for a, b in curves)

    if any(differs(name) for name in groups):
        return tuple((TRAINING, name, f"group {name.rpartition('_')[2]}") for name in groups)
    return ((TRAINING, "learning_rate", "learning rate"),)


def _ever_above_zero(runs: Sequence[RunRecord], name: str) -> bool:
    return any(curve.values.max() > 0 for run in runs if (curve := run.training_curves.get(name)) is not None)


def _custom_plots(known: Mapping[str, Sequence[str]]) -> Iterator[Plot]:
    """A plot for each of the user's metrics, with its evaluations."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for name in known[TRAINING]:
        if name.startswith(CUSTOM):
            found.setdefault(name.removeprefix(CUSTOM), []).append((TRAINING, name, "training"))
    prefix = f"evaluation_{CUSTOM}"
    for name in known[EVALUATIONS]:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            metric = next((each for each in found if rest == each or rest.startswith(f"{each}/")), rest)
            label = f"evaluation {rest.removeprefix(metric).lstrip('/')}".strip()
            found.setdefault(metric, []).append((EVALUATIONS, name, label))
    for number, (metric, numbers) in enumerate(found.items()):
        yield Plot(f"custom-{number}", "custom", metric, "", tuple(numbers))


def _is_derived(name: str) -> bool:
    is_group = name.startswith(("learning_rate_group_", "loss/"))
    return (
        is_group
        or name in (*DERIVED, "learning_rate", "z_loss", "skipped_updates")
        or any(name.startswith(f"{each}/") for each in DERIVED)
    )


def _other_plots(known: Mapping[str, Sequence[str]], drawn: set[tuple[str, str]]) -> Iterator[Plot]:
    left = [(kind, name) for kind in known for name in known[kind] if (kind, name) not in drawn]
    for number, (kind, name) in enumerate(left):
        yield Plot(f"other-{number}", "other", name, "", ((kind, name, name),))


# The script's data


def script_data(runs: Sequence[RunRecord], plots: Sequence[Plot]) -> dict[str, Any]:
    """Returns everything that is drawn, JSON-able: runs with their positions and events, plots with their series."""
    wanted = {(kind, name) for plot in plots for kind, name, _ in plot.numbers}
    return {
        "runs": [_run_data(run, wanted) for run in runs],
        "plots": [
            {
                "key": plot.key,
                "title": plot.title,
                "unit": plot.unit,
                "format": plot.format,
                "series": [
                    {"run": place, "kind": kind, "name": name, "label": label}
                    for place, run in enumerate(runs)
                    for kind, name, label in plot.numbers
                    if name in reports_and_curves(run, kind)[1]
                ],
            }
            for plot in plots
        ],
    }


def reports_and_curves(run: RunRecord, kind: str) -> tuple[Reports, Mapping[str, Curve]]:
    """Returns the reports of a kind, of training or of evaluations, and their curves by name."""
    if kind == TRAINING:
        return run.training, run.training_curves
    return run.evaluations, run.evaluation_curves


def _run_data(run: RunRecord, wanted: set[tuple[str, str]]) -> dict[str, Any]:
    return {
        "name": run.name,
        "flops": run.flops_per_token,
        "marks": marks_of(run),
        **{
            kind: _reports_data(
                *reports_and_curves(run, kind), {name for each, name in wanted if each == kind}, run.began
            )
            for kind in (TRAINING, EVALUATIONS)
        },
    }


def _reports_data(reports: Reports, curves: Mapping[str, Curve], wanted: set[str], began: float) -> dict[str, Any]:
    """Positions of all reports that a curve has a point of, and of each curve its places among them and its values."""
    drawn = {name: curve for name, curve in curves.items() if name in wanted}
    rows = np.unique(np.concatenate([np.empty(0, np.int64), *(curve.rows for curve in drawn.values())]))
    data: dict[str, Any] = {
        "step": numbers(reports.position("step")[rows]),
        "tokens": numbers(reports.position("tokens_seen")[rows]),
        "seconds": numbers(reports.position("time")[rows] - began),
        "curves": {},
    }
    for name, curve in drawn.items():
        places = np.searchsorted(rows, curve.rows)
        is_all = len(places) == len(rows)
        data["curves"][name] = {"at": None if is_all else places.tolist(), "y": numbers(curve.values)}
    return data


def numbers(values: Iterable[float]) -> list[float | int | None]:
    """Returns numbers as JSON has them, short: whole ones as they are, others to seven digits, NaN as null."""
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.{DIGITS}g}")


def marks_of(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Returns the events by kind, with their positions on every axis and a text each; samples of text are none."""
    by_kind: dict[str, list[Event]] = {}
    for event in run.events:
        if event.kind != "sample" and math.isfinite(event.step):
            by_kind.setdefault(event.kind, []).append(event)
    marks = {}
    for kind, events in by_kind.items():
        places = np.unique(np.linspace(0, len(events) - 1, min(len(events), MOST_MARKS)).astype(int)).tolist()
        shown = [events[place] for place in places]
        marks[kind] = {
            "step": numbers(event.step for event in shown),
            "tokens": numbers(run.tokens_at([event.step for event in shown])),
            "seconds": numbers(event.seconds - run.began for event in shown),
            "text": [described(event) for event in shown],
            "total": len(events),
        }
    return marks


def described(event: Event) -> str:
    """Says what happened, in a line."""
    details = event.details

    def shown(name: str) -> str:
        value = details.get(name)
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    match event.kind:
        case "start":
            text = "the run begins" if event.step == 0 else "begins"
        case "restart":
            reason = f": {shown('previous_reason')}" if shown("previous_reason") else ""
            text = f"start {shown('number')}, after the one before {_ended(shown('previous_status'))}{reason}"
        case "restore":
            text = f"goes on from {_file_name(shown('checkpoint'))}"
        case "checkpoint":
            text = f"{shown('kind')}, {_file_name(shown('path'))}"
        case "evaluation":
            text = f"loss {shown('evaluation_loss')}"
        case "skip":
            text = f"update left out: {shown('reason')}"
        case "rollback":
            samples: Any = details.get("samples")
            is_range = isinstance(samples, list) and len(samples) == 2
            left = f", without samples {samples[0]}-{samples[1]}" if is_range else ""
            text = f"back to before step {shown('first_step')}{left}"
        case "phase":
            text = f"batches of {shown('global_batch_size')} sequences{_weights(details.get('weights'))}"
        case "end":
            text = f"{shown('status')}: {shown('reason')}"
        case _:
            text = ", ".join(f"{name} {shown(name)}" for name in list(details)[:8])
    return text if len(text) <= 300 else f"{text[:299]}…"


def _ended(status: str) -> str:
    return {"killed": "was killed", "failed": "failed", "preempted": "was preempted", "finished": "had finished"}.get(
        status, status
    )


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _weights(weights: Any) -> str:
    if not isinstance(weights, Mapping) or len(weights) < 2:
        return ""
    known = {str(name): float(weight) for name, weight in weights.items() if type(weight) in (int, float)}
    total = sum(known.values())
    return ", " + ", ".join(f"{name} {weight / total:.1%}" for name, weight in known.items()) if total > 0 else ""


def about_points(runs: Sequence[RunRecord]) -> str:
    """Says how many points are drawn of how many, and how they were chosen."""
    curves = [
        curve for run in runs for kind in (TRAINING, EVALUATIONS) for curve in reports_and_curves(run, kind)[1].values()
    ]
    thinned = [curve for curve in curves if curve.is_thinned]
    if not thinned:
        return "Every report is a point of the curves."
    longest = max(thinned, key=lambda curve: curve.total)
    return (
        f"Curves are thinned: the longest has {longest.total:,} reports, of which {len(longest.values):,} are drawn, "
        f"the lowest and the highest of each of up to {MOST_BUCKETS:,} buckets of equally many reports. So no extreme "
        "is lost, and what lies between two points is not shown at any zoom. Smoothing works on what is drawn."
    )
