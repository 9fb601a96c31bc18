"""The observer, which reports the steps of a run at an interval.

    collector, throughput --> a report: values by name --> display, metrics.jsonl, trackers

Between reports, the host does not wait. A report waits once.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pretraining.best import Best, Measure
from pretraining.errors import DataError
from pretraining.observability.block_norms import BlockNorms
from pretraining.observability.collector import Collector
from pretraining.observability.display import TASK, Display
from pretraining.observability.events import Events
from pretraining.observability.step_outcome import StepOutcome
from pretraining.observability.stragglers import StragglerWatch
from pretraining.observability.throughput import Stopwatch, Throughput
from pretraining.observability.trackers import Trackers
from pretraining.progress import Interval, Progress, TrainState

log = logging.getLogger(__name__)

MAX_WITHOUT_LABELS = 3
"""Reports in a row without a label that stop the run: its weights only decay."""
NO_LABELS = "with --document_mask=true a token predicts the next one of its document, and these have one token each"


@dataclass
class Observer:
    """The reports of a run, as a context around the loop. The last step of an invocation is always reported.

    Attributes:
        interval: between reports.
        last_loss: latest reported loss, also of an earlier invocation.
        best_loss: lowest loss of the reports that were due.
        step_seconds: mean seconds per step of the latest reports of this invocation.
        newest: latest reported values of this invocation, by name.
        norms: norms by block, for the reports of measured steps; None = none are measured.
    """

    interval: Interval
    collector: Collector
    throughput: Throughput
    display: Display
    stragglers: StragglerWatch
    trackers: Trackers
    events: Events
    last_loss: float | None = None
    best_loss: Best = field(default_factory=lambda: Best(Measure("loss", "loss", None)))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    newest: dict[str, Any] = field(default_factory=dict)
    norms: BlockNorms | None = None
    _unreported: tuple[TrainState, StepOutcome] | None = None

    @property
    def stopwatch(self) -> Stopwatch:
        """Stopwatch of the run."""
        return self.throughput.stopwatch

    def __enter__(self) -> Observer:
        self.display.__enter__()
        self.stopwatch.restart()  # the setup is not training time
        self.stragglers.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None and self._unreported is not None and self._unreported[0].early_end:
            self._report(*self._unreported)  # an evaluation after the step stopped the run
        self.stragglers.stop()
        self.display.__exit__(*raised)
        self.trackers.close()

    def after_step(self, state: TrainState, outcome: StepOutcome) -> None:
        """Add a step to the sums; report if a report is due or the run stops.

        Raises:
            DataError: several reports in a row had no label; the same on all ranks.
        """
        self.collector.end_step(outcome)
        self.display.advance(state.step)
        is_due = self.interval.is_due(state)
        self._unreported = (state, outcome)
        if is_due or state.stopping:
            self._report(state, outcome)
        if is_due:  # an early report at the end of an invocation keeps the sums for the next invocation
            self.collector.clear()
            self.best_loss.record(math.nan if self.last_loss is None else self.last_loss, state.step)
            if (count := self.collector.reports_without_labels) == MAX_WITHOUT_LABELS:
                raise DataError(
                    f"step {state.step}: {count} reports in a row have no label: {NO_LABELS}. Start a new run with "
                    "--document_mask=false, or with a --sep_token, which ends each document"
                )

    def after_evaluation(self, progress: Progress, values: Mapping[str, float], lines: Sequence[str]) -> None:
        """Track the values of an evaluation, and log its lines."""
        for line in lines:
            log.info("step %d  %s", progress.steps, line)
        tracked = self._track(progress, values)
        shown = ("evaluation_loss", f"evaluation_{TASK}")
        self.events.add(
            "evaluation", progress.steps, **{name: tracked[name] for name in tracked if name.startswith(shown)}
        )

    def _report(self, state: TrainState, outcome: StepOutcome) -> None:
        found, span = self.collector.report(outcome)
        values: dict[str, Any] = found
        values |= self.throughput.report(state, span)  # after the all-reduce, which waits for the device
        values |= {} if self.norms is None else self.norms.values()
        self.display.show(state.step, values)
        if self.collector.lacks_labels:
            log.info("step %d  no label in this report: %s", state.step, NO_LABELS)
        seconds: float = values["step_seconds"]
        for line in self.stragglers.report(seconds):
            log.info(line)
        self.step_seconds.append(seconds)
        self.last_loss = self._track(state.progress, values)["loss"]
        self._unreported = None

    def _track(self, progress: Progress, values: Mapping[str, float | None]) -> dict[str, float | None]:
        """Send values to the trackers, with None for NaN and infinity, which JSON lacks; return them."""
        finite = {
            name: None if value is None or not math.isfinite(value) else value
            for name, value in {"tokens_seen": progress.tokens, **values}.items()
        }
        self.newest |= finite
        self.trackers.log(progress.steps, finite)
        return finite
