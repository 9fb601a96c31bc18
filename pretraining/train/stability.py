"""Watches over a run's updates: logs those that are skipped, and ends the run where too many are skipped in a row.

Whether an update is skipped is decided on the device, inside the step. The host learns of it here, one step later, so
that it never waits for the step that is under way. All ranks learn the same at the same step, so they end together.

A run that diverges ends with `DivergenceError`, which `rollback.py` may answer with an earlier checkpoint; one whose
replicas no longer hold the same weights ends with `HardwareError`.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping
from typing import Any

import torch

from pretraining.config.training import GuardConfig
from pretraining.data.loader import Loader
from pretraining.distributed.host_sync import wait_for_device
from pretraining.distributed.processes import Activity, gather_from_every_rank
from pretraining.distributed.replicas import Replicas
from pretraining.errors import DivergenceError, HardwareError
from pretraining.observability.events import Events
from pretraining.observability.step_outcome import StepOutcome
from pretraining.progress import Interval, TrainState

log = logging.getLogger(__name__)


_Pending = tuple[int, torch.Tensor, torch.cuda.Event | None]
"""What the device will say of a step: its number; on the host, whether it was skipped and, where spikes are looked for,
is a spike, loss, mean, deviation; what marks when these are there, None = now."""


class Guards:
    """Learns how every step went, and ends a run that goes wrong.

    Args:
        loader: knows which samples the steps are made of.
        activity: told of every step.
        training_tokens: tokens of one pass over the datasets, for an interval in epochs.
        events: told of each update that was left out.
    """

    def __init__(
        self,
        config: GuardConfig,
        loader: Loader,
        replicas: Replicas,
        activity: Activity,
        training_tokens: int | None,
        events: Events,
    ) -> None:
        self._events = events
        self._most_in_a_row = config.max_skipped_steps
        self._asks = config.max_skipped_steps > 0 or config.spike_threshold is not None
        self._loader = loader
        self._replicas = replicas
        self._replica_check = Interval(config.replica_check_interval, training_tokens)
        self._equal_at = 0
        self._activity = activity
        self._pending: _Pending | None = None
        self._in_a_row = 0
        self._last_step = 0

    def after_step(self, state: TrainState, outcome: StepOutcome) -> None:
        """Take note of a step, and judge the one before it.

        Raises:
            DivergenceError: too many updates in a row were left out; the same on all ranks.
            HardwareError: replicas differ; the same on all ranks.
        """
        self._activity.end_step(state.step)
        self._learn()
        self._pending = _ask(state.step, outcome) if self._asks else None
        if state.stopping:
            self._learn()
        if self._most_in_a_row and self._in_a_row >= self._most_in_a_row:
            self._give_up()
        if self._replica_check.is_due(state):
            self._compare_replicas(state.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, JSON-able; waits for the device."""
        self._learn()
        return {"skipped_in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count that a checkpoint keeps."""
        most = self._most_in_a_row - 1 if self._most_in_a_row else math.inf  # a smaller limit counts from the next step
        self._in_a_row = int(min(state["skipped_in_a_row"], most))

    def _learn(self) -> None:
        if self._pending is None:
            return
        (self._last_step, found, event), self._pending = self._pending, None
        if event is not None:
            wait_for_device(event)
        skipped, *numbers = found.tolist()
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if skipped:
            self._events.add("skip", self._last_step, reason=_reason(numbers), in_a_row=self._in_a_row)
        if self._in_a_row.bit_count() == 1:  # 1, 2, 4, 8 ...: a long row does not flood the log
            log.info("step %d  update left out: %s, %d in a row", self._last_step, _reason(numbers), self._in_a_row)

    def _give_up(self) -> None:
        first, last = self._last_step - self._in_a_row + 1, self._last_step
        mixture = self._loader.reader.mixture
        begin, end = mixture.first_sample(first - 1), mixture.first_sample(last)
        text = (
            f"step {last}: the updates since step {first} were left out, {self._in_a_row} in a row "
            "(--max_skipped_steps), because loss or gradient was not finite or the loss a spike. Start from an earlier "
            "checkpoint (--ckpt_load_path, another --ckpt_save_path) with a smaller --learning_rate, or without their "
            f"samples: --skip_samples={begin}-{end - 1}."
        )
        raise DivergenceError(text, first, last, (begin, end))

    def _compare_replicas(self, step: int) -> None:
        odd = self._replicas.differing_ranks()
        if not odd:
            self._equal_at = step
            return
        hosts = gather_from_every_rank(socket.gethostname)
        lines = (
            f"  rank {rank} on {hosts[rank]} holds other weights than rank {', '.join(map(str, others))}\n"
            for rank, others in odd.items()
        )
        raise HardwareError(
            f"step {step}: replicas are no longer equal (at step {self._equal_at} they were), so a device computes or "
            f"remembers wrongly:\n{''.join(lines)}Take the machine out, remove the checkpoints since then, start again"
        )


def _ask(step: int, outcome: StepOutcome) -> _Pending:
    """Start to copy what the host asks of a step, without waiting."""
    verdict = outcome.verdict
    # A skipped update that lowers the loss scale is no failure: the next steps will show.
    skipped = outcome.skipped if outcome.rescaled is None else outcome.skipped & ~outcome.rescaled
    numbers = skipped.reshape(1)
    if verdict is not None:
        numbers = torch.stack(
            (skipped.float(), verdict.is_spike.float(), verdict.loss, verdict.mean, verdict.deviation)
        )
    if numbers.device.type == "cpu":
        return step, numbers, None
    event = torch.cuda.Event(blocking=True)
    brought = numbers.to("cpu", non_blocking=True)  # into pinned memory
    event.record()
    return step, brought, event


def _reason(numbers: list[float]) -> str:
    if numbers and numbers[0] and math.isfinite(numbers[1]):
        _, loss, mean, deviation = numbers
        return f"its loss of {loss:.4f} is a spike (before: {mean:.4f}, standard deviation {deviation:.4f})"
    return "loss or gradient is not finite"
