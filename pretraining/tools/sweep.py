"""`pretrain sweep`: a grid of runs, trained one after the other, and a table of their losses.

    pretrain sweep --recipe=demo --learning_rate=1e-4,3e-4 --optimizer=adamw,muon --sweep_path=runs/lr
        runs/lr/learning_rate=1e-4,optimizer=adamw/     a normal run; output.log holds its output
        runs/lr/…/outcome.json                          result of a finished or failed run, which is not started again
        runs/lr/sweep.csv                               a row per combination, written after each run

Commas separate the values of a setting; semicolons do so for settings that are lists or free text. Each run is a
separate process: if it diverges or crashes, the table says so and the next run starts. Killing a sweep kills its run,
and the same command resumes that run.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from pretraining.checkpoint.run_folder import STATUS_FILE
from pretraining.config.assignments import RECIPE_NAMES, Assignment, Reader
from pretraining.config.command_line import assign
from pretraining.config.fields import settings_of
from pretraining.config.read import read
from pretraining.errors import CheckpointError, ConfigError, Interrupted, Preempted
from pretraining.files import output_errors, read_object, write_atomic
from pretraining.launch.signals import ReceivedSignals, heeded, terminate_with_parent
from pretraining.launch.terminal import ignore_output_errors, print_text
from pretraining.observability.report_file import number_of, read_lines
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.text import count_of, format_table, list_some
from pretraining.tools.command_settings import SweepConfig, SweepSettings
from pretraining.tools.translate.translate import translate

log = logging.getLogger(__name__)

ARGUMENTS_FILE, OUTCOME_FILE, OUTPUT_FILE = "arguments.json", "outcome.json", "output.log"
LONGEST_NAME, MOST_NAMED = 120, 8
POLL_SECONDS = 0.2
RESULTS = ("status", "step", "tokens_seen", "loss", "evaluation_loss", "tokens_per_second_per_gpu_overall")
NOT_IN_A_SWEEP = ("ckpt_save_path", "run_steps", "dry_run")


@dataclass(frozen=True)
class Combination:
    """One run of a sweep.

    Attributes:
        values: text of the settings that vary.
        arguments: words for `pretrain train`, without the run's folder.
    """

    values: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        text = ",".join(f"{name}={value}" for name, value in self.values.items())
        safe = re.sub(r"[^A-Za-z0-9=,.+_-]", "-", text)[:LONGEST_NAME]
        return safe if safe == text else f"{safe}-{sha256(text.encode()).hexdigest()[:8]}"


def sweep(given: Sequence[Assignment]) -> None:
    """Train every combination without an outcome, and write the table.

    Raises:
        ConfigError: no setting varies, a setting is wrong, or a folder has a run with other settings.
        Preempted: a signal arrived, and the current run was saved.
        DataError: the sweep's folder cannot be written.
        CheckpointError: at the end, if a combination has failed, now or earlier, or was not trained.
    """
    settings, combinations = read_sweep(given)
    folder = Path(settings.sweep_path)
    for combination in combinations:
        before = read_object(folder / combination.name / ARGUMENTS_FILE).get("arguments")
        if isinstance(before, list) and (differ := sorted(set(map(str, before)) ^ set(combination.arguments))):
            raise ConfigError(
                f"{folder / combination.name} is a run with other settings ({', '.join(differ)}): set another "
                "--sweep_path or delete the folder"
            )
    ignore_output_errors()
    for number, combination in enumerate(combinations):
        name = combination.name
        ended = read_object(folder / name / OUTCOME_FILE).get("status") is not None
        if settings.only in (None, number) and not ended:
            log.info("%d of %d  %s", number + 1, len(combinations), name)
            _train(combination, folder / name, settings.processes)
            if settings.only is None:  # with --only, other jobs may write it at the same time
                _write_csv(combinations, folder)
    if settings.only is None:
        _write_csv(combinations, folder)
        for line in summary([row_of(combination, folder) for combination in combinations]):
            print_text(line)
    chosen = combinations if settings.only is None else [combinations[settings.only]]
    _check_outcomes([combination.name for combination in chosen], folder)


def _check_outcomes(names: Sequence[str], folder: Path) -> None:
    """Raise a CheckpointError unless all of these combinations have finished."""
    status_of = {name: read_object(folder / name / OUTCOME_FILE).get("status") for name in names}
    failed = [name for name, status in status_of.items() if status == "failed"]
    missing = [name for name, status in status_of.items() if status not in ("finished", "failed")]
    problems = []
    if failed:
        listed = list_some(failed, MOST_NAMED)
        remedy = "To train one again, remove its folder, and repeat the command"
        problems.append(f"{len(failed)} of {count_of(len(names), 'combination')} failed: {listed}. {remedy}")
    if missing:
        listed = list_some(missing, MOST_NAMED)
        problems.append(
            f"{count_of(len(missing), 'combination')} not trained, perhaps since another process does it: repeat the "
            f"command later. {listed}"
        )
    if problems:
        raise CheckpointError("; ".join(problems))


def read_sweep(given: Sequence[Assignment]) -> tuple[SweepSettings, list[Combination]]:
    """Return the combinations of a command line; raise a ConfigError with all problems of their settings."""
    strays = Reader(SweepConfig)
    strays.read([assignment for assignment in given if not assignment.name])
    problems, fixed, varied = strays.problems, list[Assignment](), dict[str, list[str]]()
    for assignment in [assignment for assignment in given if assignment.name]:
        name, values = _values_of(assignment)
        if len(values) == 1:
            fixed.append(assignment)
        elif len(set(values)) < len(values):
            problems.append(f"{assignment.where}: {name} has a value twice: remove one")
        else:
            varied[name] = values
        if name in NOT_IN_A_SWEEP:
            problems.append(f"--{name}: remove it; a sweep trains each run to its end, in its own folder")
    if not varied and not problems:
        problems.append("no setting has several values: write --learning_rate=1e-4,3e-4, or 'a;b' for lists and text")
    of_sweep = [name for name, setting in settings_of(SweepConfig).items() if setting.section == "sweep"]
    of_runs = [assignment for assignment in fixed if assignment.section_and_name[1] not in of_sweep]
    trained = [f"{assignment.name}={assignment.raw}" for assignment in of_runs]
    combinations: list[Combination] = []
    settings = SweepSettings()
    for texts in itertools.product(*varied.values()) if not problems else ():
        chosen = dict(zip(varied, texts, strict=True))
        varying = [f"{name}={value}" for name, value in chosen.items()]
        combinations.append(Combination(chosen, (*trained, *varying)))
        try:
            words = [*fixed, *assign({**chosen, "ckpt_save_path": "run"})]
            settings = read(SweepConfig, translate(SweepConfig, words)).config.sweep
        except ConfigError as error:
            problems += [f"{','.join(varying)}: {problem}" for problem in error.problems]
    if not problems and settings.only is not None and settings.only >= len(combinations):
        problems.append(f"--only={settings.only} is no combination: the numbers are 0 to {len(combinations) - 1}")
    if problems:
        raise ConfigError(problems)
    return settings, combinations


def _values_of(given: Assignment) -> tuple[str, list[str]]:
    """Return the canonical name and the values of an assignment."""
    settings, name = settings_of(SweepConfig), given.section_and_name[1]
    alias = Reader(SweepConfig).aliases.get(name)
    setting = settings.get(alias.target if alias is not None else name)
    raw = given.raw if isinstance(given.raw, str) else ",".join(given.raw or [])
    if setting is None or setting.section == "sweep" or given.name in RECIPE_NAMES:
        return name, [raw]
    is_text = setting.base is str and not setting.choices and not setting.pluggable
    values = [value.strip() for value in raw.split(";" if setting.many or is_text else ",")]
    return name, [value for value in values if value] or [raw]


def _train(combination: Combination, run: Path, processes: int) -> None:
    """Train a combination in a separate process, and write its outcome unless it was killed.

    Raises:
        Preempted: a signal arrived and was forwarded.
        DataError: the run's folder cannot be written.
    """
    command = [sys.executable, "-m", "pretraining", "train", *combination.arguments, f"ckpt_save_path={run}"]
    if processes > 1:
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--no-python")
        command = [sys.executable, "-m", *torchrun, *command]
    with output_errors(run, "--sweep_path", "--sweep_path"):
        run.mkdir(parents=True, exist_ok=True)
        write_atomic(run / ARGUMENTS_FILE, json.dumps({"arguments": combination.arguments}, indent=1) + "\n")
        with (run / OUTPUT_FILE).open("ab") as output, ReceivedSignals().listening(heeded()) as received:
            begun, printed = time.monotonic(), output.seek(0, os.SEEK_END)
            with received.recording_interrupts():
                code = _run(command, output, received)
        if received.first is not None:
            error = Interrupted if received.first == signal.SIGINT else Preempted
            raise error(f"{combination.name} was stopped by {received.first.name}: the same command resumes it")
        status = _status_of(code, run)
        reason = _last_error((run / OUTPUT_FILE).read_bytes()[printed:]) if status != "finished" else ""
        if status == "killed":
            log.warning("%s was killed (exit code %d): repeat the command. %s", combination.name, code, reason)
            return
        outcome = {"status": status, "seconds": round(time.monotonic() - begun, 1), "reason": reason}
        write_atomic(run / OUTCOME_FILE, json.dumps(outcome, indent=1) + "\n")


def _run(command: Sequence[str], output: IO[bytes], received: ReceivedSignals) -> int:
    """Run a command and return its exit code; forward the first signal, so that the command saves and stops."""
    child = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=terminate_with_parent
    )
    is_sent = False
    try:
        while child.poll() is None:
            if received.first is not None and not is_sent:
                child.send_signal(received.first)
                is_sent = True
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:  # a second Ctrl-C stops the run at once
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
    return child.returncode


def _status_of(code: int, run: Path) -> str:
    """Return "finished", "failed" or "killed"; torchrun's exit code does not tell the last two apart."""
    if code == 0:
        return "finished"
    return "failed" if code == 1 and read_object(run / STATUS_FILE).get("status") != "running" else "killed"


def _last_error(output: bytes) -> str:
    """Return the last error that a run printed, or its last line."""
    lines = output.decode(errors="replace").split("\n")
    errors = [line for line in lines if line.startswith("error:")] or [line for line in lines if line.strip()]
    return errors[-1].removeprefix("error:").strip() if errors else ""


def row_of(combination: Combination, folder: Path) -> dict[str, Any]:
    """Return a combination's row of the table, with None for unknown values."""
    run = folder / combination.name
    newest: dict[str, Any] = {}
    notes: list[str] = []
    try:
        for report in read_lines(run / LOGS / METRICS_FILE, notes):
            newest |= report
    except OSError:  # nothing is reported yet
        pass
    for note in notes:
        log.warning("%s", note)
    outcome = read_object(run / OUTCOME_FILE)
    newest["status"] = outcome.get("status", "not finished")
    results = {name: newest.get(name) for name in RESULTS}
    results |= {name: None for name in RESULTS[1:] if not math.isfinite(number_of(results[name]))}
    end = {"seconds": outcome.get("seconds"), "reason": outcome.get("reason", ""), "run": str(run)}
    return {**combination.values, **results, **end}


def _write_csv(combinations: Sequence[Combination], folder: Path) -> None:
    rows = [row_of(combination, folder) for combination in combinations]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    with output_errors(folder, "--sweep_path", "--sweep_path"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "sweep.csv", text.getvalue().encode("utf-8", "surrogateescape"))


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table sorted by loss: the evaluation loss if every finished run has one, else the training loss."""
    finished = [row for row in rows if row["status"] == "finished"]
    kind = "evaluation_loss" if finished and all(row["evaluation_loss"] is not None for row in finished) else "loss"
    varied = list(rows[0])[: list(rows[0]).index("status")]
    ordered = sorted(rows, key=lambda row: (row["status"] != "finished", row[kind] is None, row[kind] or 0.0))
    table = [[*varied, kind, "status", ""]]
    for row in ordered:
        loss = "" if row[kind] is None else f"{row[kind]:.4f}"
        table.append([*(str(row[name]) for name in varied), loss, row["status"], row["reason"]])
    return format_table(table, right=[len(varied)])
