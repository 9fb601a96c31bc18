"""run_status.json: what the newest start of a run has come to, and whether starts get anywhere.

    {"status": "preempted", "step": 1040, "reason": "SIGUSR1", "starts": 7, "starts_without_progress": 0, ...}

Rank 0 writes it at a start and at an end. What stays "running" was killed, or its machine was. So each start counts as
a crash until an end that is none takes that back. A start that runs out of its time before its first step counts, too:
one more would end alike. A start that finds as many of both as are allowed, with no checkpoint in between, is refused.
No time in the file decides anything, since clocks differ.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pretraining.errors import CheckpointError, Preempted, PretrainError
from pretraining.files import checked_values, read_json, with_checksum, write_atomic, writing_into
from pretraining.observability.events import Events
from pretraining.progress import TrainState
from pretraining.text import count_of

log = logging.getLogger(__name__)

STATUS_FILE = "run_status.json"


@dataclass(frozen=True)
class RunStatus:
    """The JSON object of the file; its defaults are those of a run that was never started.

    Attributes:
        status: running, finished, preempted or failed.
        reason: why it ended, in words; how far it got where it is finished.
        starts: how often the run was started.
        starts_without_progress: starts in a row, with this one, that crashed before they saved a new checkpoint, or
            ran out of their time before their first step.
        started_at_step: of the checkpoint that this start began with.
        updated: when this was written (ISO 8601, UTC).
    """

    status: str = ""
    step: int = 0
    reason: str = ""
    starts: int = 0
    starts_without_progress: int = 0
    started_at_step: int = 0
    updated: str = ""


class StatusKeeper:
    """Writes the status of one start, as a context around it.

    Args:
        max_starts_without_progress: as `count_start`.
        is_writer: whether this process writes; in the others nothing happens.

    Attributes:
        events: of the run, opened in its folder; start and end are among them.
    """

    def __init__(self, max_starts_without_progress: int, is_writer: bool) -> None:
        self.events = Events()
        self._path = Path(STATUS_FILE)
        self._limit = max_starts_without_progress
        self._is_writer = is_writer
        self._begun: RunStatus | None = None
        self._previous = RunStatus()
        self._state: TrainState | None = None

    def __enter__(self) -> StatusKeeper:
        return self

    def begin(self, run: Path, restored_step: int, *, goes_back: bool = False) -> None:
        """Count a start; call it again if the checkpoint is damaged and the start goes on from an older one.

        Args:
            run: the folder, which this job may write into.
            restored_step: of the checkpoint that the start goes on from.
            goes_back: whether that is an older one by request.

        Raises:
            CheckpointError: as `count_start`, or the file cannot be written.
        """
        if not self._is_writer or self._state is not None:  # a run that goes back by itself begins no new start
            return
        first, self._begun, self._path = self._begun, None, run / STATUS_FILE
        if first is None:
            self._previous = read_status(self._path) or RunStatus()
        with writing_into(run):
            try:
                begun = count_start(self._previous, restored_step, self._limit, goes_back=goes_back)
            except CheckpointError:
                if first is not None:  # from a checkpoint that is damaged: this start was none
                    self._write(self._previous)
                raise
            self._write(begun)
        self._begun = begun
        if first is None:
            self._add_start(run, begun)

    def _add_start(self, run: Path, begun: RunStatus) -> None:
        self.events.open(run)
        details: dict[str, object] = {"number": begun.starts}
        if self._previous.starts:
            status = self._previous.status
            details["previous_status"] = "killed" if status == "running" else status  # it, or its machine
            details["previous_reason"] = self._previous.reason
        self.events.add("restart" if self._previous.starts else "start", begun.step, **details)

    def training(self, state: TrainState) -> None:
        """Count any error from now on as a crash; `state` tells how far the run is."""
        self._state = state

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        found = read_status(self._path) if self._begun is not None else None
        if self._begun is None or (found is not None and found.starts != self._begun.starts):
            return  # nothing has begun; or a later start has taken the folder over, and speaks for it
        status, reason = self._outcome(error)
        step = self._begun.step if self._state is None else self._state.step
        crashes = self._begun.starts_without_progress - (not self._is_without_progress(error, step))
        ended = replace(self._begun, status=status, step=step, reason=reason, starts_without_progress=crashes)
        try:
            self._write(ended)
        except OSError as problem:  # whatever ended the run matters more
            log.warning("%s cannot be written: %s", self._path, problem)
        self.events.add("end", step, status=status, reason=reason)
        self.events.close()

    def _is_without_progress(self, error: BaseException | None, step: int) -> bool:
        """Return whether the start has crashed, or its time was over before its first step; a later end saves."""
        if isinstance(error, Preempted):
            return error.is_out_of_time and self._begun is not None and step <= self._begun.step
        # A wrong flag is said at once and by all ranks; whoever mends it at the sixth start shall not be refused.
        is_mistake = isinstance(error, PretrainError) and error.is_everywhere and self._state is None
        return not (error is None or is_mistake or isinstance(error, KeyboardInterrupt))

    def _outcome(self, error: BaseException | None) -> tuple[str, str]:
        """Return the status of a run that ends, and why it ends."""
        if error is None:
            assert self._state is not None, "a run that ends well has trained, or has found nothing left to train"
            early = f": stopped early, {self._state.early_end}" if self._state.early_end else ""
            return "finished", f"{self._state.step} of {self._state.total_steps} steps are done{early}"
        if isinstance(error, Preempted):
            return "preempted", error.reason
        if isinstance(error, PretrainError):
            return "failed", str(error)
        return "failed", f"{type(error).__name__}: {error}".removesuffix(": ")

    def _write(self, status: RunStatus) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        document = with_checksum(asdict(replace(status, updated=now)))
        write_atomic(self._path, json.dumps(document, indent=1) + "\n")


def count_start(previous: RunStatus, restored_step: int, limit: int, *, goes_back: bool = False) -> RunStatus:
    """Return the status of a start after another one.

    Args:
        restored_step: of the checkpoint that it goes on from.
        limit: how many starts in a row may get nowhere; 0 = any number.
        goes_back: whether that checkpoint is an older one by request: what the run crashed on before counts no more.

    Raises:
        CheckpointError: too many starts in a row got nowhere.
    """
    # Going back counts anew, but not again where the start before went back to the same step.
    before = previous.started_at_step
    gets_nowhere = restored_step == before or (restored_step < before and not goes_back)
    crashes = previous.starts_without_progress if gets_nowhere else 0
    if 0 < limit <= crashes:
        last = "it was killed" if previous.status == "running" else previous.reason
        remedy = "Mend the cause (--skip_samples leaves out what cannot be trained on)"
        if previous.status == "preempted":
            remedy = "Raise --time_limit, or the time of the job (sbatch --time)"
        raise CheckpointError(
            f"this run is in a crash loop: its last {count_of(crashes, 'start')} went on from step {before} and ended "
            f"before a new checkpoint. The last time: {last}\n{remedy}, then repeat the command with "
            "--max_starts_without_progress=0"
        )
    return RunStatus("running", restored_step, "", previous.starts + 1, crashes + 1, restored_step)


def read_status(path: Path) -> RunStatus | None:
    """Return the status in a file; None where there is none, or a line says that it is damaged.

    Counting must not keep a run from starting.
    """
    try:
        values = checked_values(read_json(path))
        return RunStatus(**{name: type(default)(values[name]) for name, default in asdict(RunStatus()).items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%r): starts are counted from here on", path, error)
        return None
