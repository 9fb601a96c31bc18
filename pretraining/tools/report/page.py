"""The page: one HTML file with everything in it, its data, its script and the plotting library.

    RunRecords --> overview, tables, texts (here, escaped) + plots' data (plots.py) --page.html--> one text

Texts of files reach the page as escaped HTML, or as JSON that the script never takes for HTML.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pretraining.observability.display import format_seconds
from pretraining.observability.report_file import written_time
from pretraining.text import count_of
from pretraining.tools.list_checkpoints import Row
from pretraining.tools.report.markup import Markup, element, folded, joined, section, table
from pretraining.tools.report.plots import Plot, about_points, described, plots_of, script_data
from pretraining.tools.report.reports import number_of
from pretraining.tools.report.run_record import Event, RunRecord, default_settings
from pretraining.tools.report.sketches import sketch

HERE = Path(__file__).parent
MOST_ROWS = 200
"""Of a table of events or checkpoints; the newest."""
MOST_SAMPLES = 20
NOTHING = "–"

STATES = {
    "finished": ("good", "finished"),
    "running": ("wait", "still running"),
    "preempted": ("wait", "preempted: told to end, and saved"),
    "failed": ("bad", "failed"),
    "killed": ("bad", "ended without a word: killed, or its machine was"),
    "unknown": ("wait", "nobody knows how it stands"),
}
SECTIONS = {
    "loss": "Loss",
    "optimisation": "Optimisation",
    "speed": "Speed",
    "memory": "Memory",
    "data": "Data",
    "custom": "Metrics of your own",
    "other": "Other numbers",
}
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def render(runs: Sequence[RunRecord], plotly: str) -> str:
    """Returns the page.

    Args:
        runs: at least one.
        plotly: the plotting library's script.
    """
    plots = plots_of(runs)
    body = [*_tables_of_data(runs)]
    parts: list[tuple[str, str, Sequence[str]]] = []
    for name, title in SECTIONS.items():
        figures = [_figure(plot, runs) for plot in plots if plot.section == name]
        extra = body if name == "data" else [_about_speed(runs)] if name == "speed" and figures else []
        if figures or extra:
            parts.append((name, title, [element("div", *figures, class_="plots"), *extra] if figures else extra))
    parts += [
        ("events", "What happened", _events(runs)),
        ("samples", "Samples of text", _samples(runs)),
        ("checkpoints", "Checkpoints", _checkpoints(runs)),
        ("settings", "Settings", _settings(runs)),
        ("environment", "What it ran on", _environments(runs)),
    ]
    parts = [part for part in parts if part[2]]
    content = [
        element("a", "To the curves", href=f"#{parts[0][0]}" if parts else "#top", class_="skip"),
        _head(runs, parts),
        element(
            "main",
            _controls(bool(plots)),
            *(section(name, title, *made) for name, title, made in parts),
            _footer(runs),
            id="top",
        ),
    ]
    slots = {
        "title": joined([f"{', '.join(run.name for run in runs)}: report"]),
        "style": _asset("page.css"),
        "content": joined(content),
        "data": _json(script_data(runs, plots)),
        "plotly": plotly.replace("</script", "<\\/script"),
        "script": _asset("page.js"),
    }
    return _SLOT.sub(lambda slot: slots[slot[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _json(document: object) -> str:
    """JSON that ends no script element and begins no comment in one."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# The head


def _head(runs: Sequence[RunRecord], parts: Sequence[tuple[str, str, Sequence[str]]]) -> Markup:
    links = [element("li", element("a", title, href=f"#{name}")) for name, title, _ in parts]
    notes = [element("li", f"{run.name}: {note}" if len(runs) > 1 else note) for run in runs for note in run.notes]
    single = runs[0]
    if len(runs) == 1:
        head = [
            element("p", "Run", class_="eyebrow"),
            element("h1", single.name),
            element("p", _state(single), *([f" · {single.reason}"] if single.reason else [])),
            element("dl", *(_tile(*tile) for tile in _tiles(single)), class_="tiles"),
        ]
    else:
        head = [
            element("p", f"{len(runs)} runs", class_="eyebrow"),
            element("h1", ", ".join(run.name for run in runs)),
            _comparison(runs),
        ]
    return element(
        "header",
        *head,
        *([element("ul", *notes, class_="notes")] if notes else []),
        element("nav", element("ul", *links), aria_label="On this page"),
        class_="top",
    )


def _state(run: RunRecord) -> Markup:
    kind, words = STATES.get(run.state, ("wait", run.state))
    return element("span", words, class_=f"state {kind}")


def _tile(name: str, value: str, more: str) -> Markup:
    return element("div", element("dt", name), element("dd", value, *([element("small", more)] if more else [])))


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """What a run comes to: name, value, what there is to add."""
    training, evaluations = run.training, run.evaluations
    last, best = _ends(run, "loss")
    evaluated, best_evaluated = _ends(run, "evaluation_loss")
    wall = run.latest() - run.began
    trained = training.means.seconds
    share = f", {trained / wall:.0%} of it training" if 0 < trained <= wall else ""  # clocks may have been set back
    mfu, rate = training.means.of("mfu"), training.means.of("tokens_per_second_per_gpu")
    left = number_of(training.newest.get("time_left_seconds"))
    tiles = [
        ("Steps", _count(training.newest.get("step", evaluations.newest.get("step"))), _starts(run)),
        ("Tokens", _large(number_of(training.newest.get("tokens_seen"))), _flops(run)),
        ("Wall time", format_seconds(wall) if math.isfinite(wall) else NOTHING, f"from first to last report{share}"),
        ("Training loss", last, best),
    ]
    if run.evaluation_curves:
        tiles.append(("Evaluation loss", evaluated, best_evaluated))
    tiles.append(("Tokens/s a device", NOTHING if rate is None else _large(rate), "mean over the time trained"))
    if mfu is not None:
        tiles.append(("MFU", f"{mfu:.1%}", "mean over the time trained"))
    if run.state == "running" and math.isfinite(left):
        tiles.append(("Left", format_seconds(left), "at the rate so far"))
    return tiles


def _ends(run: RunRecord, name: str) -> tuple[str, str]:
    """The last value of a loss, and where the best one was."""
    curve = run.training_curves.get(name) or run.evaluation_curves.get(name)
    reports = run.training if name in run.training_curves else run.evaluations
    if curve is None:
        return NOTHING, ""
    place = curve.lowest()
    step = reports.position("step")[curve.rows[place]]
    return f"{curve.values[-1]:.4f}", f"best {curve.values[place]:.4f} at step {_count(step)}"


def _starts(run: RunRecord) -> str:
    starts = run.status.starts if run.status is not None else 0
    return count_of(starts, "start") if starts else ""


def _flops(run: RunRecord) -> str:
    tokens = number_of(run.training.newest.get("tokens_seen"))
    if run.flops_per_token is None or not math.isfinite(tokens):
        return ""
    return f"{run.flops_per_token * tokens:.2e} FLOPs{' at most' if run.has_document_mask else ''}"


def _comparison(runs: Sequence[RunRecord]) -> Markup:
    """What several runs come to, a row a run."""
    columns = list(dict.fromkeys(name for run in runs for name, _, _ in _tiles(run)))
    rows = []
    for run in runs:
        tiles = {name: (value, more) for name, value, more in _tiles(run)}
        cells = [tiles.get(column, (NOTHING, "")) for column in columns]
        shown = [f"{value} ({more})" if "best" in more else value for value, more in cells]
        rows.append([run.name, joined([_state(run)]), *shown])
    return table("What the runs come to", ["run", "state", *columns], rows, range(2, len(columns) + 2))


def _controls(has_plots: bool) -> Markup:
    if not has_plots:
        return element("p", "No report can be drawn yet.", class_="muted")
    axes = [("steps", "steps"), ("tokens", "tokens"), ("time", "time"), ("flops", "FLOPs")]
    choices = [
        element(
            "label",
            element("input", type="radio", name="x", value=value, checked=value == "steps"),
            element("span", name),
        )
        for value, name in axes
    ]
    slider = element("input", id="smoothing", type="range", min="0", max="0.99", step="0.01", value="0")
    return element(
        "div",
        element("fieldset", element("legend", "Over"), *choices, class_="segments"),
        element("label", element("input", id="log-x", type="checkbox"), "log axis"),
        element("label", "Smoothing", slider, element("output", "off", id="smoothing-value", for_="smoothing")),
        element("fieldset", element("legend", "Marks"), id="marks"),
        element("noscript", "The curves are sketches: a script draws them in full, and this browser runs none."),
        class_="controls",
        role="group",
        aria_label="How the curves are drawn",
    )


def _figure(plot: Plot, runs: Sequence[RunRecord]) -> Markup:
    heading = element("h3", plot.title, id=f"plot-{plot.key}")
    button = element("button", "log", type="button", data_log=plot.key, aria_pressed="false", title="logarithmic axis")
    caption = element("figcaption", plot.about) if plot.about else Markup("")
    labels = ", ".join(dict.fromkeys(label for _, _, label in plot.numbers))
    about = f"{plot.title}: {labels}"
    drawing = element("div", sketch(plot, runs), class_="plot", data_plot=plot.key, role="img", aria_label=about)
    return element(
        "figure",
        element("header", heading, element("span", plot.unit, class_="unit"), button),
        drawing,
        caption,
        class_="wide" if plot.key == "loss" else None,
        aria_labelledby=f"plot-{plot.key}",
    )


def _footer(runs: Sequence[RunRecord]) -> Markup:
    flops = [f"{run.name}: {run.flops_per_token:.3e}" for run in runs if run.flops_per_token is not None]
    lines = [
        about_points(runs),
        "A zoom into one plot's horizontal axis is one into all; a double click takes it back. The camera above a plot "
        "saves it as SVG.",
    ]
    if flops:
        lines.append(
            f"FLOPs are tokens times FLOPs a token ({', '.join(flops)}): 6 for each matmul parameter, and those of "
            "causal attention over whole rows."
        )
    lines.append(f"Written {written_time(datetime.now(UTC).timestamp())} by pretrain report.")
    return element("footer", *(element("p", line) for line in lines))


# Sections of tables


def _about_speed(runs: Sequence[RunRecord]) -> Markup:
    """What the time went to, as far as reports tell: waiting for data, training, and all between reports."""
    rows = []
    for run in runs:
        means, wall = run.training.means, run.latest() - run.began
        waiting, trained = means.of("data_share"), means.seconds
        if not 0 < trained <= wall:
            continue
        waited = trained * (waiting or 0.0)
        rest = wall - trained
        rows.append(
            [run.name, format_seconds(wall)]
            + [f"{format_seconds(each)} ({each / wall:.0%})" for each in (trained - waited, waited, rest)]
        )
    if not rows:
        return Markup("")
    head = ["run", "wall time", "computing and communicating", "waiting for data", "starts, evaluations, saves, pauses"]
    caption = "What the wall time went to, from the times of reports and their seconds a step"
    return table(caption, head, rows, range(1, 5))


def _tables_of_data(runs: Sequence[RunRecord]) -> list[Markup]:
    tables = []
    for run in runs:
        if not run.mixture:
            continue
        rows = [
            [
                part.dataset,
                f"{part.first_step:,}–{part.end_step:,}",
                f"{part.asked:.2%}",
                f"{part.realised:.2%}",
                f"{part.samples:,}",
            ]
            for part in run.mixture
        ]
        whose = f" of {run.name}" if len(runs) > 1 else ""
        head = ["dataset", "steps", "asked", "realised", "samples"]
        tables.append(table(f"Mixture{whose}, up to its newest checkpoint", head, rows, range(1, 5)))
    return tables


def _events(runs: Sequence[RunRecord]) -> list[Markup]:
    if not any(run.events for run in runs):
        return []
    heading = element("h3", "Events", id="plot-events")
    strip = element(
        "div", class_="plot", data_plot="events", role="img", aria_label="When what happened; the table tells"
    )
    made = [element("figure", element("header", heading), strip, class_="wide strip", aria_labelledby="plot-events")]
    for run in runs:
        notable = [event for event in run.events if event.kind not in ("checkpoint", "evaluation", "sample", "restore")]
        made.append(_event_table(run, notable, "Starts, ends, phases, skipped updates and rollbacks", len(runs) == 1))
        others = [event for event in run.events if event.kind in ("checkpoint", "evaluation", "restore")]
        made.append(_event_table(run, others, "Checkpoints, evaluations and what starts went on from", False))
    return made


def _event_table(run: RunRecord, events: Sequence[Event], title: str, is_open: bool) -> Markup:
    if not events:
        return Markup("")
    rows = [[event.kind, _count(event.step), _moment(event.seconds), described(event)] for event in events[-MOST_ROWS:]]
    return folded(
        f"{title} of {run.name}: {len(events):,}",
        table(_newest_of(len(events), "events"), ["event", "step", "time (UTC)", ""], rows, [1]),
        is_open=is_open,
    )


def _newest_of(total: int, what: str) -> str:
    return f"The newest {MOST_ROWS} of {total:,} {what}" if total > MOST_ROWS else f"{total:,} {what}"


def _samples(runs: Sequence[RunRecord]) -> list[Markup]:
    made = []
    for run in runs:
        samples = [_sample(run, event, len(runs) > 1) for event in run.events if _is_sample(event)]
        made += samples[-1:]
        if len(samples) > 1:
            earlier = samples[-2 : -2 - MOST_SAMPLES : -1]
            made.append(folded(f"Earlier samples of {run.name}: {len(earlier)}", *earlier))
    return made


def _is_sample(event: Event) -> bool:
    return event.kind == "sample" and isinstance(event.details.get("text"), str)


def _sample(run: RunRecord, event: Event, is_named: bool) -> Markup:
    prompt = event.details.get("prompt")
    text = element("pre", element("b", prompt if isinstance(prompt, str) else ""), event.details["text"])
    whose = f"{run.name}, " if is_named else ""
    return joined([element("p", f"{whose}step {_count(event.step)}", class_="muted"), text])


def _checkpoints(runs: Sequence[RunRecord]) -> list[Markup]:
    made = []
    for run in runs:
        if not run.checkpoints:
            continue
        rows = [_checkpoint_row(row) for row in run.checkpoints[-MOST_ROWS:]]
        total = sum(row.bytes for row in run.checkpoints)
        shown = table(
            _newest_of(len(run.checkpoints), "checkpoints"),
            ["name", "step", "tokens", "loss", "evaluation loss", "size", ""],
            rows,
            range(1, 6),
        )
        whose = f" of {run.name}" if len(runs) > 1 else ""
        many = len(rows) > 12 or len(runs) > 1
        made.append(
            folded(f"{count_of(len(run.checkpoints), 'checkpoint')}{whose}, {_bytes(total)}", shown, is_open=not many)
        )
    return made


def _checkpoint_row(row: Row) -> list[str]:
    notes = [row.state, row.kind if row.kind != "interval" else None, "best" if row.best else None, row.fault]
    return [
        row.name,
        _count(row.step),
        _count(row.tokens_seen),
        *(NOTHING if loss is None else f"{loss:.4f}" for loss in (row.loss, row.evaluation_loss)),
        _bytes(row.bytes),
        ", ".join(dict.fromkeys(filter(None, notes))),
    ]


def _settings(runs: Sequence[RunRecord]) -> list[Markup]:
    known = [run for run in runs if run.settings]
    if not known:
        return []
    if len(known) > 1:
        differing = differences([run.settings for run in known])
        rows = [[name, *values] for name, values in differing.items()]
        head = ["setting", *(run.name for run in known)]
        made = [table(f"Settings that differ between the runs: {len(rows)}", head, rows)]
    else:
        changed = changes(default_settings(), known[0].settings)
        rows = [[name, now, before] for name, (before, now) in changed.items() if before != NOTHING]
        made = [table(f"Settings that are not at their defaults: {len(rows)}", ["setting", "value", "default"], rows)]
    for run in known:
        whole = table("config.yaml", ["setting", "value"], [[name, value] for name, value in run.settings.items()])
        whose = f" of {run.name}" if len(runs) > 1 else ""
        made.append(folded(f"All {len(run.settings)} settings{whose}", whole))
    return made


def differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Returns the settings whose values differ, with that of each run; a run that lacks one has a dash."""
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name, NOTHING) for each in settings] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns what differs between two mappings of texts, by name: the text before and the one now."""
    found = differences([before, now])
    return {name: (values[0], values[1]) for name, values in found.items()}


def _environments(runs: Sequence[RunRecord]) -> list[Markup]:
    made: list[Markup] = []
    for run in runs:
        if not run.environments:
            continue
        if len(runs) > 1:
            made.append(element("h3", run.name))
        starts = [
            [
                str(number),
                *(record.get(name, NOTHING) for name in ("time", "step", "processes", "git.commit", "command")),
            ]
            for number, record in enumerate(run.environments, 1)
        ]
        head = ["start", "time (UTC)", "step", "processes", "commit", "command"]
        made.append(table(_newest_of(len(starts), "starts"), head, starts[-MOST_ROWS:], [2, 3]))
        rows = _environment_changes(run)[-MOST_ROWS:]
        if rows:
            made.append(table("What changed between starts", ["start", "what", "before", "from here on"], rows))
        elif len(starts) > 1:
            made.append(element("p", "Nothing changed between starts.", class_="muted"))
        newest = [[name, value] for name, value in run.environments[-1].items()]
        made.append(
            folded("All that is known of the newest start", table("environment.json", ["what", "value"], newest))
        )
    return made


def _environment_changes(run: RunRecord) -> list[list[str]]:
    rows = []
    for number, (before, now) in enumerate(zip(run.environments, run.environments[1:], strict=False), 2):
        for name, (then, here) in changes(before, now).items():
            if name not in ("time", "step", "command"):
                rows.append([str(number), name, then, here])
    return rows


# Numbers and times


def _count(value: object) -> str:
    number = number_of(value) if type(value) in (int, float) else _as_float(value)
    return f"{number:,.0f}" if math.isfinite(number) else NOTHING


def _as_float(value: object) -> float:
    return float(value) if isinstance(value, float) else math.nan  # numpy's, too


def _large(value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def _bytes(size: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def _moment(seconds: float) -> str:
    return written_time(seconds).replace("T", " ").rstrip("Z") if math.isfinite(seconds) else NOTHING
