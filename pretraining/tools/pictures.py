"""Pictures: schedules, losses of runs and sweeps, a plan's memory and time. They need matplotlib (extra `report`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretraining.errors import ConfigError
from pretraining.files import output_errors
from pretraining.progress import parse_number

if TYPE_CHECKING:
    from pretraining.optim.schedules import LearningRate

POINTS = 500


def check_picture(path: Path) -> None:
    """Raises a ConfigError where --picture names a file of another kind than those that are drawn."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture={path} must end in .png or .svg")


@contextmanager
def picture_errors(path: Path) -> Iterator[None]:
    """Makes the folder of --picture, and turns what goes wrong with the drawing into an error for users."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except ImportError:
            raise ConfigError(f"--picture={path} needs matplotlib: pip install 'pretraining[report]'") from None


def draw_schedules(schedules: Mapping[str, LearningRate], path: Path) -> None:
    """Draws learning rates over the run, as shares of their peaks, one line each by name.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the picture cannot be written.
    """
    figure, axes = _figure(1)
    for name, schedule in schedules.items():
        total = schedule.horizon.total_steps
        steps = sorted({round(point * (total - 1) / POINTS) for point in range(POINTS + 1)})
        axes[0].plot([step / total for step in steps], [schedule.at(step, 1.0) for step in steps], label=name)
    axes[0].set_xlabel("share of the run")
    axes[0].set_ylabel("learning rate / peak")
    _finish(figure, axes, path)


def draw_losses(runs: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], path: Path) -> None:
    """Draws training losses of runs over tokens, and beside them those of evaluations, if there are any.

    Args:
        runs: by name, tokens and values of `loss` and `evaluation_loss`, as far as they are known.
        path: of the picture.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the picture cannot be written.
    """
    labels = {"loss": "training loss", "evaluation_loss": "evaluation loss"}
    kinds = [kind for kind in labels if kind == "loss" or any(kind in losses for losses in runs.values())]
    figure, axes = _figure(len(kinds))
    for place, kind in enumerate(kinds):
        for name, losses in runs.items():
            if kind in losses:
                axes[place].plot(*losses[kind], label=name, linewidth=1.0, marker="o" if place else None, markersize=3)
        axes[place].set_xlabel("tokens")
        axes[place].set_ylabel(f"{labels[kind]} (nats a token)")
    _finish(figure, axes, path)


def draw_sweep(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    rows: Sequence[Mapping[str, Any]],
    varied: Sequence[str],
    kind: str,
    path: Path,
) -> None:
    """Draws the losses of a sweep's runs over tokens, and beside it the last ones over the first number that varies.

    Args:
        curves: (tokens, loss) of each run, by its name.
        rows: of the sweep's table.
        varied: names of the settings that vary.
        kind: the column of the loss.
        path: of the picture.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the picture cannot be written.
    """
    numeric = next((name for name in varied if name != "seed" and _are_numbers(rows, name)), None)
    figure, axes = _figure(1 if numeric is None else 2)
    for name, points in curves.items():
        axes[0].plot(*zip(*points, strict=True), label=name)
    losses = [loss for points in curves.values() for _, loss in points if math.isfinite(loss)]
    firsts = [points[0][1] for points in curves.values() if math.isfinite(points[0][1])]
    if firsts and min(losses) < max(firsts):
        low, high = min(losses), max(firsts)  # what diverges does not flatten the rest
        axes[0].set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes[0].set_xlabel("tokens")
    axes[0].set_ylabel("loss")
    if numeric is not None:
        for name, points in _last_losses(rows, varied, numeric, kind).items():
            axes[1].plot(*zip(*points, strict=True), marker="o", label=name)
        values = [float(parse_number(str(row[numeric])) or 0) for row in rows]
        if min(values) > 0:
            axes[1].set_xscale("log")
        axes[1].set_xlabel(numeric)
    _finish(figure, axes, path)


def draw_plan(memory: Mapping[str, float], memory_of_gpu: float, step: Mapping[str, float], path: Path) -> None:
    """Draws the memory of a GPU by part, and the timeline of a step: what runs, and what runs behind it.

    Args:
        memory: bytes by part.
        memory_of_gpu: bytes that there are.
        step: seconds by part, those of `StepTime`.
        path: of the picture.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the picture cannot be written.
    """
    figure, axes = _figure(2)
    bottom = 0.0
    for name, size in memory.items():
        axes[0].bar("memory", size / 2**30, bottom=bottom, label=name.replace("_", " "))
        bottom += size / 2**30
    axes[0].axhline(memory_of_gpu / 2**30, color="black", linestyle="--", label="of a GPU")
    axes[0].set_ylabel("GiB a GPU")
    begin = 0.0
    for name in ("compute", "unhidden", "exposed"):
        axes[1].barh("GPU", step[name], left=begin, label=name)
        begin += step[name]
    axes[1].barh("network, hidden", step["hidden"], label="hidden")
    axes[1].set_xlabel("seconds of a step")
    # Bars fill their axes: the legends stand beside them.
    _finish(figure, axes, path, legend={"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)})


def _last_losses(
    rows: Sequence[Mapping[str, Any]], varied: Sequence[str], numeric: str, kind: str
) -> dict[str, list[tuple[float, float]]]:
    """(value, last loss, mean over seeds) of the finished runs, by the other settings that vary."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        loss = row[kind]
        if row["status"] == "finished" and loss is not None:
            others = ", ".join(f"{name}={row[name]}" for name in varied if name not in (numeric, "seed"))
            found.setdefault(others, {}).setdefault(float(parse_number(str(row[numeric])) or 0), []).append(loss)
    return {
        name: sorted((value, statistics.fmean(losses)) for value, losses in by_value.items())
        for name, by_value in found.items()
    }


def _are_numbers(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(parse_number(str(row[name])) is not None for row in rows)


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(7.0 * columns, 4.5), layout="constrained")
    return figure, [figure.add_subplot(1, columns, column + 1) for column in range(columns)]


def _finish(figure: Any, axes: Sequence[Any], path: Path, legend: Mapping[str, Any] | None = None) -> None:
    for each in axes:
        each.grid(alpha=0.3)
        if any(each.get_legend_handles_labels()[1]):
            each.legend(fontsize="small", **(legend or {}))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
