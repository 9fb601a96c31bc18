"""Status of a run in run_status.json: how its newest start ended, and how many starts in a row made no progress.

    {"status": "preempted", "step": 1040, "reason": "SIGUSR1", "starts": 7, "starts_without_progress": 0, ...}

Rank 0 writes the file when a start begins and ends. A killed run or machine leaves "running" behind, so each start
counts as a crash until it ends in another way. A start that runs out of time before its first step counts, too: the
next start would do the same. After too many such starts in a row, without a new checkpoint, the next start is refused.
A start that is refused for a mistake leaves the state of a run that had ended, and is an event.
No decision uses the time in the file, since clocks differ. The file also holds the run's id, made at its first start,
and the number of its last branch.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pretraining.checkpoint.run_folder import CHECKPOINTS, STATUS_FILE, run_id_of
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.run_recipe import last_start
from pretraining.errors import CheckpointError, Preempted, PretrainError
from pretraining.files import checked_values, read_json, with_checksum, write_atomic, writing_into
from pretraining.observability.events import Events
from pretraining.progress import TrainState
from pretraining.text import count_of

log = logging.getLogger(__name__)

_ENDED = ("finished", "preempted", "failed")


@dataclass(frozen=True)
class RunStatus:
    """JSON object of the file; the defaults describe a run that was never started.

    Attributes:
        status: running, finished, preempted or failed.
        step: step of the last save; while a start runs, of its start point.
        reason: why the run ended, or how far it got if it finished.
        starts_without_progress: starts in a row, this one included, that crashed before a new checkpoint or ran out of
            time before their first step.
        started_at_step: step of the start point.
        updated: time of writing (ISO 8601, UTC).
        run_id: id of the run, 16 hexadecimal digits.
        branch: number of the last branch that a start began here.
    """

    status: str = ""
    step: int = 0
    reason: str = ""
    starts: int = 0
    starts_without_progress: int = 0
    started_at_step: int = 0
    updated: str = ""
    run_id: str = ""
    branch: int = 0


class RunStatusWriter:
    """Writer of the status of one start, as a context around the start.

    Args:
        max_starts_without_progress: limit of `count_start`.
        is_writer: whether this process writes; the other processes do nothing.

    Attributes:
        events: event log of the run, including its starts and ends.
        run_id: id of the run; empty before `begin`, and in processes that do not write.
    """

    def __init__(self, max_starts_without_progress: int, is_writer: bool) -> None:
        self.events = Events()
        self.run_id = ""
        self._path = Path(STATUS_FILE)
        self._limit = max_starts_without_progress
        self._is_writer = is_writer
        self._started: RunStatus | None = None
        self._previous = RunStatus()
        self._state: TrainState | None = None
        self._saved_step: Callable[[], int] = lambda: 0

    def __enter__(self) -> RunStatusWriter:
        return self

    def begin(self, run: Path, start: CheckpointRef | None) -> None:
        """Count a start; call it again if the checkpoint is damaged and the start uses an older one.

        Args:
            run: the run's folder, whose lease this job holds.
            start: start point; None = initial weights.

        Raises:
            CheckpointError: as in `count_start`, or the file cannot be written.
        """
        if not self._is_writer or self._state is not None:  # a rollback within this start is no new start
            return
        first, self._started, self._path = self._started, None, run / STATUS_FILE
        if first is None:
            self._previous = read_status(self._path) or RunStatus()
            known = start.manifest.run_id if start is not None and start.is_own else ""
            self.run_id = known or self._previous.run_id or secrets.token_hex(8)
        with writing_into(run):
            (run / CHECKPOINTS).mkdir(exist_ok=True)
            try:
                started = count_start(self._previous, start, self._limit)
            except CheckpointError:
                if first is not None:  # a start from a damaged checkpoint does not count
                    self._write(self._previous)
                raise
            started = replace(started, run_id=self.run_id, branch=self._previous.branch)
            self._write(started)
        self._started = started
        if first is None:
            self._add_start(run, started)

    def _add_start(self, run: Path, started: RunStatus) -> None:
        self.events.open(run)
        details: dict[str, object] = {"number": started.starts}
        if self._previous.starts:
            status = self._previous.status
            details["previous_status"] = "killed" if status == "running" else status
            details["previous_reason"] = self._previous.reason
        self.events.add("restart" if self._previous.starts else "start", started.step, **details)

    @property
    def branch(self) -> int:
        """Number of the last branch that a start began in the run's folder."""
        return (self._started or self._previous).branch

    def record_branch(self, number: int) -> None:
        """Record the number of the branch that this start begins; in the process that writes."""
        if self._started is not None:
            self._started = replace(self._started, branch=number)
            with writing_into(self._path):
                self._write(self._started)

    def mark_training(self, state: TrainState, saved_step: Callable[[], int]) -> None:
        """Count any error from now on as a crash; `saved_step` returns the step of the last save."""
        self._state, self._saved_step = state, saved_step

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        found = read_status(self._path) if self._started is not None else None
        if self._started is None or (found is not None and found.starts != self._started.starts):
            return  # no start was counted, or a later start owns the folder and the file
        step = self._started.step if self._state is None else self._state.step
        status, reason, is_crash = self._outcome(error, is_at_start=step <= self._started.step)
        ended = replace(
            self._started,
            status=status,
            step=self._started.step if self._state is None else self._saved_step(),
            reason=reason,
            starts_without_progress=self._started.starts_without_progress - (not is_crash),
        )
        if status == "refused":
            known = self._previous if self._previous.status in _ENDED else replace(ended, status="failed")
            ended = replace(known, starts=ended.starts, run_id=ended.run_id, branch=ended.branch)
        try:
            self._write(ended)
        except OSError as problem:  # must not hide the error that ended the run
            log.warning("%s cannot be written: %s", self._path, problem)
        self.events.add("end", step, status=status, reason=reason)
        self.events.close()

    def _outcome(self, error: BaseException | None, *, is_at_start: bool) -> tuple[str, str, bool]:
        """Return status and reason, and whether the start crashed or ran out of time before its first step."""
        if error is None:
            assert self._state is not None, "a run without an error has reached the training loop"
            early = f": stopped early, {self._state.early_end}" if self._state.early_end else ""
            return "finished", f"{self._state.step} of {self._state.total_steps} steps are done{early}", False
        if isinstance(error, Preempted):
            return "preempted", error.reason, error.is_out_of_time and is_at_start
        if not isinstance(error, PretrainError):
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            return "failed", reason, not isinstance(error, KeyboardInterrupt)
        # All ranks report a wrong flag at once. It is no crash, and must not use up the allowed starts.
        is_refused = error.is_everywhere and self._state is None
        return "refused" if is_refused else "failed", str(error), not is_refused

    def _write(self, status: RunStatus) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        document = with_checksum(asdict(replace(status, updated=now)))
        write_atomic(self._path, json.dumps(document, indent=1) + "\n")


def count_start(previous: RunStatus, start: CheckpointRef | None, limit: int) -> RunStatus:
    """Return the status of a new start; a return to an older checkpoint resets the count.

    Args:
        start: start point; None = initial weights.
        limit: allowed starts in a row without progress; 0 = any number.

    Raises:
        CheckpointError: too many starts in a row made no progress.
    """
    # A rewind resets the count once, not again if the previous start went back to the same step.
    before, step = previous.started_at_step, 0 if start is None else start.step
    has_progress = step > before or (step < before and start is not None and start.is_rewind)
    crashes = 0 if has_progress else previous.starts_without_progress
    if 0 < limit <= crashes:
        last = "it was killed" if previous.status == "running" else previous.reason
        remedy = "Fix the cause (--skip_samples skips bad samples)"
        if previous.status == "preempted":
            remedy = "Raise --time_limit, or the time of the job (sbatch --time)"
        raise CheckpointError(
            f"this run is in a crash loop: its last {count_of(crashes, 'start')} began at step {before} and ended "
            f"before a new checkpoint. The last reason: {last}\n{remedy}, then repeat the command with "
            "--max_starts_without_progress=0"
        )
    return RunStatus("running", step, "", previous.starts + 1, crashes + 1, step)


def original_of(run: Path) -> Path | None:
    """Return the folder that a run's folder is a copy of; None if it is no copy, or the original was moved here.

    It is a copy if the folder of its last start is another one, and holds a run with the same id.
    """
    with suppress(OSError, PretrainError):  # nothing is there, or another user's folder
        folder = last_start(run).folder
        if folder is not None and not folder.samefile(run) and run_id_of(run) == run_id_of(folder) != "":
            return folder
    return None


def read_status(path: Path) -> RunStatus | None:
    """Return the status in a file; None if the file is missing, or damaged, which is logged and not an error."""
    try:
        values = checked_values(read_json(path))
        return RunStatus(**{name: type(default)(values[name]) for name, default in asdict(RunStatus()).items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%r): the count of starts begins at 0 again", path, error)
        return None
