"""What a run's folder holds, as plain data. The folder may be anyone's, of any moment of a run, and damaged anywhere.

    run_status.json, lease.json   how the run stands
    logs/metrics.jsonl            curves (reports.py)
    logs/events.jsonl             what happened, and samples of text
    logs/environment.json         what each start ran on
    config.yaml                   settings, and from them FLOPs a token
    checkpoints/                  what is there to go on from; the newest one knows the mixture

A file that is missing or damaged costs what it holds, and a line in `RunRecord.notes`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pretraining.checkpoint.manifest import CHECKPOINTS, Manifest, committed_checkpoints, run_of
from pretraining.checkpoint.start_point import CONFIG_FILE, document_at
from pretraining.config.fields import settings_of
from pretraining.config.recipes import parse_recipe, settings_in
from pretraining.config.settings_files import read_text
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.config.variants import resolve_shape
from pretraining.data.resume import restored_mixture
from pretraining.errors import CheckpointError, ConfigError, PretrainError
from pretraining.estimate.flops import flops_per_token
from pretraining.files import entries_of, exists, is_folder, read_json
from pretraining.observability.events import EVENTS_FILE
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.text import count_of
from pretraining.tools.list_checkpoints import Row, rows_of
from pretraining.tools.report.curves import Curve
from pretraining.tools.report.reports import Lines, Reports, number_of, read_metrics, read_objects, seconds_of
from pretraining.train.run_status import STATUS_FILE, RunStatus, read_status

T = TypeVar("T")

LEASE_FILE = "lease.json"  # checkpoint/lease.py has both, and needs torch
LEASE_STALE_SECONDS = 60.0
ENVIRONMENT_FILE = "environment.json"  # observability/environment.py has it, and needs torch
MOST_EVENTS = 100_000
"""Of one run; later ones are counted and left out."""


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        kind: as events.jsonl calls it.
        step: NaN where it is not known.
        seconds: since 1970; NaN where they are not known.
        details: all else that the line holds.
    """

    kind: str
    step: float
    seconds: float
    details: Mapping[str, Any]


@dataclass(frozen=True)
class MixturePart:
    """What a dataset gave in a stretch of the run with one mixture.

    Attributes:
        first_step, end_step: of the stretch, the end not included.
        asked: its share by the weights.
        samples: that were trained on.
        realised: its share of these.
    """

    first_step: int
    end_step: int
    dataset: str
    asked: float
    samples: int
    realised: float


@dataclass
class RunRecord:
    """Everything that a page says of a run.

    Attributes:
        name: of the folder, as long as it takes to tell it from the others.
        state: finished, preempted, failed, running, killed or unknown.
        reason: why it ended, in words.
        began: of the first start, seconds since 1970; NaN where no time is known.
        settings: as text, by `section.name`; empty where they are not known.
        flops_per_token: of training, over whole rows; None where the settings do not say.
        environments: a record a start, flattened to text by dotted names.
        notes: what could not be read, a sentence each.
    """

    path: Path
    name: str
    status: RunStatus | None = None
    state: str = "unknown"
    training: Reports = field(default_factory=Reports)
    evaluations: Reports = field(default_factory=Reports)
    training_curves: dict[str, Curve] = field(default_factory=dict)
    evaluation_curves: dict[str, Curve] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    began: float = math.nan
    settings: dict[str, str] = field(default_factory=dict)
    flops_per_token: float | None = None
    has_document_mask: bool = False
    checkpoints: list[Row] = field(default_factory=list)
    mixture: list[MixturePart] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why the run ended; empty where it did not, or nobody knows."""
        return self.status.reason if self.status is not None and self.state not in ("running", "killed") else ""

    def latest(self) -> float:
        """Returns the time of the newest report or event, seconds since 1970; NaN where none is known."""
        times = [event.seconds for event in self.events if math.isfinite(event.seconds)]
        for reports in (self.training, self.evaluations):
            known = reports.position("time")
            known = known[np.isfinite(known)]
            times += [float(known.max())] if len(known) else []
        return max(times, default=math.nan)

    def tokens_at(self, steps: Sequence[float]) -> list[float]:
        """Returns the tokens seen at steps, between reports in proportion; NaN where no report knows."""
        at, tokens = self.training.position("step"), self.training.position("tokens_seen")
        known = np.isfinite(at) & np.isfinite(tokens)
        if not known.any():
            return [math.nan] * len(steps)
        order = np.argsort(at[known], kind="stable")
        xs, ys = np.append(0.0, at[known][order]), np.append(0.0, tokens[known][order])
        found = np.interp(np.array(steps, np.float64), xs, ys, left=math.nan, right=math.nan)
        return [float(value) for value in found]


def read_runs(paths: Sequence[str]) -> list[RunRecord]:
    """Reads the folders of runs, named so that they differ.

    Raises:
        ConfigError: some are no runs; says of each what it is.
    """
    folders = [run_of(Path(path)) for path in paths]
    problems = [problem for folder in folders if (problem := _why_no_run(folder)) is not None]
    if problems:
        raise ConfigError(problems)
    return [read_run(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]


def _why_no_run(folder: Path) -> str | None:
    """Says why a folder is no run; None where it is one, or was to become one."""
    if not exists(folder):
        return f"--run_path={folder}: there is no such folder"
    if not is_folder(folder):
        return f"--run_path={folder} is a file: give the run's folder"
    parts = (CONFIG_FILE, STATUS_FILE, CHECKPOINTS, f"{LOGS}/{METRICS_FILE}")
    if any(exists(folder / part) for part in parts):
        return None
    runs = sorted(child.name for child in entries_of(folder) if exists(child / STATUS_FILE))
    hint = f". It holds runs: give {folder / runs[0]}, or several with spaces between" if runs else ""
    return f"--run_path={folder} is no run: it has none of {', '.join(parts)}{hint}"


def short_names(folders: Sequence[Path]) -> list[str]:
    """Returns a name of each folder: its last parts, as many as tell it from the others; numbered if nothing does."""
    parts = [folder.absolute().parts for folder in folders]
    names = ["/".join(each[-1:]) or "/" for each in parts]
    for count in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            return names
        names = [
            "/".join(each[-count:]).replace("//", "/") if names.count(name) > 1 else name
            for name, each in zip(names, parts, strict=True)
        ]
    return names if len(set(names)) == len(names) else [f"{name} ({n})" for n, name in enumerate(names, 1)]


def read_run(folder: Path, name: str) -> RunRecord:
    """Reads a run's folder; nothing in it is an error, and what cannot be read is a note."""
    run = RunRecord(folder, name)
    _read_status(run)
    _read_metrics(run)
    _read_events(run)
    _read_settings(run)
    _read_environments(run)
    _read_checkpoints(run)
    times = [event.seconds for event in run.events if math.isfinite(event.seconds)]
    times += [*run.training.position("time")[:1], *run.evaluations.position("time")[:1]]
    run.began = min((float(each) for each in times if math.isfinite(each)), default=math.nan)
    return run


def _or_note(run: RunRecord, what: str, read: Callable[[], T]) -> T | None:
    """Reads a part; None and a note where that fails."""
    try:
        return read()
    except FileNotFoundError:
        run.notes.append(f"There is no {what}.")
    except (OSError, ValueError, PretrainError) as error:
        told = getattr(error, "strerror", None) or error
        run.notes.append(f"{what} cannot be read: {told}.")
    return None


def _read_status(run: RunRecord) -> None:
    path = run.path / STATUS_FILE
    run.status = _or_note(run, STATUS_FILE, lambda: read_status(path))
    if run.status is None:
        there = _or_note(run, STATUS_FILE, lambda: exists(path))
        run.notes.append(f"{STATUS_FILE} is damaged." if there else f"There is no {STATUS_FILE}.")
        return
    run.state = run.status.status or "unknown"
    if run.state == "running" and not _is_held(run.path):
        run.state = "killed"


def _is_held(folder: Path) -> bool:
    """Whether a process renews the run's lease, or did a moment ago."""
    try:
        return time.time() - (folder / LEASE_FILE).stat().st_mtime < LEASE_STALE_SECONDS
    except OSError:
        return False


def _read_metrics(run: RunRecord) -> None:
    lines = Lines()
    what = f"{LOGS}/{METRICS_FILE}"
    found = _or_note(run, what, lambda: read_metrics(run.path / what, lines))
    _note_lines(run, what, lines)
    if found is None:
        return
    run.training, run.evaluations = found
    run.training_curves, run.evaluation_curves = (reports.curves() for reports in found)
    if not len(run.training) and not len(run.evaluations):
        run.notes.append(f"{what} has no report.")
    for reports in found:
        if reports.backwards:
            run.notes.append(f"{what}: {count_of(reports.backwards, 'report')} of no later step than the one before.")
        if reports.left_out:
            run.notes.append(f"{what}: {len(reports.left_out):,} different numbers are too many, and not drawn.")


def _note_lines(run: RunRecord, what: str, lines: Lines) -> None:
    if lines.damaged:
        run.notes.append(f"{what}: {count_of(lines.damaged, 'damaged line')} left out.")
    if lines.is_cut:
        run.notes.append(f"{what}: the last line is cut, as while it is written or after a kill, and left out.")


def _read_events(run: RunRecord) -> None:
    lines, left_out = Lines(), 0
    what = f"{LOGS}/{EVENTS_FILE}"

    def read() -> None:
        nonlocal left_out
        for line in read_objects(run.path / what, lines):
            kind = line.pop("event", None)
            if not isinstance(kind, str):
                lines.damaged += 1
            elif len(run.events) == MOST_EVENTS:
                left_out += 1
            else:
                seconds = seconds_of(line.pop("time", None))
                run.events.append(Event(kind[:40], number_of(line.pop("step", None)), seconds, line))

    _or_note(run, what, read)
    _note_lines(run, what, lines)
    if left_out:
        run.notes.append(f"{what}: the first {MOST_EVENTS:,} events are shown, {left_out:,} later ones are left out.")


def _read_settings(run: RunRecord) -> None:
    def read() -> str:
        if not exists(run.path / CONFIG_FILE):
            raise FileNotFoundError
        return read_text(run.path / CONFIG_FILE, CONFIG_FILE)

    content = _or_note(run, CONFIG_FILE, read)
    if content is None:
        return
    run.settings = _or_note(run, CONFIG_FILE, lambda: _as_texts(content)) or {}
    config = _or_note(run, CONFIG_FILE, lambda: settings_in(content, CONFIG_FILE)) if run.settings else None
    if config is not None:
        run.flops_per_token = _or_note(run, CONFIG_FILE, lambda: _flops_per_token(config))
        run.has_document_mask = config.data.document_mask


def _as_texts(content: str) -> dict[str, str]:
    texts = {}
    for given in parse_recipe(content, CONFIG_FILE):
        section, name = given.section_and_name
        text = "none" if given.raw is None else given.raw if isinstance(given.raw, str) else ",".join(given.raw)
        texts[f"{section}.{name}" if section else name] = _canonical(text)
    return texts


def _canonical(text: str) -> str:
    """Writes a number with an exponent as defaults are written: YAML has 1.0e-08 where Python has 1e-08."""
    try:
        return str(float(text)) if "e" in text.lower() else text
    except ValueError:
        return text


def _flops_per_token(config: TrainConfig) -> float:
    return float(flops_per_token(resolve_shape(config.model), config.data.seq_length))


def default_settings() -> dict[str, str]:
    """Returns the defaults of training as text, by `section.name`."""
    settings = settings_of(TrainConfig).values()
    return {f"{each.section}.{each.name}": format_value(each.default) for each in settings}


def _read_environments(run: RunRecord) -> None:
    what = f"{LOGS}/{ENVIRONMENT_FILE}"
    records = _or_note(run, what, lambda: read_json(run.path / what))
    if records is None:
        return
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        run.notes.append(f"{what} is damaged: it is no list of starts.")
        return
    run.environments = [flattened(record) for record in records]


def flattened(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns what is in a JSON object as text, by dotted names; lists are one text each."""
    texts: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            texts |= flattened(value, f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _read_checkpoints(run: RunRecord) -> None:
    if not is_folder(run.path / CHECKPOINTS):
        return
    run.checkpoints = _or_note(run, CHECKPOINTS, lambda: rows_of(run.path)) or []
    for path in reversed(_or_note(run, CHECKPOINTS, lambda: committed_checkpoints(run.path)) or []):
        try:
            run.mixture = mixture_of(document_at(path))
            return
        except CheckpointError:  # the table says what is wrong with it
            continue
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            run.notes.append(f"{path.name}: the position in the data is damaged ({type(error).__name__}).")
            return


def mixture_of(manifest: Manifest) -> list[MixturePart]:
    """Returns what each dataset was to give and has given, up to a checkpoint; nothing where there is only one.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: the state of the data is damaged.
    """
    if not manifest.data:
        return []
    mixture = restored_mixture(manifest.data)
    if len(mixture.names) < 2:
        return []
    taken: dict[int, dict[str, int]] = {}
    for phase, ranges in mixture.taken(0, manifest.step):
        of_phase = taken.setdefault(phase.first_step, dict.fromkeys(phase.weights, 0))
        for name in of_phase:
            first, end = ranges[name]
            of_phase[name] += end - first
    ends = [*(phase.first_step for phase in mixture.phases[1:]), manifest.step]
    parts = []
    for phase, end in zip(mixture.phases, ends, strict=True):
        samples = taken.get(phase.first_step, {})
        total, weights = sum(samples.values()), sum(phase.weights.values())
        parts += [
            MixturePart(phase.first_step, end, name, phase.weights[name] / weights, count, count / total)
            for name, count in samples.items()
            if total
        ]
    return parts
