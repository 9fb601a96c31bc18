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
from pretraining.files import checked_values, read_json, with_checksum, write_atomic
from pretraining.observability.events import Events
from pretraining.progress import TrainState
from pretraining.train.preemption import is_out_of_time, reason_of

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
        max_starts_without_progress: how many crashes in a row are allowed; 0 = any number.
        is_writer: whether this process writes; in the others nothing happens.
        events: opened in the run's folder, and told of start and end; None = nobody is told.
    """

    def __init__(self, max_starts_without_progress: int, is_writer: bool, events: Events | None = None) -> None:
        self._path = Path(STATUS_FILE)
        self._limit = max_starts_without_progress
        self._is_writer = is_writer
        self._events = events
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
            goes_back: whether that is an older one by request: what the run crashed on before counts no more.

        Raises:
            CheckpointError: too many starts in a row have crashed at this step, or the file cannot be written.
        """
        if not self._is_writer or self._state is not None:  # a run that goes back by itself begins no new start
            return
        self._path = run / STATUS_FILE
        is_first_choice = self._begun is None
        if is_first_choice:
            self._previous = read_status(self._path) or RunStatus()
        try:
            crashes = self._crashes_before(self._previous, restored_step, goes_back)
        except CheckpointError:
            if not is_first_choice:  # from a checkpoint that is damaged: this start was none
                self._begun = None
                self._write(self._previous)
            raise
        self._begun = RunStatus(
            status="running",
            step=restored_step,
            starts=self._previous.starts + 1,
            starts_without_progress=crashes + 1,
            started_at_step=restored_step,
        )
        try:
            self._write(self._begun)
        except OSError as error:
            raise CheckpointError(
                f"cannot be written: {error}. Check space and permissions there, or give another --ckpt_save_path.",
                path=self._path,
            ) from None
        if is_first_choice and self._events is not None:
            self._events.open(run)
            _add_start(self._events, self._begun, self._previous)

    def refuse_crash_loop(self, run: Path, restored_step: int, *, goes_back: bool = False) -> None:
        """Raise the CheckpointError with which `begin` refuses a start, and count none."""
        self._path = run / STATUS_FILE
        self._crashes_before(read_status(self._path) or RunStatus(), restored_step, goes_back)

    def _crashes_before(self, previous: RunStatus, restored_step: int, goes_back: bool) -> int:
        """Return how many starts in a row made no progress before one from a step; a CheckpointError if too many."""
        # Going back counts anew, but not again where the start before went back to the same step.
        step = previous.started_at_step
        gets_nowhere = restored_step == step or (restored_step < step and not goes_back)
        crashes = previous.starts_without_progress if gets_nowhere else 0
        if 0 < self._limit <= crashes:
            raise _crash_loop(self._path, previous, crashes)
        return crashes

    def training(self, state: TrainState) -> None:
        """Count any error from now on as a crash; `state` tells how far the run is."""
        self._state = state

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._begun is None:
            return
        found = read_status(self._path)
        if found is not None and found.starts != self._begun.starts:
            return  # a later start has taken the folder over, and speaks for it
        status = "finished" if error is None else "preempted" if isinstance(error, Preempted) else "failed"
        step = self._state.step if self._state is not None else self._begun.step
        got_nowhere = self._is_crash(error) or self._ran_out_of_time(error, step)
        crashes = self._begun.starts_without_progress - (not got_nowhere)
        ended = replace(
            self._begun, status=status, step=step, reason=self._reason(error), starts_without_progress=crashes
        )
        try:
            self._write(ended)
        except OSError as problem:  # whatever ended the run matters more
            log.warning("%s cannot be written: %s", self._path, problem)
        if self._events is not None:
            self._events.add("end", step, status=status, reason=ended.reason)
            self._events.close()

    def _is_crash(self, error: BaseException | None) -> bool:
        if error is None or isinstance(error, Preempted | KeyboardInterrupt):
            return False
        # A wrong flag is said at once and by all ranks; whoever mends it at the sixth start shall not be refused.
        is_mistake = isinstance(error, PretrainError) and error.is_everywhere and self._state is None
        return not is_mistake

    def _ran_out_of_time(self, error: BaseException | None, step: int) -> bool:
        """Whether the time given was over before a step was done; a later end saves, which is progress."""
        assert self._begun is not None
        if not isinstance(error, Preempted) or step > self._begun.step:
            return False
        return error.is_out_of_time or (self._state is not None and is_out_of_time(self._state.stop))

    def _reason(self, error: BaseException | None) -> str:
        if error is None:
            assert self._state is not None, "a run that ends well has trained, or has found nothing left to train"
            if self._state.early_end:
                return f"stopped early at step {self._state.step} of {self._state.total_steps}: {self._state.early_end}"
            asked = "" if self._state.finished else ", as many as --run_steps asked for"
            return f"{self._state.step} of {self._state.total_steps} steps are done{asked}"
        if isinstance(error, KeyboardInterrupt):
            return "interrupted (Ctrl-C)"
        # A run that goes back by itself may be told to end before it trains again: its steps know of no request.
        if isinstance(error, Preempted) and self._state is not None and self._state.preempted:
            return reason_of(self._state.stop)
        if isinstance(error, PretrainError):
            return str(error)
        return ": ".join(filter(None, (type(error).__name__, str(error))))

    def _write(self, status: RunStatus) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        document = with_checksum(asdict(replace(status, updated=now)))
        write_atomic(self._path, json.dumps(document, indent=1) + "\n")


def _add_start(events: Events, begun: RunStatus, previous: RunStatus) -> None:
    if previous.starts == 0:
        events.add("start", begun.step, number=begun.starts)
        return
    status = "killed" if previous.status == "running" else previous.status  # it, or its machine
    ended = {"previous_status": status, "previous_reason": previous.reason}
    events.add("restart", begun.step, number=begun.starts, **ended)


def read_status(path: Path) -> RunStatus | None:
    """Return the status in a file; None where there is none, or a line says that it is damaged.

    Counting must not keep a run from starting.
    """
    try:
        values, forms = checked_values(read_json(path)), asdict(RunStatus())
        status = RunStatus(**{name: values[name] for name in forms})
        if any(type(value) is not type(forms[name]) for name, value in asdict(status).items()):
            raise ValueError("a value has another form")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s is damaged (%r): starts are counted from here on", path, error)
        return None
    return status


def _crash_loop(path: Path, previous: RunStatus, crashes: int) -> CheckpointError:
    last = previous.reason
    if previous.status == "running":
        last = "it was killed, by a signal or for want of memory"
    starts = "its last start" if crashes == 1 else f"its last {crashes} starts"
    remedy = "mend the cause (--skip_samples leaves out what cannot be trained on)"
    if previous.status == "preempted":
        remedy = "raise --time_limit, or the time of the job (sbatch --time)"
    return CheckpointError(
        f"this run is in a crash loop: {starts} went on from step {previous.started_at_step} and ended before a new "
        f"checkpoint. The last time: {last}\n{path} counts the starts: {remedy}, then repeat the command with "
        "--max_starts_without_progress=0"
    )
