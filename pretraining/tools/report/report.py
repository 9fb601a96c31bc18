"""A page about a run, or about several beside each other: `pretrain report`.

    runs' folders --read_runs--> RunRecord each --render--> report.html
                                                --draw_losses--> a picture, where one is asked for

Folders are only read; a run that is under way may be looked at.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pretraining.config.commands import PageConfig
from pretraining.errors import ConfigError
from pretraining.files import check_replaceable, is_folder, output_errors, write_atomic
from pretraining.tools.pictures import check_picture, draw_losses, picture_errors
from pretraining.tools.report.page import render
from pretraining.tools.report.run_record import RunRecord, read_runs

log = logging.getLogger(__name__)

PAGE = "report.html"


def report(config: PageConfig) -> None:
    """Writes the page, and the picture.

    Raises:
        ConfigError: a folder is no run, an ending is wrong, or a package is missing.
        DataError: a file cannot be written.
    """
    if not config.run_path:
        raise ConfigError("--run_path is empty: name a run's folder")
    picture = None if config.picture is None else Path(config.picture)
    if picture is not None:
        check_picture(picture)
    plotly = _plotly()
    runs = read_runs(config.run_path)
    path = Path(config.output_path) if config.output_path else _default_path(runs)
    if is_folder(path):
        raise ConfigError(f"--output_path={path} is a folder: name a file, such as {path / PAGE}")
    if path.suffix != ".html":
        raise ConfigError(f"--output_path={path} must end in .html")
    content = render(runs, plotly).encode("utf-8", "replace")
    with output_errors(path):
        check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    for run in runs:
        for note in run.notes:
            log.info("%s: %s", run.name, note)
    log.info("page: %s (%.1f MB); open it in a browser", path, len(content) / 1e6)
    if picture is not None:
        _draw(runs, picture)


def _default_path(runs: list[RunRecord]) -> Path:
    return runs[0].path / PAGE if len(runs) == 1 else Path(PAGE)


def _plotly() -> str:
    """The plotting library's script; a ConfigError where it is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("pretrain report needs plotly: pip install 'pretraining[report]'") from None
    return str(get_plotlyjs())


def _draw(runs: list[RunRecord], path: Path) -> None:
    losses = {
        run.name: {
            name: (list(run.tokens_at(reports.position("step")[curve.rows].tolist())), curve.values.tolist())
            for name, curves, reports in (
                ("loss", run.training_curves, run.training),
                ("evaluation_loss", run.evaluation_curves, run.evaluations),
            )
            if (curve := curves.get(name)) is not None
        }
        for run in runs
    }
    with picture_errors(path):
        check_replaceable(path)
        draw_losses(losses, path)
    log.info("picture: %s", path)
