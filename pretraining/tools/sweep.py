"""A grid of runs, one after the other, and a table and a picture of what came of them.

    pretrain sweep --recipe=demo --learning_rate=1e-4,3e-4 --optimizer=adamw,muon --sweep_path=runs/lr
        runs/lr/learning_rate=1e-4,optimizer=adamw/     a run as any other; output.log has what it printed
        runs/lr/…/outcome.json                          how it ended: a combination that has one is not started again
        runs/lr/sweep.csv, sweep.png                    a row and a curve a combination, made anew after each run

Several values of a setting are a comma list; of a setting that is a list itself, or free text, they stand between
semicolons. Runs are processes of their own: one that diverges or crashes is a row, and the next one begins. A sweep
that is killed takes its run with it, and the same command goes on with that run.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from pretraining.config.assignments import RECIPE_NAMES, Assignment, Reader
from pretraining.config.command_line import name_first_words, parse_config, read_arguments
from pretraining.config.commands import SweepConfig, SweepSettings
from pretraining.config.fields import settings_of
from pretraining.errors import ConfigError, Interrupted, PathError, Preempted
from pretraining.files import path_error, read_json, write_atomic
from pretraining.launch.signals import PREEMPTION_SIGNALS, end_with_parent
from pretraining.launch.terminal import outlive_readers
from pretraining.observability.display import format_seconds
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.text import count_of
from pretraining.tools.report.reports import Lines, number_of, read_reports
from pretraining.tools.translate.hook import translate_when_needed

log = logging.getLogger(__name__)

ARGUMENTS_FILE, OUTCOME_FILE, OUTPUT_FILE, STATUS_FILE = (
    "arguments.json",
    "outcome.json",
    "output.log",
    "run_status.json",
)
KILLED = "killed"
"""By a signal, or for want of memory: such a run goes on when the sweep is started again."""
LONGEST_NAME = 120
SEED = "seed"

SLURM_SCRIPT = """\
#!/usr/bin/env bash
# A job a combination. Add what your cluster needs, then: sbatch sweep.slurm
#SBATCH --job-name=sweep
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=sweep-%A-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

{command} --only="$SLURM_ARRAY_TASK_ID" &
child=$!
trap 'kill -USR1 $child' USR1
trap 'kill -TERM $child' TERM
status=0
wait $child || status=$?
while kill -0 $child 2>/dev/null; do
    status=0
    wait $child || status=$?
done
# 75: saved ahead of the end of the job's time.
[[ $status != 75 ]] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""


@dataclass(frozen=True)
class Combination:
    """One run of a sweep.

    Attributes:
        number: from 0, the last setting that varies fastest.
        values: of the settings that vary, as text.
        arguments: of `pretrain train`, without the run's folder.
    """

    number: int
    values: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the run's folder is called."""
        told = ",".join(f"{name}={value}" for name, value in self.values.items())
        safe = "".join(letter if letter.isalnum() or letter in "=,.+-_" else "-" for letter in told)
        if safe != told or len(safe) > LONGEST_NAME:
            safe = f"{safe[:LONGEST_NAME]}-{sha256(told.encode()).hexdigest()[:8]}"
        return safe


def sweep(overrides: Sequence[str], flags: Mapping[str, str]) -> None:
    """Trains every combination that has not ended yet, and writes table and picture.

    Raises:
        ConfigError: the command line is no sweep; a combination's own mistakes name the combination.
        Preempted: a signal came; the run under way is saved.
        PathError: the sweep's folder cannot be written.
    """
    settings, combinations = read_sweep(overrides, flags)
    if settings.print_slurm:
        words = [*overrides, *(f"--{name}={value}" for name, value in flags.items())]
        words = [word for word in words if _name_in(word) != "print_slurm"]
        print(
            SLURM_SCRIPT.format(last=len(combinations) - 1, command=shlex.join(["pretrain", "sweep", *words])), end=""
        )
        return
    folder = Path(settings.sweep_path)
    _check_arguments(combinations, folder)
    chosen = combinations if settings.only is None else [combinations[settings.only]]
    if not settings.collect:
        outlive_readers()
    for combination in [] if settings.collect else chosen:
        run = folder / combination.name
        if _outcome(run) in (None, KILLED) or (settings.retry_failed and _outcome(run) == "failed"):
            log.info("%d of %d  %s", combination.number + 1, len(combinations), combination.name)
            _train(combination, run, settings.processes)
            rows = [row_of(each, folder) for each in combinations]
            row = rows[combination.number]
            log.info("        %s, %s", row["status"], row["reason"] or _in_words(row))
            if settings.only is None:
                write_table(folder, rows)
    if settings.only is not None and not settings.collect:
        return  # other jobs may be at it: `--collect` sums up
    rows = [row_of(each, folder) for each in combinations]
    write_table(folder, rows)
    for line in summary(rows):
        log.info(line)
    draw(rows, folder)
    killed = sum(row["status"] == KILLED for row in rows)
    if killed:
        log.info("%d stopped from outside: the same command goes on with them", killed)


def _check_arguments(combinations: Sequence[Combination], folder: Path) -> None:
    """Raises a ConfigError where a folder has a run of other settings than the combination's."""
    for combination in combinations:
        run = folder / combination.name
        before = _read_json(run / ARGUMENTS_FILE).get("arguments")
        differ = sorted(set(map(str, before)) ^ set(combination.arguments)) if isinstance(before, list) else []
        if differ:
            raise ConfigError(
                f"{run} is a run of other settings ({', '.join(differ)}): give another --sweep_path, or remove it"
            )


def _name_in(word: str) -> str:
    return word.lstrip("-").partition("=")[0].rpartition(".")[2].replace("-", "_")


def read_sweep(overrides: Sequence[str], flags: Mapping[str, str]) -> tuple[SweepSettings, list[Combination]]:
    """Reads a command line into a grid, and checks the settings of each combination.

    Raises:
        ConfigError: with all problems.
    """
    assignments, problems = read_arguments(*name_first_words(SweepConfig, overrides, flags))
    fixed, varied = [], dict[str, list[str]]()
    for given in assignments:
        name, values = _values_of(given)
        if len(values) > 1:
            if name in varied:
                problems.append(f"two grids for {name}, {','.join(varied[name])} and {given.where}: keep one")
            varied[name] = values
            if len(set(values)) < len(values):
                problems.append(f"{given.where}: a value comes twice")
        else:
            fixed.append(given)
    names = {given.section_and_name[1] for given in assignments}
    if "ckpt_save_path" in names:
        problems.append("--ckpt_save_path is set by the sweep, a folder a run under --sweep_path: leave it out")
    if "run_steps" in names:
        problems.append("--run_steps ends runs before they are done, and a sweep compares their ends: leave it out")
    if "dry_run" in names:
        problems.append("--dry_run trains nothing, and a sweep compares what was trained: leave it out")
    if not varied and not problems:
        problems.append(
            "nothing varies: give one setting several values, as in --learning_rate=1e-4,3e-4; those of a list or a "
            "text stand between semicolons, as in '--model_variant=125m;350m'"
        )
    if problems:
        raise ConfigError(problems)
    own = {setting.name for setting in settings_of(SweepConfig).values() if setting.section == "sweep"}
    arguments = [f"{given.name}={given.raw}" for given in fixed]
    trains = [text for text, given in zip(arguments, fixed, strict=True) if given.section_and_name[1] not in own]
    combinations: list[Combination] = []
    for number, each in enumerate(itertools.product(*varied.values())):
        chosen = dict(zip(varied, each, strict=True))
        told = [f"{name}={value}" for name, value in chosen.items()]
        try:
            words = [*arguments, *told, "ckpt_save_path=run"]
            settings = parse_config(SweepConfig, words, translate=translate_when_needed).sweep
        except ConfigError as error:
            problems += [f"{','.join(told)}: {problem}" for problem in error.problems]
        combinations.append(Combination(number, chosen, (*trains, *told)))
    if problems:
        raise ConfigError(problems)
    if settings.print_slurm and (settings.collect or settings.only is not None):
        raise ConfigError(
            "--print_slurm=true prints a script that trains every combination: leave --only and --collect out"
        )
    if settings.only is not None and settings.only >= len(combinations):
        raise ConfigError(f"--only={settings.only}: the combinations are numbered 0 to {len(combinations) - 1}")
    return settings, combinations


def _values_of(given: Assignment) -> tuple[str, list[str]]:
    """The setting that an assignment is for, under its own name, and the values that it gives it."""
    settings, name = settings_of(SweepConfig), given.section_and_name[1]
    alias = Reader(SweepConfig).aliases.get(name)
    setting = settings.get(alias.target if alias is not None else name)
    raw = given.raw if isinstance(given.raw, str) else ",".join(given.raw or [])
    if setting is None or setting.section == "sweep" or given.name in RECIPE_NAMES:
        return name, [raw]
    is_text = setting.base is str and not setting.choices and not setting.pluggable
    values = [value.strip() for value in raw.split(";" if setting.many or is_text else ",")]
    return name, [value for value in values if value]


# One run


def _train(combination: Combination, run: Path, processes: int) -> None:
    """Trains a combination in processes of its own, and notes how it ended unless it is to be started again.

    Raises:
        Preempted: a signal came, and was handed on.
        PathError: the run's folder cannot be written.
    """
    command = [sys.executable, "-m", "pretraining", "train", *combination.arguments, f"ckpt_save_path={run}"]
    if processes > 1:
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--no-python")
        command = [sys.executable, "-m", *torchrun, *command]
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_atomic(run / ARGUMENTS_FILE, json.dumps({"arguments": combination.arguments}, indent=1) + "\n")
        output = (run / OUTPUT_FILE).open("ab")
    except OSError as error:
        raise path_error(error, run) from None
    with output, _handing_signals_on() as (received, children):
        begun, printed = time.monotonic(), output.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent
        )
        children.append(child)
        for number in received:  # one that came while it was started
            child.send_signal(number)
        code = child.wait()
    if received:
        ending = Interrupted if received[0] == signal.SIGINT else Preempted
        raise ending(
            f"{combination.name} was told to end ({signal.Signals(received[0]).name}): the same command goes on with it"
        )
    status = _status_of(code, run)
    outcome = {
        "status": status,
        "reason": "" if status == "finished" else _last_error(run / OUTPUT_FILE, printed, code),
        "seconds": round(time.monotonic() - begun, 1),
    }
    try:
        write_atomic(run / OUTCOME_FILE, json.dumps(outcome, indent=1) + "\n")
    except OSError as error:
        raise path_error(error, run / OUTCOME_FILE) from None


def _status_of(code: int, run: Path) -> str:
    """What an exit code means: finished, failed by itself, or stopped from outside, as torchrun does not tell."""
    if code == 0:
        return "finished"
    return "failed" if code == 1 and _read_json(run / STATUS_FILE).get("status") in (None, "failed") else KILLED


@contextmanager
def _handing_signals_on() -> Iterator[tuple[list[int], list[subprocess.Popen[bytes]]]]:
    """For the time of a `with` block, signals that ask for an early end go to processes.

    Yields the signals that came, and a list of the processes, to be filled.
    """
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (*PREEMPTION_SIGNALS, signal.SIGINT)}
    try:
        yield received, children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(run: Path) -> str | None:
    """How a run ended; None: it has not."""
    return _read_json(run / OUTCOME_FILE).get("status")


def _read_json(path: Path) -> dict[str, Any]:
    """What a file of a run says; nothing where it is not there or cannot be read."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _last_error(output: Path, begin: int, code: int) -> str:
    """What a run said as it ended, from a place of its output on: its last error, or its last line."""
    lines = output.read_bytes()[begin:].decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    if errors:
        return errors[-1].removeprefix("error:").strip()
    return f"signal {-code}" if code < 0 else lines[-1].strip() if lines else f"exit code {code}"


# What came of them


def row_of(combination: Combination, folder: Path) -> dict[str, Any]:
    """A combination's row of the table; None for what is not known of it."""
    run = folder / combination.name
    reports = _reports(run, Lines())
    outcome = _read_json(run / OUTCOME_FILE)

    def newest(name: str) -> Any:
        return _number(next((report[name] for report in reversed(reports) if name in report), None))

    return {
        "number": combination.number,
        **combination.values,
        "status": outcome.get("status", "under way" if reports else "not begun"),
        "step": newest("step"),
        "tokens_seen": newest("tokens_seen"),
        "loss": newest("loss"),
        "evaluation_loss": newest("evaluation_loss"),
        "tokens_per_second_per_gpu": newest("tokens_per_second_per_gpu_overall"),
        "seconds": _number(outcome.get("seconds")),
        "reason": outcome.get("reason", ""),
        "run": str(run),
    }


def _reports(run: Path, lines: Lines) -> list[dict[str, Any]]:
    """The reports of a run; none where there is no such file yet."""
    try:
        return list(read_reports(run / LOGS / METRICS_FILE, lines))
    except OSError:
        return []


def _number(value: Any) -> Any:
    """A finite number as it is; None for all else, so that no loss that is none is the lowest."""
    return value if math.isfinite(number_of(value)) else None


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes sweep.csv; a PathError where that fails."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "sweep.csv", text.getvalue())
    except OSError as error:
        raise path_error(error, folder) from None


def judged_by(rows: Sequence[Mapping[str, Any]]) -> str:
    """What runs are judged by: the newest held-out loss, or the newest training loss where a finished one has none."""
    ended = [row for row in rows if row["status"] == "finished"]
    return "evaluation_loss" if ended and all(row["evaluation_loss"] is not None for row in ended) else "loss"


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The combinations by their loss, the lowest first, a line each; over several seeds mean and range."""
    varied = varied_settings(rows)
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(f"{name}={row[name]}" for name in varied if name != SEED), []).append(row)
    judged = []
    kind = judged_by(rows)
    for names, members in groups.items():
        losses = [loss for row in members if row["status"] == "finished" and (loss := row[kind]) is not None]
        text = "  ".join(names)
        failed = [row for row in members if row["status"] != "finished" or row[kind] is None]
        if losses:
            spread = f" ({min(losses):.4f} to {max(losses):.4f}, {len(losses)} seeds)" if len(members) > 1 else ""
            judged.append((statistics.fmean(losses), f"{statistics.fmean(losses):.4f}{spread}  {text}"))
        for row in failed:
            status = "no finite loss" if row["status"] == "finished" else row["status"]
            judged.append((float("inf"), f"{status}  {text}  {row['reason']}"))
    yield f"{'held-out' if kind == 'evaluation_loss' else 'training'} loss at the end:"
    yield from (f"  {line}" for _, line in sorted(judged))


def varied_settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that vary, from the columns of the table."""
    columns = list(rows[0])
    return columns[1 : columns.index("status")]


def _in_words(row: Mapping[str, Any]) -> str:
    loss = row[judged_by([row])]
    took = "" if row["seconds"] is None else f" in {format_seconds(row['seconds'])}"
    return "no report" if loss is None else f"loss {loss:.4f} after {row['tokens_seen'] or 0:,} tokens{took}"


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draws sweep.png; a line says so where matplotlib is missing or nothing has been reported."""
    curves = {}
    name = judged_by(rows)
    for row in rows:
        lines = Lines()
        reports = _reports(Path(row["run"]), lines)
        if lines.damaged:
            log.warning(
                "%s: %s left out", Path(row["run"]) / LOGS / METRICS_FILE, count_of(lines.damaged, "damaged line")
            )
        pairs = [(_number(each.get("tokens_seen")), _number(each.get(name))) for each in reports]
        points = [(tokens, loss) for tokens, loss in pairs if None not in (tokens, loss)]
        if points:
            curves[", ".join(f"{setting}={row[setting]}" for setting in varied_settings(rows))] = points
    if not curves:
        return
    from pretraining.tools.pictures import draw_sweep

    try:
        unfinished = folder / ".sweep.tmp.png"
        draw_sweep(curves, rows, varied_settings(rows), name, unfinished)
        unfinished.replace(folder / "sweep.png")
        log.info("table and picture: %s, %s", folder / "sweep.csv", folder / "sweep.png")
    except ImportError:
        log.info("table: %s; for a picture pip install 'pretraining[report]'", folder / "sweep.csv")
    except OSError as error:
        raise PathError(f"{folder / 'sweep.png'} cannot be written: {os.strerror(error.errno or 0)}") from None
