"""`pretrain report`: a page about one run, or about several runs side by side.

    folders of runs --read_runs--> RunRecords --draw, tables--> report.html, one file that needs no network

matplotlib draws the curves as SVG, over steps for one run and over tokens for several. All text from files is escaped.
The folders are only read, so the page of a running run can be made at any time.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.files import check_replaceable, is_folder, output_errors, write_atomic
from pretraining.observability.report_file import number_of
from pretraining.text import format_seconds
from pretraining.tools.command_settings import PageConfig
from pretraining.tools.run_records import Columns, RunRecord, read_runs, runs_of_sweep, seconds_of, settings_as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

PAGE = "report.html"
BUCKETS = 300
MOST_ROWS, MOST_MARKS = 200, 12
MARKED = ("restart", "return", "rollback", "phase")

STYLE = """
:root { font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 75rem; margin: auto; padding: 1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
div.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
td, th { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #8885; vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 4rem; font-variant-numeric: tabular-nums; white-space: pre-wrap; }
"""


@dataclass(frozen=True)
class Plot:
    """A plot of numbers that share axes; `numbers` is a pattern of names in metrics.jsonl."""

    title: str
    unit: str
    numbers: str


PLOTS = (
    Plot("Loss", "nats per token", r"loss|evaluation_loss(/.*)?"),
    Plot("Training loss by dataset", "nats per token", r"loss/.*"),
    Plot("Perplexity", "", r"(evaluation_)?perplexity(/.*)?"),
    Plot("Token accuracy", "", r"(evaluation_)?token_accuracy(/.*)?"),
    Plot("Bits per byte", "", r"(evaluation_)?bits_per_byte(/.*)?"),
    Plot("Learning rate", "", r"learning_rate(_group_\d+)?"),
    Plot("Gradient norm", "", r"grad_norm"),
    Plot("Skipped updates", "", r"skipped_updates"),
    Plot("Tokens per second and device", "", r"tokens_per_second_per_gpu"),
    Plot("MFU", "share", r"mfu"),
    Plot("Waiting for data", "share of the time", r"data_share"),
    Plot("Peak memory", "GiB", r"memory_gib"),
)
OF_SETS = Plot("Evaluation loss by set", "nats per token", r"evaluation_loss/.*")
FEW_CURVES = 6
"""Curves whose legend fits into the plot; that of more stands below it."""


def report(config: PageConfig) -> None:
    """Write the page, and the picture of the losses if `picture` is set.

    Raises:
        ConfigError: a folder is not a run, a file ending is wrong, or matplotlib is missing.
        DataError: a file cannot be written.
    """
    if not config.run_path:
        raise ConfigError("--run_path is empty: name the folder of a run")
    picture = None if config.picture is None else Path(config.picture)
    if picture is not None and picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture={picture} must end in .png or .svg")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("pretrain report needs matplotlib: pip install matplotlib") from None
    runs = read_runs(config.run_path)
    first = Path(config.run_path[0])
    folder = Path() if len(config.run_path) > 1 else first if runs_of_sweep(first) else runs[0].path
    path = Path(config.output_path) if config.output_path else folder / PAGE
    if is_folder(path) or path.suffix != ".html":
        raise ConfigError(f"--output_path={path} must be a file that ends in .html")
    _write(path, render(runs).encode("utf-8", "replace"))
    for run in runs:
        for note in run.notes:
            log.info("%s: %s", run.name, note)
    log.info("page: %s; open it in a browser", path)
    if picture is not None:
        _write(picture, _draw(_loss_plot(runs), runs, {}, picture.suffix[1:]))
        log.info("picture: %s", picture)


def _write(path: Path, content: bytes) -> None:
    with output_errors(path):
        check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)


def render(runs: Sequence[RunRecord]) -> str:
    """Return the HTML page of one or more runs."""
    title = escape(", ".join(run.name for run in runs))
    notes = "".join(f"<li>{escape(run.name)}: {escape(note)}</li>" for run in runs for note in run.notes)
    colours: dict[str, str] = {}
    plots = PLOTS if len(runs) == 1 else (replace(PLOTS[0], numbers="loss|evaluation_loss"), OF_SETS, *PLOTS[1:])
    figures = [_figure(plot, runs, colours) for plot in (*plots, *_custom_plots(runs))]
    sections = [
        ("", f"<ul>{notes}</ul>" if notes else ""),
        ("Summary", _table(_summary(runs))),
        ("Curves", f'<div class="plots">{"".join(figures)}</div>' if any(figures) else "The runs have no reports yet."),
        ("Events", _table(_events(runs))),
        ("Settings that differ" if len(runs) > 1 else "Settings that are not defaults", _table(_settings(runs))),
        ("Changes between starts", _table(_changes(runs))),
    ]
    body = "".join(f"<h2>{heading}</h2>{content}" if heading else content for heading, content in sections if content)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: report</title><style>{STYLE}</style></head><body><h1>{title}</h1>{body}"
        f"<p>Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by pretrain report.</p></body></html>\n"
    )


def _table(rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table, whose head is the first row; empty if there are no other rows."""
    head, *body = rows
    cells = ["".join(f"<th>{escape(str(cell))}</th>" for cell in head)]
    cells += ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in body]
    rows_of = "".join(f"<tr>{cell}</tr>" for cell in cells)
    return f'<div class="scroll"><table>{rows_of}</table></div>' if body else ""


# Curves


def _loss_plot(runs: Sequence[RunRecord]) -> Plot:
    """Return the plot of losses: all of one run; for several the mean over the evaluation sets, or that of training."""
    if len(runs) == 1:
        return PLOTS[0]
    are_evaluated = all(math.isfinite(run.evaluations.last("evaluation_loss")) for run in runs)
    title, name = ("Evaluation loss", "evaluation_loss") if are_evaluated else ("Training loss", "loss")
    return Plot(title, PLOTS[0].unit, name)


def _custom_plots(runs: Sequence[RunRecord]) -> list[Plot]:
    """Return a plot per custom metric, of training and evaluations, and per benchmark task."""
    names = dict.fromkeys(
        match[1]
        for run in runs
        for name in (*run.training, *run.evaluations)
        if (match := re.match(r"(?:evaluation_)?((?:custom|task)/[^/]*)", name))
    )
    return [Plot(name.partition("/")[2], "", rf"(evaluation_)?{re.escape(name)}(/(?!.*_stderr).*)?") for name in names]


def _figure(plot: Plot, runs: Sequence[RunRecord], colours: dict[str, str]) -> str:
    """Return a plot as HTML; empty if no run has any of its numbers."""
    if not any(True for run in runs for _ in _curves(plot, run, "step")):
        return ""
    svg = _draw(plot, runs, colours, "svg").decode()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"


def _draw(plot: Plot, runs: Sequence[RunRecord], colours: dict[str, str], form: str) -> bytes:
    """Return a plot as "svg" or "png".

    Args:
        colours: colour by label, shared by all plots of a page; new labels are added.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    axis = "step" if len(runs) == 1 else "tokens_seen"
    curves = [(run, *curve) for run in runs for curve in _curves(plot, run, axis)]
    rows = -(-len(curves) // 2) if len(curves) > FEW_CURVES else 0  # of a legend below the axes
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}
    with mpl.rc_context(style | {"text.parse_math": False, "text.usetex": False}):
        figure = Figure(figsize=(6.0, 3.4 + 0.18 * rows), layout="constrained")
        axes = figure.add_subplot()
        labels = _draw_curves(axes, curves, runs, colours)
        for run in runs:
            _mark(axes, run, axis, len(runs) > 1)
        axes.set_title(plot.title)
        axes.set_xlabel("step" if len(runs) == 1 else "tokens")
        axes.set_ylabel(plot.unit)
        axes.grid(alpha=0.25)
        form_of_legend: dict[str, Any] = {"fontsize": "small", "framealpha": 0.0}
        if len(curves) > 1:
            outside = {"loc": "outside lower center", "ncols": 2} | form_of_legend
            legend = figure.legend(**outside) if rows else axes.legend(**form_of_legend)
            for text, label in zip(legend.get_texts(), labels, strict=True):
                text.set_text(label)
        content = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(content, format=form, metadata=metadata, dpi=150)
    return content.getvalue()


def _draw_curves(axes: Axes, curves: Sequence[Any], runs: Sequence[RunRecord], colours: dict[str, str]) -> list[str]:
    """Draw curves, and return their labels; matplotlib's own labels have none that begin with an underscore."""
    labels = list[str]()
    is_one_per_run = len({name for _, name, _, _ in curves}) == 1
    for run, name, x, y in curves:
        named = run.name if is_one_per_run else f"{run.name}: {_label(name)}"
        label = _label(name) if len(runs) == 1 else named
        colour = colours.setdefault(label, f"C{len(colours) % 10}")
        marker = "." if name.startswith("evaluation_") or len(x) == 1 else None
        axes.plot(x, y, label="curve", color=colour, marker=marker, linewidth=1.0)
        labels.append(label)
    return labels


def _curves(plot: Plot, run: RunRecord, axis: str) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Yield name, x and y of each curve of a plot, except curves that are all 0 or repeat another curve."""
    drawn: list[NDArray[Any]] = []
    for reports in (run.training, run.evaluations):
        for name in reports:
            if re.fullmatch(plot.numbers, name):
                x, y = reports[axis], reports[name]
                is_known = np.isfinite(x) & np.isfinite(y)
                x, y = x[is_known], y[is_known]
                if y.any() and not any(np.array_equal(y, other) for other in drawn):
                    drawn.append(y)
                    yield name, *downsample(x, y)


def _label(name: str) -> str:
    """Return the label of a curve: its dataset or evaluation set, else "training" or "evaluation"."""
    if name.removeprefix("evaluation_").startswith("custom/"):
        name = name.replace("custom/", "", 1)
    of, _, part = name.partition("/")
    return part or ("evaluation" if of.startswith("evaluation_") else "training")


def downsample(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first and last point of a curve, and the lowest and highest point of each bucket."""
    if len(y) <= 4 * BUCKETS:
        return x, y
    edges = np.linspace(0, len(y), BUCKETS + 1).astype(int)
    kept = {0, len(y) - 1}
    for begin, end in itertools.pairwise(edges):
        kept |= {int(begin + y[begin:end].argmin()), int(begin + y[begin:end].argmax())}
    places = sorted(kept)
    return x[places], y[places]


def _mark(axes: Axes, run: RunRecord, axis: str, is_named: bool) -> None:
    """Draw a vertical line at the newest restarts, rollbacks and changes of the mixture."""
    marked = [event for event in run.events if event.get("event") in MARKED and number_of(event["step"]) > 0]
    steps, positions = run.training["step"], run.training[axis]
    for event in marked[-MOST_MARKS:]:
        place = np.searchsorted(steps, event["step"])
        if place < len(steps) and np.isfinite(positions[place]):
            axes.axvline(positions[place], color="black", linewidth=0.6, linestyle=":")
            text = f"{run.name}: {event['event']}" if is_named else event["event"]
            across = axes.get_xaxis_transform()
            axes.text(positions[place], 0.98, text, transform=across, rotation=90, va="top", size=6)


# Tables: each function yields the head first


def _summary(runs: Sequence[RunRecord]) -> Iterator[Sequence[object]]:
    yield ("run", "state", "steps", "tokens", "time", "training loss", "evaluation loss", "tokens/s/device", "MFU")
    for run in runs:
        training, evaluations = run.training, run.evaluations
        times = [seconds_of(event.get("time")) for event in run.events] + [*training["time"], *evaluations["time"]]
        known = [time for time in times if math.isfinite(time)]
        yield (
            run.name,
            f"{run.state}: {run.reason}" if run.reason else run.state,
            _format(training.last("step"), ",.0f"),
            _format(training.last("tokens_seen"), ",.0f"),
            format_seconds(max(known) - min(known)) if known else "",
            _last_and_best(training, "loss"),
            _last_and_best(evaluations, "evaluation_loss"),
            _format(_median(training["tokens_per_second_per_gpu"]), ",.0f"),
            _format(_median(training["mfu"]), ".1%"),
        )


def _last_and_best(reports: Columns, name: str) -> str:
    values = reports[name]
    if not np.isfinite(values).any():
        return ""
    best = int(np.nanargmin(values))
    return f"{reports.last(name):.4f} (best {values[best]:.4f} at step {reports['step'][best]:,.0f})"


def _median(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _format(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ""


def _events(runs: Sequence[RunRecord]) -> Iterator[Sequence[object]]:
    yield ("run", "time (UTC)", "step", "event", f"details (the newest {MOST_ROWS} events of a run)")
    for run in runs:
        for event in run.events[-MOST_ROWS:]:
            details = {name: value for name, value in event.items() if name not in ("step", "time", "event")}
            text = ", ".join(f"{name}={value}" for name, value in details.items() if value not in (None, ""))
            yield run.name, event.get("time", ""), event["step"], event.get("event", ""), text


def _settings(runs: Sequence[RunRecord]) -> Iterator[Sequence[object]]:
    columns, defaults = [(run.name, run.settings) for run in runs if run.settings], settings_as_text(TrainConfig())
    if len(runs) == 1 and columns:
        columns.append(("default", defaults))
    yield ("setting", *(name for name, _ in columns))
    for name in defaults:
        values = [settings[name] for _, settings in columns]
        if len(set(values)) > 1:
            yield name, *values


def _changes(runs: Sequence[RunRecord]) -> Iterator[Sequence[object]]:
    yield ("run", "start", "at step", "property", "before", "after")
    for run in runs:
        for number, (before, now) in enumerate(itertools.pairwise(run.environments), 2):
            for name in dict.fromkeys((*before, *now)):
                if name not in ("time", "step") and before.get(name) != now.get(name):
                    yield run.name, number, now.get("step", ""), name, before.get(name, ""), now.get(name, "")
